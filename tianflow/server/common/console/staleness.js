// Staleness of the trajectories trained on, against the bound: the current values, and a chart over time.

import { Chart, line } from "./charts.js";
import { h, s, setText, show } from "./dom.js";
import { timeSpan } from "./panels.js";
import { boundOf, momentsOf, recentCounts } from "./rows.js";
import { number, percent, valueAxis, whole } from "./scales.js";

const LEVELS = 6;
const COLUMNS = 140;
const TALLEST = 20;
/** Maximum rows of cells; further values share rows. */
const BESIDE = 74;

/** The main panel of a run. */
export class StalenessPanel {
  /** `change(bound)`: request another bound. */
  constructor({ change }) {
    this.worst = h("b", { class: "worst", id: "staleness-now" }, "–");
    this.bound = h("span", { class: "bound", id: "bound-now" }, "–");
    this.unit = h("p", { class: "unit" });
    this.facts = h("dl", { class: "facts" });
    this.values = {};
    for (const name of ["mean", "p99", "min"]) {
      this.values[name] = h("dd", {}, "–");
      this.facts.append(h("div", {}, h("dt", {}, name), this.values[name]));
    }
    this.verdict = h("p", { class: "verdict-line" });
    this.tighter = h("button", { type: "button", class: "step", onclick: () => change(this.now - 1), "aria-label": "Decrease the bound" }, "−");
    this.wider = h("button", { type: "button", class: "step", onclick: () => change(this.now + 1), "aria-label": "Increase the bound" }, "+");
    this.chart = stalenessChart();
    this.now = null;
    this.node = h(
      "section",
      { class: "card hero", "aria-labelledby": "staleness-title" },
      h(
        "div",
        { class: "figure" },
        h("h2", { id: "staleness-title" }, "Staleness"),
        h("p", { class: "big" }, this.worst, h("span", { class: "of" }, "of"), this.bound),
        this.unit,
        this.facts,
        this.verdict,
        h("div", { class: "stepper", role: "group", "aria-label": "Staleness bound" }, this.tighter, h("span", {}, "bound"), this.wider),
      ),
      this.chart.node,
    );
  }

  close() {
    this.chart.close();
  }

  /** `rows` to draw, `all` of them for the numbers of a run that has ended. */
  draw(rows, run, marks) {
    const current = run.staleness ?? {};
    const last = rows.at(-1)?.staleness ?? {};
    this.now = boundOf(current.bound === undefined ? last.bound : current.bound);
    setText(this.worst, whole(current.max ?? last.max ?? NaN));
    setText(this.bound, this.now === null ? (current.bound === "unbounded" ? "∞" : "–") : whole(this.now));
    this.worst.parentElement.classList.toggle("long", this.worst.textContent.length > 2);
    setText(this.unit, current.bound === "unbounded" ? "updates behind the learner at most" : "updates behind the learner at most, of the bound");
    setText(this.values.mean, number(current.mean ?? last.mean));
    setText(this.values.p99, number(current.p99 ?? last.p99));
    setText(this.values.min, number(current.min ?? last.min));
    this.showVerdict(current);
    this.tighter.disabled = this.now === null || this.now <= 0;
    this.chart.draw(stalenessPicture(rows, marks));
  }

  showVerdict(current) {
    const broken = current.violations ?? 0;
    const free = current.bound === "unbounded";
    const known = current.violations !== undefined;
    this.verdict.className = `verdict-line ${!known ? "unknown" : broken ? "bad" : free ? "free" : "good"}`;
    setText(this.verdict, !known ? "" : broken ? `${whole(broken)} above the bound` : free ? "Unbounded" : "Never above the bound");
  }

  /** Whether the run can be changed. */
  allow(allowed) {
    show(this.tighter.parentElement, allowed && this.now !== null);
  }
}

/** The chart of staleness against its bound. */
export function stalenessChart() {
  const chart = new Chart({ title: "Staleness over time", unit: "updates behind, share of the trajectories trained on", css: "tall", right: BESIDE });
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
    y: stalenessAxis(bins, size),
    legend: [
      { key: "share", name: "share, low to high", css: "ramp", text: () => "" },
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

/** Position of a staleness among the bins: the middle of its bin if each value has a bin. */
function place(staleness, size) {
  return size === 1 ? staleness + 0.5 : staleness / size;
}

/** Bin b lies between b and b + 1. Space above the bound shows violations. */
function stalenessAxis(bins, size) {
  const { ticks: round } = valueAxis([0, bins * size - 1], { whole: true, count: 5 });
  const ticks = round.map(({ value, label }) => ({ value: place(value, size), label })).filter(({ value }) => value <= bins);
  return { low: 0, high: bins + Math.max(0.5, 0.12 * bins), ticks };
}

/** Neighbouring rows together, `COLUMNS` at most: shares by staleness for each span of time. */
function grouped(rows) {
  const each = Math.max(1, Math.ceil(rows.length / COLUMNS));
  const columns = [];
  for (let at = 0; at < rows.length; at += each) {
    const part = rows.slice(at, at + each);
    const counts = {};
    for (const row of part) for (const [staleness, count] of Object.entries(row.staleness?.counts ?? {})) counts[staleness] = (counts[staleness] ?? 0) + count;
    const from = part[0].t - (part[0].span_s ?? 0);
    const before = columns.at(-1)?.to ?? from;
    // Polls that nearly touch leave no gap.
    columns.push({ from: from - before < 1.5 ? before : from, to: part.at(-1).t, counts });
  }
  return columns;
}

/** Shares by bin. From 16 on, a value stands for all with the same three first binary digits, and is spread over them. */
function shares(counts, size) {
  const found = new Map();
  const total = Object.values(counts).reduce((sum, count) => sum + count, 0);
  for (const [key, count] of Object.entries(counts)) {
    const staleness = Number(key);
    const width = staleness < 16 ? 1 : 2 ** (Math.floor(Math.log2(staleness)) - 3);
    for (let bin = Math.floor(staleness / size); bin * size < staleness + width; bin += 1) {
      const overlap = Math.min(staleness + width, (bin + 1) * size) - Math.max(staleness, bin * size);
      found.set(bin, (found.get(bin) ?? 0) + (count / total) * (overlap / width));
    }
  }
  return found;
}

/** One path for each shade. */
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

/** The newest shares, beside the chart and on its axis. */
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
