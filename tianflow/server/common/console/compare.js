// Several runs beside each other: their learning curves in one chart each, and a table of results and of settings that differ.

import { ask, runPath } from "./api.js";
import { Chart, dot, line } from "./charts.js";
import { h, setText, show } from "./dom.js";
import { unitOf } from "./learning.js";
import { differing, flattened } from "./flat.js";
import { poll } from "./polling.js";
import { smoothed, speedOf, WINDOW } from "./rates.js";
import { finalReturn, resultsOf, targetText } from "./results.js";
import { duration, number, timeAxis, valueAxis, whole } from "./scales.js";
import { ENDED, shortValue, stateClass } from "./words.js";

const EVERY_MS = 3000;
const POINTS = 400;
const COLOURS = ["c0", "c1", "c2", "c3", "c4", "c6", "c7", "c5"];
const MOST_CHOSEN = 24;
const MOST_OFFERED = 200;
const MOST_EVALUATIONS = 8;
/** Maximum number of runs: each has a colour of its own. */
export const MOST_COMPARED = COLOURS.length;

const ADDRESS = "#/compare?";

/** Address of the comparison of the runs `ids`, with charts of further `statistics`. */
export function pageOfComparison(ids, statistics = []) {
  return ADDRESS + new URLSearchParams([...ids.map((id) => ["run", id]), ...statistics.map((name) => ["statistic", name])]);
}

/** Names of the runs in the address of the page; empty on another page. */
export function compared() {
  return inAddress("run").slice(0, MOST_COMPARED);
}

function inAddress(key) {
  if (!location.hash.startsWith(ADDRESS)) return [];
  return [...new Set(new URLSearchParams(location.hash.slice(ADDRESS.length)).getAll(key))];
}

/** Horizontal axes: the place of a row, its axis, and a place in words. */
const AXES = {
  steps: {
    label: "environment steps",
    of: (row) => row.env_steps,
    axis: (high) => ({ low: 0, high, ticks: valueAxis([0, high], { whole: true, count: 5 }).ticks.filter((tick) => tick.value <= high) }),
    when: (steps) => `${whole(steps)} steps`,
  },
  time: { label: "time", of: (row) => row.t, axis: (high) => timeAxis(0, high), when: (seconds) => duration(seconds) },
};
const learned = (name) => (row) => row.learning?.[name]?.mean;
const CHARTS = [
  { key: "return", title: "Return", unit: "mean of the last 100 episodes; dots: evaluations", of: (row) => row.mean_return, evaluations: true, tall: true },
  { key: "loss", title: "Loss", unit: "mean over updates", of: learned("train/loss") },
  { key: "length", title: "Episode length", unit: "steps, mean of the last 100 episodes", of: (row) => row.mean_length },
  { key: "entropy", title: "Entropy", unit: "nats, mean over updates", of: learned("train/entropy"), optional: true },
  { key: "speed", title: "Speed", unit: `environment steps/s, ${WINDOW}`, of: (row) => speedOf(row, "steps_per_s"), zero: true },
];

const SHOWN = ["train/loss", "train/entropy"];
/** Statistics with a chart of their own. */

const RESULTS = [
  ["State", (run) => h("span", { class: `state ${stateClass(run.state)}` }, run.state)],
  ["Environment", (run) => run.environment ?? "–"],
  ["Algorithm", (run) => run.algorithm ?? "–"],
  ["Final return", (run) => returnText(resultsOf(run))],
  ["Best evaluation", (run, rows) => number(bestOf(rows))],
  ["Steps", (run) => whole(resultsOf(run).steps)],
  ["Updates", (run) => whole(resultsOf(run).updates)],
  ["Steps/s", (run) => number(resultsOf(run).speed)],
  ["Duration", (run) => duration(resultsOf(run).seconds)],
  ["Target", (run) => targetText(resultsOf(run), ENDED.includes(run.state))],
  ["Time to target", (run) => duration(resultsOf(run).reached ?? NaN)],
];

function returnText(results) {
  const { value, from } = finalReturn(results);
  return value === null ? "–" : `${number(value)} (${from})`;
}

/** Evaluations called `name`; those that decide have none. */
function evaluationsOf(rows, name = "") {
  return rows.flatMap((row) => (row.marks ?? []).filter((mark) => mark.kind === "evaluation" && (mark.name ?? "") === name && Number.isFinite(mark.mean_return)).map((mark) => ({ row, value: mark.mean_return })));
}

/** Names of the further evaluations of `runs`. */
function evaluationNames(runs) {
  const names = runs.flatMap(({ rows }) => rows.flatMap((row) => (row.marks ?? []).filter((mark) => mark.kind === "evaluation" && mark.name).map((mark) => mark.name)));
  return [...new Set(names)].sort().slice(0, MOST_EVALUATIONS);
}

/** Specification of the chart of the evaluations called `name`. */
function chartOf(name) {
  return { key: `evaluation-${name}`, title: `Return of evaluation ${name}`, unit: "mean over its episodes", evaluation: name };
}

function bestOf(rows, name = "") {
  const values = evaluationsOf(rows, name).map((found) => found.value);
  return values.length ? Math.max(...values) : null;
}

/** The page that compares the runs `ids`. */
export class CompareView {
  constructor(ids, { status }) {
    this.ids = ids;
    this.status = status;
    this.axis = "steps";
    this.loaded = new Map();
    this.charts = new Map(CHARTS.map((spec) => [spec.key, new Chart({ title: spec.title, unit: spec.unit, css: spec.tall ? "tall wide" : "" })]));
    for (const [key, chart] of this.charts) chart.node.id = `compare-${key}`;
    this.chosen = new Set(inAddress("statistic").slice(0, MOST_CHOSEN));
    this.offered = new Map();
    this.choices = h("div", { class: "choices", role: "group", "aria-label": "Further statistics" });
    this.statistics = h("details", { class: "card", id: "statistics", open: this.chosen.size > 0, hidden: true }, h("summary", {}, "Further statistics"), this.choices);
    this.grid = h("div", { class: "charts" }, ...[...this.charts.values()].map((chart) => chart.node));
    this.problem = h("p", { class: "error", role: "alert", hidden: true });
    this.results = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Results" });
    this.settings = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Settings that differ" });
    this.node = h(
      "div",
      { class: "compare" },
      h("header", { class: "head" }, h("h1", {}, `${ids.length} runs compared`), this.problem),
      this.chooser(),
      this.grid,
      this.statistics,
      h("section", { class: "card", "aria-labelledby": "results-title" }, h("h2", { id: "results-title" }, "Results"), this.results),
      h("section", { class: "card", "aria-labelledby": "differ-title" }, h("h2", { id: "differ-title" }, "Settings that differ"), this.settings),
    );
    document.title = `${ids.length} runs compared · tianflow`;
    this.polling = poll(() => this.update(), { every: EVERY_MS, failed: (error) => this.status.lost(error.message) });
  }

  close() {
    this.polling.stop();
    for (const chart of this.charts.values()) chart.close();
  }

  chooser() {
    const options = Object.entries(AXES).map(([name, { label }]) => {
      const input = h("input", { type: "radio", name: "axis", value: name, checked: name === this.axis });
      input.addEventListener("change", () => {
        this.axis = name;
        this.draw();
      });
      return h("label", {}, input, h("span", {}, label));
    });
    return h("fieldset", { class: "ranges" }, h("legend", {}, "Horizontal axis"), ...options);
  }

  /** Offer the statistics of the loaded runs that have no chart yet. */
  offer(runs) {
    const names = new Set([...this.chosen, ...runs.flatMap(({ rows }) => rows.flatMap((row) => Object.keys(row.learning ?? {})))]);
    const wanted = [...names].filter((name) => !SHOWN.includes(name)).sort().slice(0, MOST_OFFERED);
    show(this.statistics, wanted.length);
    if (wanted.every((name) => this.offered.has(name))) return;
    for (const name of wanted) {
      if (this.offered.has(name)) continue;
      const box = h("input", { type: "checkbox", checked: this.chosen.has(name) });
      box.addEventListener("change", () => this.choose(name, box.checked));
      this.offered.set(name, { box, node: h("label", {}, box, name) });
    }
    const focused = document.activeElement;
    this.choices.replaceChildren(...wanted.map((name) => this.offered.get(name).node));
    if (this.choices.contains(focused)) focused.focus();
  }

  /** Show a chart of the statistic `name`, or remove it. */
  choose(name, chosen) {
    this.chosen[chosen ? "add" : "delete"](name);
    for (const { box } of this.offered.values()) box.disabled = !box.checked && this.chosen.size >= MOST_CHOSEN;
    history.replaceState(null, "", pageOfComparison(this.ids, [...this.chosen]));
    this.draw();
  }

  /** Specifications of all charts, the chosen ones last. */
  specs(runs) {
    const further = evaluationNames(runs).map(chartOf);
    further.push(...[...this.chosen].map((name) => ({ key: `statistic-${name}`, title: name, unit: unitOf(name), of: learned(name) })));
    for (const [key, chart] of this.charts) {
      if (CHARTS.some((spec) => spec.key === key) || further.some((spec) => spec.key === key)) continue;
      chart.close();
      chart.node.remove();
      this.charts.delete(key);
    }
    for (const spec of further) {
      if (this.charts.has(spec.key)) continue;
      const chart = new Chart({ title: spec.title, unit: spec.unit });
      chart.node.id = `compare-${spec.key}`;
      this.charts.set(spec.key, chart);
      this.grid.append(chart.node);
    }
    return [...CHARTS, ...further];
  }

  async update() {
    const problems = [];
    await Promise.all(
      this.ids.map(async (id) => {
        if (ENDED.includes(this.loaded.get(id)?.run.state)) return; // nothing changes any more
        try {
          const [{ data: run }, { data: past }, { data: settings }] = await Promise.all([
            ask(runPath(id)),
            ask(runPath(id, `/history?points=${POINTS}`)),
            ask(runPath(id, "/config")),
          ]);
          this.loaded.set(id, { run, rows: smoothed(past.history), settings: flattened(settings.config) });
        } catch (error) {
          if (error.status === 401 || error.status === 0) throw error;
          problems.push(error.message);
        }
      }),
    );
    this.status.live();
    setText(this.problem, problems.join(" "));
    show(this.problem, problems.length);
    this.draw();
  }

  /** Loaded runs in the order of the address, each with its colour. */
  runs() {
    return this.ids.map((id, at) => ({ id, css: COLOURS[at], ...this.loaded.get(id) })).filter((found) => found.run);
  }

  draw() {
    const runs = this.runs();
    this.offer(runs);
    for (const spec of this.specs(runs)) {
      const picture = pictureOf(spec, runs, AXES[this.axis]);
      const chart = this.charts.get(spec.key);
      show(chart.node, !spec.optional || picture.rows.length > 0);
      chart.draw(picture);
    }
    const results = [...RESULTS, ...evaluationNames(runs).map((name) => [`Best evaluation ${name}`, (_, rows) => number(bestOf(rows, name))])];
    this.results.replaceChildren(tableOf(runs, results.map(([name, of]) => ({ name, cells: runs.map(({ run, rows }) => of({ ...run, last: rows.at(-1) }, rows)) }))));
    const rows = differing(runs.map((found) => found.settings));
    this.settings.replaceChildren(
      rows.length ? tableOf(runs, rows.map(({ path, values }) => ({ name: h("code", {}, path), cells: values.map(shortValue) }))) : h("p", { class: "unit" }, "None."),
    );
  }
}

function tableOf(runs, rows) {
  const heads = runs.map(({ id, css }) => h("th", { scope: "col" }, h("i", { class: `swatch ${css}`, "aria-hidden": "true" }), h("a", { href: `#/runs/${encodeURIComponent(id)}` }, id)));
  return h(
    "table",
    { class: "comparison" },
    h("thead", {}, h("tr", {}, h("td"), ...heads)),
    h("tbody", {}, ...rows.map(({ name, cells }) => h("tr", {}, h("th", { scope: "row" }, name), ...cells.map((cell) => h("td", {}, cell))))),
  );
}

/** What a chart shows: one line for each run, over the chosen axis. */
function pictureOf(spec, runs, axis) {
  const lines = runs.map(({ id, css, rows }) => {
    const values = spec.evaluation ? evaluationsOf(rows, spec.evaluation) : rows.map((row) => ({ row, value: spec.of(row) }));
    const points = values.map(({ row, value }) => ({ t: axis.of(row), value })).filter((point) => Number.isFinite(point.t) && Number.isFinite(point.value));
    const dots = spec.evaluations ? evaluationsOf(rows).map(({ row, value }) => ({ t: axis.of(row), value })) : [];
    return { id, css, points, dots: dots.filter((found) => Number.isFinite(found.t)) };
  });
  const all = lines.flatMap(({ points, dots }) => [...points, ...dots]);
  const places = [...new Set(all.map((point) => point.t))].sort((a, b) => a - b);
  const last = places.at(-1);
  return {
    rows: places.map((t) => ({ t })),
    x: axis.axis(Math.max(1.01 * (last ?? 0), 1)),
    y: valueAxis(all.map((point) => point.value), { zero: Boolean(spec.zero) }),
    when: axis.when,
    marks: [],
    legend: lines.map(({ id, css, points }) => ({ key: id, name: id, css, text: (row) => number(valueAt(points, row.t, row.t === last)) })),
    words: lines.map(({ id, points }) => (points.length ? `${id}: ${number(points.at(-1).value)} at ${axis.when(points.at(-1).t)}.` : `${id}: no data yet.`)).join(" "),
    paint: (frame) => lines.flatMap(({ css, points, dots }) => [
      ...line(frame, points, points.map((point) => point.value), { css, holds: true }),
      ...dots.map((found) => dot(frame, found.t, found.value, css)),
    ]),
  };
}

/** The value of the last point up to `t`. A run that ended before has none there, except with `end`: its last one. */
function valueAt(points, t, end) {
  if (end) return points.at(-1)?.value;
  if (!points.length || t > points.at(-1).t) return undefined;
  return points.findLast((point) => point.t <= t)?.value;
}
