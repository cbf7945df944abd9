// What the console is about: how stale what is trained on was, against the bound. The number now, and all of it over time.

import { Chart, line } from "./charts.js";
import { h, s, say, show } from "./dom.js";
import { timeSpan } from "./panels.js";
import { boundOf, momentsOf, recentCounts } from "./rows.js";
import { number, percent, valueAxis, whole } from "./scales.js";

const LEVELS = 6;
const COLUMNS = 140;
const TALLEST = 20;
/** Rows of cells; older ages share one. */
const BESIDE = 74;

/** The middle of the page. */
export class StalenessPanel {
  /** `change(bound)`: ask for another one. */
  constructor({ change }) {
    this.worst = h("b", { class: "worst", id: "staleness-now" }, "–");
    this.bound = h("span", { class: "bound", id: "bound-now" }, "–");
    this.unit = h("p", { class: "unit" });
    this.facts = h("dl", { class: "facts" });
    this.values = {};
    for (const name of ["mean", "p99", "least"]) {
      this.values[name] = h("dd", {}, "–");
      this.facts.append(h("div", {}, h("dt", {}, name), this.values[name]));
    }
    this.verdict = h("p", { class: "kept" });
    this.tighter = h("button", { type: "button", class: "step", onclick: () => change(this.now - 1), "aria-label": "Bound: one less" }, "−");
    this.wider = h("button", { type: "button", class: "step", onclick: () => change(this.now + 1), "aria-label": "Bound: one more" }, "+");
    this.chart = stalenessChart();
    this.now = null;
    this.node = h(
      "section",
      { class: "card hero", "aria-labelledby": "staleness-title" },
      h(
        "div",
        { class: "figure" },
        h("h2", { id: "staleness-title" }, "Staleness"),
        h("p", { class: "big" }, this.worst, h("span", { class: "of" }, " of "), this.bound),
        this.unit,
        this.facts,
        this.verdict,
        h("div", { class: "stepper", role: "group", "aria-label": "Bound of staleness" }, this.tighter, h("span", {}, "bound"), this.wider),
      ),
      this.chart.node,
    );
  }

  close() {
    this.chart.close();
  }

  /** `rows` to draw, `all` of them for the numbers of a run that has ended. */
  draw(rows, run, marks) {
    const told = run.staleness ?? {};
    const last = rows.at(-1)?.staleness ?? {};
    this.now = boundOf(told.bound === undefined ? last.bound : told.bound);
    say(this.worst, whole(told.max ?? last.max ?? NaN));
    say(this.bound, this.now === null ? (told.bound === "unbounded" ? "∞" : "–") : whole(this.now));
    this.worst.parentElement.classList.toggle("long", this.worst.textContent.length > 2);
    say(this.unit, told.bound === "unbounded" ? "updates behind at most, without a bound" : "updates behind at most, of those allowed");
    say(this.values.mean, number(told.mean ?? last.mean));
    say(this.values.p99, number(told.p99 ?? last.p99));
    say(this.values.least, number(told.min ?? last.min));
    this.judge(told);
    this.tighter.disabled = this.now === null || this.now <= 0;
    this.chart.draw(stalenessPicture(rows, marks));
  }

  judge(told) {
    const broken = told.violations ?? 0;
    const free = told.bound === "unbounded";
    this.verdict.className = `kept ${broken ? "bad" : free ? "free" : "good"}`;
    say(this.verdict, broken ? `${whole(broken)} beyond the bound in force` : free ? "There is no bound" : "Never beyond the bound");
    show(this.verdict, told.violations !== undefined);
  }

  /** Whether the run can be changed. */
  allow(allowed) {
    show(this.tighter.parentElement, allowed && this.now !== null);
  }
}

/** The chart of staleness against its bound. */
export function stalenessChart() {
  const chart = new Chart({ title: "Staleness over time", unit: "updates behind, share of what was trained on", css: "tall", right: BESIDE });
  chart.node.id = "chart-staleness";
  return chart;
}

/** What it draws of `rows`. */
export function stalenessPicture(rows, marks) {
  const recent = recentCounts(rows);
  const bounds = rows.map((row) => boundOf(row.staleness?.bound));
  const tallest = Math.max(1, ...bounds.filter(Number.isFinite), ...rows.map((row) => row.staleness?.max ?? 0));
  const size = Math.max(1, Math.ceil((tallest + 1) / TALLEST));
  const bins = Math.ceil((tallest + 1) / size);
  const columns = grouped(rows).map((column) => ({ ...column, shares: shares(column.counts, size) }));
  const peak = Math.max(0.01, ...columns.flatMap((column) => [...column.shares.values()]));
  const now = momentsOf(recent);
  const bound = bounds.at(-1);
  return {
    rows,
    marks,
    x: timeSpan(rows),
    y: ageAxis(bins, size),
    legend: [
      { key: "share", name: "share, few to most", css: "ramp", text: () => "" },
      { key: "mean", name: "mean", css: "ink", text: (row) => number(row.staleness?.mean) },
      { key: "bound", name: "bound", css: "c1 steps", text: (row) => (Number.isFinite(row.staleness?.bound) ? whole(row.staleness.bound) : "none") },
    ],
    words: `Now from ${number(now.min)} to ${number(now.max)}, mean ${number(now.mean)}; bound ${Number.isFinite(bound) ? bound : "none"}.`,
    paint: (frame) => [
      ...cells(frame, columns, peak),
      ...line(frame, rows, rows.map((row) => place(row.staleness?.mean ?? NaN, size)), { css: "ink" }),
      ...line(frame, rows, bounds.map((value) => (value === null ? NaN : (value + 1) / size)), { css: "c1 limit", steps: true }),
    ],
    beside: (frame) => marginal(frame, recent, size, bins),
  };
}

/** Where an age is among bins: in the middle of its own where each age has one. */
function place(age, size) {
  return size === 1 ? age + 0.5 : age / size;
}

/** Bin b lies between b and b + 1; there is some room above, so that what goes beyond the bound is seen. */
function ageAxis(bins, size) {
  const { ticks: round } = valueAxis([0, bins * size - 1], { whole: true, count: 5 });
  const ticks = round.map(({ value, label }) => ({ value: place(value, size), label })).filter(({ value }) => value <= bins);
  return { low: 0, high: bins + Math.max(0.5, 0.12 * bins), ticks };
}

/** Neighbouring rows together, `COLUMNS` at most: shares of each age, from one time to another. */
function grouped(rows) {
  const each = Math.max(1, Math.ceil(rows.length / COLUMNS));
  const columns = [];
  for (let at = 0; at < rows.length; at += each) {
    const part = rows.slice(at, at + each);
    const counts = {};
    for (const row of part) for (const [age, count] of Object.entries(row.staleness?.counts ?? {})) counts[age] = (counts[age] ?? 0) + count;
    const from = part[0].t - (part[0].span_s ?? 0);
    const before = columns.at(-1)?.to ?? from;
    // Where looks follow each other a hair's breadth apart, there is no gap.
    columns.push({ from: from - before < 1.5 ? before : from, to: part.at(-1).t, counts });
  }
  return columns;
}

/** Shares by bin. From 16 on an age stands for all that have its three first binary digits, and is spread over them. */
function shares(counts, size) {
  const found = new Map();
  const total = Object.values(counts).reduce((sum, count) => sum + count, 0);
  for (const [key, count] of Object.entries(counts)) {
    const age = Number(key);
    const width = age < 16 ? 1 : 2 ** (Math.floor(Math.log2(age)) - 3);
    for (let bin = Math.floor(age / size); bin * size < age + width; bin += 1) {
      const overlap = Math.min(age + width, (bin + 1) * size) - Math.max(age, bin * size);
      found.set(bin, (found.get(bin) ?? 0) + (count / total) * (overlap / width));
    }
  }
  return found;
}

/** One path for each level of darkness. */
function cells(frame, columns, peak) {
  const paths = Array.from({ length: LEVELS }, () => "");
  for (const { from, to, shares: found } of columns) {
    const x = frame.x(from);
    const width = Math.max(0.6, frame.x(to) - x);
    for (const [bin, share] of found) {
      const level = Math.min(LEVELS - 1, Math.floor(Math.sqrt(share / peak) * LEVELS));
      const top = frame.y(bin + 1);
      paths[level] += `M${x} ${top}h${width}V${frame.y(bin)}h${-width}Z`;
    }
  }
  return paths.map((path, level) => s("path", { class: `cell level${level}`, d: path || "M0 0" }));
}

/** The newest shares, beside the picture and on its axis. */
function marginal(frame, counts, size, bins) {
  const nodes = [];
  const found = shares(counts, size);
  const room = BESIDE - 46;
  for (let bin = 0; bin < bins; bin += 1) {
    const share = found.get(bin) ?? 0;
    if (share === 0) continue;
    const [top, bottom] = [frame.y(bin + 1), frame.y(bin)];
    const gap = bottom - top > 6 ? 1.5 : 0.25;
    const width = Math.max(1, room * share);
    nodes.push(s("rect", { class: "beside", x: frame.right + 6, y: top + gap, width, height: Math.max(0.5, bottom - top - 2 * gap) }));
    if (share >= 0.015 && (bottom - top >= 12 || share >= 0.3)) {
      nodes.push(s("text", { x: frame.right + 10 + width, y: (top + bottom) / 2, dy: "0.32em" }, percent(share)));
    }
  }
  return nodes;
}
