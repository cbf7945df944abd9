// History rows of a run, oldest first, as in `history.jsonl`: those of the server, then one for each poll.

import { smoothed, speedOf } from "./rates.js";

const MOST = 2400;
const USED = 1000;
const RECENT_S = 30;
const LONGEST_GAP_S = 20;

/** Rows of one run. */
export class Rows {
  constructor() {
    this.rows = [];
    this.base = null;
    this.before = null;
  }

  /** Start with the server's history. `answer`: of `…/history`; `run`: the document of an active run at about the same time. */
  begin(answer, run) {
    this.rows = Array.isArray(answer?.history) ? answer.history.filter((row) => Number.isFinite(row?.t)) : [];
    const last = this.rows.at(-1);
    const time = answer?.time ?? Date.now() / 1000;
    const elapsed = run?.elapsed_s ?? 0;
    const t = last ? Math.max(last.t, last.t + (time - (last.time ?? time))) : elapsed;
    this.base = { t, time, elapsed };
    this.before = run?.progress ? run : null;
  }

  /** Add a poll of an active run. */
  add(run) {
    const passed = run.elapsed_s - this.base.elapsed;
    const row = between(this.before, run, this.base.t + passed, this.base.time + passed);
    this.before = run;
    if (row === null || row.t <= (this.rows.at(-1)?.t ?? -Infinity)) return;
    this.rows.push(row);
    if (this.rows.length > MOST) this.rows = [...halved(this.rows.slice(0, MOST / 2)), ...this.rows.slice(MOST / 2)];
  }

  /** True if the server's history is needed: there was no poll for a while, or the run restarted. */
  breaks(run) {
    if (this.base === null || this.before === null) return true;
    const passed = run.elapsed_s - this.before.elapsed_s;
    return passed < 0 || passed > LONGEST_GAP_S;
  }

  /** The newest `seconds` (0: all), in at most `most` rows. */
  window(seconds, most) {
    const end = this.rows.at(-1)?.t ?? 0;
    const first = seconds ? this.rows.findIndex((row) => row.t >= end - seconds) : 0;
    let found = smoothed(this.rows).slice(Math.max(0, first - 1));
    while (found.length > most) found = halved(found);
    return found;
  }

  /** Seconds since the start of the run for a Unix time; null: before the first row. */
  at(unix) {
    const after = this.rows.find((row) => (row.time ?? -Infinity) >= unix);
    const near = after ?? this.rows.at(-1);
    if (!near || near.time === undefined) return null;
    const t = near.t - (near.time - unix);
    return t < (this.rows[0].t - (this.rows[0].span_s ?? 0)) - 1 ? null : t;
  }
}

function between(before, run, t, time) {
  if (before === null) return null;
  const span = run.elapsed_s - before.elapsed_s;
  if (span <= 0) return null;
  const rate = (key) => (run.progress[key] - before.progress[key]) / span;
  return {
    t,
    time,
    span_s: span,
    state: run.state,
    env_steps: run.progress.env_steps,
    updates: run.progress.updates,
    mean_return: run.returns?.mean ?? null,
    mean_length: run.returns?.mean_length ?? null,
    learning: Object.fromEntries(Object.entries(run.learning?.values ?? {}).map(([name, value]) => [name, { count: 1, mean: value }])),
    steps_per_s: rate("env_steps"),
    updates_per_s: rate("updates"),
    staleness: stalenessBetween(before.staleness, run.staleness),
    shares: shares(run),
    queue: run.queue?.trajectories ?? null,
    credits: { limit: run.credits?.limit ?? null, in_use: run.credits?.in_use ?? null },
    dropped: run.trajectories?.dropped ?? {},
    replay: run.replay,
    marks: evaluationMarks(before, run, t),
  };
}

/** Marks of new evaluations. Further ones have a name. */
function evaluationMarks(before, run, t) {
  const isNew = (now, old) => now && JSON.stringify(now) !== JSON.stringify(old);
  const main = isNew(run.evaluation, before.evaluation) ? [{ t, kind: "evaluation", ...run.evaluation }] : [];
  const further = Object.entries(run.further_evaluations ?? {}).filter(([name, found]) => isNew(found, before.further_evaluations?.[name]));
  return [...main, ...further.map(([name, found]) => ({ t, kind: "evaluation", name, ...found }))];
}

/** Recent shares of time by role; current states of components while the run does not train. */
function shares(run) {
  const found = { ...run.diagnosis?.shares };
  const components = run.components ?? [];
  for (const role of new Set(components.map((component) => component.role))) {
    if (found[role]) continue;
    const states = components.filter((component) => component.role === role).map((component) => component.state);
    found[role] = {};
    for (const state of states) found[role][state] = (found[role][state] ?? 0) + 1 / states.length;
  }
  return found;
}

function stalenessBetween(before, now) {
  const counts = {};
  for (const [staleness, count] of Object.entries(now?.counts ?? {})) {
    const more = count - (before?.counts?.[staleness] ?? 0);
    if (more > 0) counts[staleness] = more;
  }
  return { ...momentsOf(counts), bound: boundOf(now?.bound), counts };
}

/** A bound as a number; null: unbounded. */
export function boundOf(bound) {
  return typeof bound === "number" ? bound : null;
}

/** Minimum, mean, 99th percentile and maximum of a histogram by staleness. */
export function momentsOf(counts) {
  const levels = Object.keys(counts).map(Number).sort((a, b) => a - b);
  const total = levels.reduce((sum, staleness) => sum + counts[staleness], 0);
  if (total === 0) return { count: 0, min: null, mean: null, p99: null, max: null };
  let seen = 0;
  const p99 = levels.find((staleness) => (seen += counts[staleness]) >= Math.ceil(0.99 * total));
  const mean = levels.reduce((sum, staleness) => sum + staleness * counts[staleness], 0) / total;
  return { count: total, min: levels[0], mean, p99, max: levels.at(-1) };
}

/** Counts of the newest rows: of `USED` trajectories or `RECENT_S` seconds. */
export function recentCounts(rows) {
  const counts = {};
  let total = 0;
  let covered = 0;
  for (let at = rows.length - 1; at >= 0 && total < USED && covered < RECENT_S; at -= 1) {
    covered += rows[at].span_s ?? 0;
    for (const [staleness, count] of Object.entries(rows[at].staleness?.counts ?? {})) {
      counts[staleness] = (counts[staleness] ?? 0) + count;
      total += count;
    }
  }
  return counts;
}

// Merging, as in `tianflow.rundir.history` -----------------------------------------------------------------------------------

function halved(rows) {
  const found = [];
  for (let at = 0; at < rows.length; at += 2) found.push(at + 1 < rows.length ? merged(rows[at], rows[at + 1]) : rows[at]);
  return found;
}

function merged(older, newer) {
  const weights = [older.span_s ?? 0, newer.span_s ?? 0];
  const row = { ...newer, span_s: weights[0] + weights[1], marks: [...(older.marks ?? []), ...(newer.marks ?? [])] };
  for (const rate of ["steps_per_s", "updates_per_s"]) row[rate] = mean(older[rate], newer[rate], weights);
  if (older.smooth || newer.smooth) {
    row.smooth = Object.fromEntries(["steps_per_s", "updates_per_s"].map((rate) => [rate, mean(speedOf(older, rate), speedOf(newer, rate), weights)]));
  }
  row.staleness = mergedStaleness(older.staleness ?? {}, newer.staleness ?? {});
  row.learning = mergedLearning(older.learning ?? {}, newer.learning ?? {});
  row.shares = {};
  for (const role of new Set([...Object.keys(older.shares ?? {}), ...Object.keys(newer.shares ?? {})])) {
    const [first, second] = [older.shares?.[role], newer.shares?.[role]];
    row.shares[role] = first && second ? mergedShares(first, second, weights) : (second ?? first);
  }
  return row;
}

function mergedShares(first, second, weights) {
  const found = {};
  for (const state of new Set([...Object.keys(first), ...Object.keys(second)])) {
    found[state] = mean(first[state] ?? 0, second[state] ?? 0, weights);
  }
  return found;
}

function mergedLearning(older, newer) {
  const found = { ...older, ...newer };
  for (const name of Object.keys(older).filter((name) => name in newer)) {
    const counts = [older[name]?.count ?? 0, newer[name]?.count ?? 0];
    found[name] = { count: counts[0] + counts[1], mean: mean(older[name]?.mean, newer[name]?.mean, counts) };
  }
  return found;
}

function mergedStaleness(older, newer) {
  const known = (key) => [older[key], newer[key]].filter((value) => Number.isFinite(value));
  const counts = { ...older.counts };
  for (const [staleness, count] of Object.entries(newer.counts ?? {})) counts[staleness] = (counts[staleness] ?? 0) + count;
  const unbounded = older.bound === null || newer.bound === null;
  return {
    count: (older.count ?? 0) + (newer.count ?? 0),
    min: known("min").length ? Math.min(...known("min")) : null,
    mean: mean(older.mean, newer.mean, [older.count ?? 0, newer.count ?? 0]),
    p99: known("p99").length ? Math.max(...known("p99")) : null,
    max: known("max").length ? Math.max(...known("max")) : null,
    bound: unbounded || !known("bound").length ? null : Math.max(...known("bound")),
    counts,
  };
}

function mean(first, second, weights) {
  if (!Number.isFinite(first) || !Number.isFinite(second) || weights[0] + weights[1] <= 0) return Number.isFinite(second) ? second : (first ?? null);
  return (first * weights[0] + second * weights[1]) / (weights[0] + weights[1]);
}
