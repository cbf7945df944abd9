// The charts of a run.

import { area, Chart, dot, line } from "./charts.js";
import { furtherCharts, LEARNING, OF_ALGORITHMS } from "./learning.js";
import { speedOf, WINDOW } from "./rates.js";
import { number, percent, timeAxis, valueAxis } from "./scales.js";

export const MOST_ROWS = 480;
/** Maximum rows in a chart; more rows than pixels only cost time. */

const STATES = {
  busy: "c2",
  "waiting:batch": "c1",
  "waiting:grant": "c1",
  "waiting:turn": "c7",
  "waiting:request": "c5",
  paused: "c4",
  checkpoint: "c0",
  rebuilding: "c3",
  starting: "c5",
};
const OTHERS = ["c6", "c3", "c7", "c0"];
const FURTHER = ["c4", "c5", "c6", "c7", "c1"];
/** Colours of further evaluations; the main one is c3. */

/** Colour of a component's state, the same in all charts. */
export function stateColour(state) {
  if (STATES[state]) return STATES[state];
  let sum = 0;
  for (const letter of state) sum += letter.codePointAt(0);
  return OTHERS[sum % OTHERS.length];
}

const LINES = [
  {
    key: "return",
    title: "Return",
    unit: "mean of the last 100 episodes",
    zero: false,
    dots: (row) => (row.marks ?? []).filter((mark) => mark.kind === "evaluation" && Number.isFinite(mark.mean_return)),
    lines: (run) => [
      { name: "mean", css: "c0", of: (row) => row.mean_return },
      Number.isFinite(run.target?.return) && run.target.return < 1e5 && { name: "target", css: "c2", steps: true, of: () => run.target.return },
    ],
  },
  ...LEARNING,
  {
    key: "speed",
    title: "Speed",
    unit: `environment steps/s, ${WINDOW}`,
    lines: () => [{ name: "steps/s", css: "c0", of: (row) => speedOf(row, "steps_per_s") }],
  },
  { key: "learner-time", title: "Learner", unit: "share of its time", shares: "learner" },
  { key: "actor-time", title: "Actors", unit: "mean share of their time", shares: "actor" },
  {
    key: "queue",
    title: "Queue and credits",
    unit: "trajectories",
    whole: true,
    lines: () => [
      { name: "queued", css: "c0", of: (row) => row.queue },
      { name: "credits in use", css: "c2", of: (row) => row.credits?.in_use },
      { name: "credits", css: "c1", steps: true, of: (row) => row.credits?.limit },
    ],
  },
  {
    key: "updates",
    title: "Updates",
    unit: `per second, ${WINDOW}`,
    lines: () => [{ name: "updates/s", css: "c4", of: (row) => speedOf(row, "updates_per_s") }],
  },
  {
    key: "dropped",
    title: "Dropped",
    unit: "trajectories, since the process started",
    whole: true,
    // shown before the first drop, which would move what is below it
    lines: (_, rows) => {
      const reasons = [...new Set(rows.flatMap((row) => Object.keys(row.dropped ?? {})))].sort();
      if (!reasons.length) return [{ name: "none", css: "c5", of: (row) => (row.dropped ? 0 : NaN) }];
      return reasons.map((reason, at) => ({ name: reason, css: `c${at % 8}`, of: (row) => row.dropped?.[reason] ?? 0 }));
    },
  },
  {
    key: "replay-items",
    title: "Replay",
    unit: "items",
    whole: true,
    when: (rows) => rows.some((row) => row.replay),
    lines: () => [
      { name: "items", css: "c0", of: (row) => row.replay?.items },
      { name: "capacity", css: "c1", steps: true, of: (row) => row.replay?.capacity },
    ],
  },
  {
    key: "replay-ratio",
    title: "Samples per insert",
    unit: "drawn items per inserted item",
    when: (rows) => rows.some((row) => row.replay),
    lines: () => [
      { name: "ratio", css: "c0", of: (row) => row.replay?.samples_per_insert },
      { name: "target", css: "c1", steps: true, of: (row) => row.replay?.samples_per_insert_target },
    ],
  },
  {
    key: "replay-held",
    title: "Delayed by replay",
    unit: "share of time",
    percent: true,
    when: (rows) => rows.some((row) => row.replay),
    lines: () => [
      { name: "actors", css: "c2", of: (row) => row.replay?.held_back?.insert },
      { name: "learner", css: "c1", of: (row) => row.replay?.held_back?.draw },
    ],
  },
  ...OF_ALGORITHMS,
];

/** All charts except staleness, in a grid. */
export class Panels {
  constructor(grid) {
    this.grid = grid;
    this.charts = new Map();
    grid.replaceChildren();
    for (const spec of LINES) this.chart(spec);
  }

  /** The chart of `spec`, appended to the grid at its first use. */
  chart(spec) {
    let chart = this.charts.get(spec.key);
    if (!chart) {
      chart = new Chart({ title: spec.title, unit: spec.unit, css: spec.shares ? "shares" : "" });
      chart.node.id = `chart-${spec.key}`;
      this.charts.set(spec.key, chart);
      this.grid.append(chart.node);
    }
    return chart;
  }

  close() {
    for (const chart of this.charts.values()) chart.close();
  }

  /** Draw `rows`, with the run's document and `marks`. */
  draw(rows, run, marks) {
    const x = timeSpan(rows);
    for (const spec of [...LINES, ...furtherCharts(rows)]) {
      const chart = this.chart(spec);
      const shown = spec.when ? spec.when(rows) : true;
      if (chart.node.hidden === shown) chart.node.hidden = !shown;
      if (shown) chart.draw({ rows, x, marks, ...(spec.shares ? sharePicture(spec.shares, rows) : linePicture(spec, rows, run)) });
    }
  }
}

/** Time axis of `rows`. */
export function timeSpan(rows) {
  const first = rows.length ? rows[0].t - (rows.length > 1 ? 0 : (rows[0].span_s ?? 0)) : 0;
  const last = rows.at(-1)?.t ?? 1;
  return timeAxis(first < 0.05 * last ? 0 : first, Math.max(last, first + 10));
}

/** Series over time. `spec.lines(run, rows)` gives each: name, css, steps, and its value of a row. */
export function linePicture(spec, rows, run) {
  const lines = spec
    .lines(run, rows)
    .filter(Boolean)
    .map((found) => ({ ...found, values: rows.map(found.of) }));
  const dots = spec.dots ? rows.flatMap(spec.dots) : [];
  const known = [...lines.flatMap((found) => found.values), ...dots.map((found) => found.mean_return)];
  const text = spec.percent ? percent : number;
  const y = spec.percent ? valueAxis([...known, 1], { unit: 0.01, suffix: "%", count: 4 }) : valueAxis(known, { zero: spec.zero ?? true, whole: spec.whole });
  const shown = lines.filter((found) => !found.steps || found.values.some(Number.isFinite));
  const legend = shown.map((found) => ({
    key: found.name,
    name: found.name,
    css: found.css + (found.steps ? " steps" : ""),
    text: (row) => text(found.of(row) ?? (found.holds && row === rows.at(-1) ? found.values.findLast(Number.isFinite) : undefined)),
  }));
  const names = [...new Set(dots.map((found) => found.name ?? ""))].sort();
  const dotColour = (name) => (name ? FURTHER[(names.filter(Boolean).indexOf(name)) % FURTHER.length] : "c3");
  for (const name of names) {
    const newest = dots.findLast((found) => (found.name ?? "") === name);
    legend.push({ key: `evaluations ${name}`.trim(), name: name ? `evaluation ${name}` : "last evaluation", css: `${dotColour(name)} round`, text: () => number(newest.mean_return) });
  }
  return {
    y,
    legend,
    words: lines.map((found) => inWords(found.name, found.values, text)).join(" "),
    paint: (frame) => [
      ...shown.flatMap((found) => line(frame, rows, found.values, found)),
      ...dots.map((found) => dot(frame, found.t, found.mean_return, dotColour(found.name ?? ""))),
    ],
  };
}

/** Shares of time of a role, stacked. */
export function sharePicture(role, rows) {
  const totals = {};
  for (const row of rows) for (const [state, share] of Object.entries(row.shares?.[role] ?? {})) totals[state] = (totals[state] ?? 0) + share;
  const states = Object.keys(totals).sort((a, b) => (b === "busy") - (a === "busy") || a.localeCompare(b));
  const low = rows.map((row) => (row.shares?.[role] ? 0 : NaN));
  const layers = states.map((state) => {
    const from = [...low];
    rows.forEach((row, at) => (low[at] += row.shares?.[role]?.[state] ?? 0));
    return { state, from, to: [...low] };
  });
  const of = (state) => (row) => (row.shares?.[role] ? percent(row.shares[role][state] ?? 0) : percent(NaN));
  return {
    y: valueAxis([0, 1], { count: 2, unit: 0.01, suffix: "%" }),
    legend: states.map((state) => ({ key: state, name: stateName(state), css: `${stateColour(state)} block`, text: of(state) })),
    words: states.map((state) => `${stateName(state)}: ${percent(totals[state] / rows.length)} on average.`).join(" ") || "No data yet.",
    paint: (frame) => layers.map(({ state, from, to }) => area(frame, rows, from, to, stateColour(state))),
  };
}

/** Name of a component's state. */
export function stateName(state) {
  const [what, on] = state.split(":");
  return on ? `${what} for ${on}` : what;
}

function inWords(name, values, text) {
  const known = values.filter(Number.isFinite);
  if (!known.length) return `${name}: no data yet.`;
  return `${name}: ${text(known.at(-1))} now, from ${text(Math.min(...known))} to ${text(Math.max(...known))}.`;
}
