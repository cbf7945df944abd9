// Columns of the list of runs: their texts and their order, and the filter.

import { steadySpeed } from "./rates.js";
import { finalReturn, moment, resultsOf } from "./results.js";
import { duration, number, whole } from "./scales.js";
import { ENDED } from "./words.js";

/**
 * `of(run)` is the value that sorts, null without one. `text(run)` is shown, `note(run)` in small beside it. `least`: columns
 * that a narrow page shows, too. `down`: the first order is descending.
 */
export const COLUMNS = [
  { name: "Run", of: (run) => run.id, least: true },
  { name: "State", of: (run) => run.state, least: true },
  { name: "Started", of: (run) => run.started ?? run.submitted, text: (run) => moment(run.started), down: true },
  { name: "Duration", of: (run) => resultsOf(run).seconds, text: (run) => duration(resultsOf(run).seconds), down: true },
  { name: "Environment", of: (run) => run.environment, long: true },
  { name: "Algorithm", of: (run) => run.algorithm },
  { name: "Steps", of: (run) => resultsOf(run).steps, text: (run) => whole(resultsOf(run).steps), down: true, number: true },
  { name: "Steps/s", of: (run) => steadySpeed(run.throughput), text: (run) => number(steadySpeed(run.throughput)), down: true, number: true },
  {
    name: "Return",
    of: (run) => finalReturn(resultsOf(run)).value,
    text: (run) => number(finalReturn(resultsOf(run)).value),
    note: (run) => finalReturn(resultsOf(run)).from,
    least: true,
    down: true,
    number: true,
  },
  { name: "Staleness", of: (run) => run.staleness?.max, text: stalenessText, down: true, number: true },
  { name: "Diagnosis", of: (run) => remark(run) || null, text: (run) => remark(run) || "–", long: true },
];

function stalenessText({ staleness }) {
  if (!Number.isFinite(staleness?.max)) return "–";
  return `${whole(staleness.max)} of ${staleness.bound === "unbounded" ? "∞" : staleness.bound}`;
}

/** The diagnosis of an active run, or why a run has ended or waits. Reasons of a run on disk only say where it is. */
function remark(run) {
  if (run.on_disk) return run.end_reason ?? "";
  return run.bottleneck ?? (run.reasons ?? []).join("; ");
}

/** Text of `column` for `run`. */
export function textOf(column, run) {
  return column.text ? column.text(run) : (column.of(run) ?? "–");
}

/** `runs` in the order of `column`; runs without a value are last in both directions. */
export function sorted(runs, column, down) {
  const sign = down ? -1 : 1;
  return runs
    .map((run, place) => ({ run, place, value: column.of(run) ?? null }))
    .sort((a, b) => {
      if (a.value === null || b.value === null) return (a.value === null) - (b.value === null) || a.place - b.place;
      return sign * compared(a.value, b.value) || a.place - b.place;
    })
    .map(({ run }) => run);
}

function compared(first, second) {
  if (typeof first === "number" && typeof second === "number") return first - second;
  return String(first).localeCompare(String(second), "en", { numeric: true });
}

/** States of the filter; the first one is every run. */
export const STATES = {
  "": "All states",
  active: "Active",
  pending: "Pending",
  done: "Done",
  failed: "Failed",
  stopped: "Stopped",
  interrupted: "Interrupted",
  "on disk": "On disk",
};

/** Whether `run` has each word of `text` in a column, and the state of the filter. */
export function fits(run, text, state) {
  const active = run.state !== "pending" && !ENDED.includes(run.state);
  const has = { active, "on disk": Boolean(run.on_disk) }[state] ?? run.state === state;
  if (state && !has) return false;
  const shown = [run.id, run.state, run.environment, run.algorithm, remark(run)].join("\n").toLowerCase();
  return text.toLowerCase().split(/\s+/).every((word) => shown.includes(word));
}
