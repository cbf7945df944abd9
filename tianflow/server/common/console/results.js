// What a run has reached, from its document: of an active run, of an ended one with a summary, or of a row of the list.

import { speedOf, steadySpeed } from "./rates.js";
import { duration, number } from "./scales.js";

/**
 * Numbers of `run`; undefined or null where there are none. A run without a summary, because it was killed, has those of `last`,
 * the newest row of its history.
 */
export function resultsOf(run) {
  const summary = run.summary ?? {};
  const last = run.last ?? {};
  return {
    steps: run.progress?.env_steps ?? summary.env_steps ?? last.env_steps,
    updates: run.progress?.updates ?? summary.updates ?? last.updates,
    episodes: run.progress?.episodes ?? summary.episodes ?? last.episodes,
    speed: steadySpeed(run.throughput) ?? summary.steps_per_s ?? (run.state === "running" ? speedOf(last, "steps_per_s") : undefined),
    training: run.returns?.mean ?? summary.mean_return ?? last.mean_return,
    evaluation: run.evaluation?.mean_return ?? summary.evaluation?.mean_return,
    target: run.target?.return ?? summary.target_return,
    reached: run.target?.reached_after_s ?? summary.time_to_target_s,
    seconds: secondsOf(run),
  };
}

/** Seconds since the start of `run`, until its end. */
function secondsOf(run) {
  if (Number.isFinite(run.elapsed_s)) return run.elapsed_s;
  if (!Number.isFinite(run.started)) return undefined;
  return (run.ended ?? Date.now() / 1000) - run.started;
}

/** The return that counts: of the newest evaluation, else of training. `from`: which of them. */
export function finalReturn({ evaluation, training }) {
  if (Number.isFinite(evaluation)) return { value: evaluation, from: "evaluation" };
  return Number.isFinite(training) ? { value: training, from: "training" } : { value: null, from: "" };
}

/** The target of an ended run and whether it was reached, short. */
export function targetMet({ target, reached }) {
  return Number.isFinite(target) ? `${number(target)} ${Number.isFinite(reached) ? "reached" : "missed"}` : "–";
}

/** The target and when it was reached, in words; "–" without a target. */
export function targetText({ target, reached }, ended) {
  if (!Number.isFinite(target)) return "–";
  if (Number.isFinite(reached)) return `${number(target)} after ${duration(reached)}`;
  return `${number(target)}, ${ended ? "not reached" : "not yet"}`;
}

/** A Unix time, short: the time of today, or the day and the time. */
export function moment(unix) {
  if (!Number.isFinite(unix)) return "–";
  const when = new Date(unix * 1000);
  const time = when.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
  if (when.toDateString() === new Date().toDateString()) return time;
  const year = when.getFullYear() === new Date().getFullYear() ? {} : { year: "numeric" };
  return `${when.toLocaleDateString([], { day: "numeric", month: "short", ...year })} ${time}`;
}
