// SVG charts: a frame with axes, lines and areas. All charts of the page share one cursor.

import { h, newId, s, setText } from "./dom.js";
import { duration } from "./scales.js";

const ROOM = { left: 54, right: 10, top: 10, bottom: 22 };
const FAR_MS = 10_000;
const cursor = new EventTarget();
let pointed = null;

function point(t) {
  if (t === pointed) return;
  pointed = t;
  cursor.dispatchEvent(new Event("move"));
}

/** Coordinates of one drawing. */
class Frame {
  constructor(width, height, xAxis, yAxis, right) {
    Object.assign(this, { width, height, xAxis, yAxis });
    this.left = ROOM.left;
    this.right = width - right;
    this.top = ROOM.top;
    this.bottom = height - ROOM.bottom;
  }

  x(t) {
    const place = (t - this.xAxis.low) / (this.xAxis.high - this.xAxis.low);
    return round(this.left + Math.max(-0.01, Math.min(1.01, place)) * (this.right - this.left));
  }

  y(value) {
    const place = (value - this.yAxis.low) / (this.yAxis.high - this.yAxis.low);
    return round(this.bottom - Math.max(0, Math.min(1, place)) * (this.bottom - this.top));
  }

  t(x) {
    return this.xAxis.low + ((x - this.left) / (this.right - this.left)) * (this.xAxis.high - this.xAxis.low);
  }
}

function round(value) {
  return Math.round(value * 10) / 10;
}

/**
 * A figure: title, unit, legend with the last values (or those at the cursor), and a drawing with an equivalent text.
 */
export class Chart {
  constructor({ title, unit, css = "", right = ROOM.right }) {
    this.title = title;
    this.unit = unit;
    this.room = right;
    this.legend = h("ul", { class: "legend" });
    this.svg = s("svg", { role: "img", "aria-label": title });
    this.caption = h("figcaption", {}, h("h3", {}, title), h("span", { class: "unit" }, unit));
    this.node = h("figure", { class: `chart ${css}` }, this.caption, this.legend, this.svg);
    this.entries = new Map();
    this.content = null;
    this.frame = null;
    this.layer = s("g", { class: "cursor" });
    this.clip = newId("clip");
    // Reading an element's size between two changes of the page would force a layout each time.
    this.size = { width: 0, height: 0 };
    this.observer = new ResizeObserver(([{ contentRect: size }]) => {
      this.size = { width: Math.round(size.width), height: Math.round(size.height) };
      this.paint();
    });
    this.observer.observe(this.svg);
    // Charts far outside the viewport are drawn once in a while: a picture of the whole page shows them, too.
    this.near = true;
    this.painted = -Infinity;
    this.watcher = new IntersectionObserver(
      (entries) => {
        this.near = entries.at(-1).isIntersecting;
        this.paint();
      },
      { rootMargin: "240px" },
    );
    this.watcher.observe(this.svg);
    this.move = () => this.paintCursor();
    cursor.addEventListener("move", this.move);
    this.print = () => this.paint({ now: true });
    addEventListener("beforeprint", this.print);
    this.svg.addEventListener("pointermove", (event) => this.pointAt(event));
    this.svg.addEventListener("pointerleave", () => point(null));
  }

  /** Release the observers and listeners. */
  close() {
    this.observer.disconnect();
    this.watcher.disconnect();
    cursor.removeEventListener("move", this.move);
    removeEventListener("beforeprint", this.print);
  }

  /**
   * @param {object} content
   * @param {object[]} content.rows data by time
   * @param {{low, high, ticks}} content.x seconds
   * @param {{low, high, ticks}} content.y values
   * @param {(frame: Frame) => Node[]} content.paint shapes, the lowest first
   * @param {{key: string, name: string, css: string, text: (row: object) => string}[]} content.legend
   * @param {{t: number, label: string}[]} content.marks times of changes
   * @param {string} content.words the drawing as text
   * @param {(t: number) => string} [content.when] a place on the horizontal axis as text; without it, a duration
   */
  draw(content) {
    this.content = content;
    this.svg.setAttribute("aria-label", `${this.title}, ${this.unit}. ${content.words}`);
    this.paint();
    if (!this.near && content.rows.length) this.showLegend(content.legend, content.rows.at(-1));
  }

  /** Draw the content. A chart far outside the viewport is drawn only if it is long ago, or `now`. */
  paint({ now = false } = {}) {
    const { width, height } = this.size;
    if (!this.content || width < 60 || height < 60) return;
    if (!now && !this.near && performance.now() - this.painted < FAR_MS) return;
    this.painted = performance.now();
    const { x, y, paint, marks } = this.content;
    const frame = new Frame(width, height, x, y, this.room);
    this.frame = frame;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const inside = s("rect", { x: frame.left, y: 0, width: Math.max(0, frame.right - frame.left), height });
    const plot = s("g", { "clip-path": `url(#${this.clip})` }, ...paint(frame), ...drawMarks(frame, marks));
    this.svg.replaceChildren(s("clipPath", { id: this.clip }, inside), ...axes(frame), plot, ...(this.content.beside?.(frame) ?? []), this.layer);
    this.paintCursor();
  }

  pointAt(event) {
    if (!this.frame) return;
    const x = event.clientX - this.svg.getBoundingClientRect().left;
    point(x < this.frame.left || x > this.frame.right ? null : this.frame.t(x));
  }

  paintCursor() {
    if (!this.frame || !this.content.rows.length) return;
    const { rows, legend, marks } = this.content;
    const row = pointed === null ? rows.at(-1) : nearest(rows, pointed);
    this.showLegend(legend, row);
    if (pointed === null) {
      this.layer.replaceChildren();
      return;
    }
    const { left, right, top, bottom } = this.frame;
    const x = this.frame.x(row.t);
    const near = marks.filter((mark) => Math.abs(this.frame.x(mark.t) - x) < 5).map((mark) => mark.label);
    const text = [(this.content.when ?? duration)(row.t), ...new Set(near)].join(" · ");
    const anchor = x > (left + right) / 2 ? "end" : "start";
    const label = s("text", { x: anchor === "end" ? x - 5 : x + 5, y: top + 8, "text-anchor": anchor, class: "when" }, text);
    this.layer.replaceChildren(s("line", { x1: x, x2: x, y1: top, y2: bottom }), label);
  }

  showLegend(legend, row) {
    const keys = legend.map((entry) => entry.key).join("\n");
    if (keys !== this.keys) {
      this.keys = keys;
      this.entries = new Map(legend.map((entry) => [entry.key, h("b", {})]));
      this.legend.replaceChildren(
        ...legend.map((entry) => h("li", {}, h("i", { class: `swatch ${entry.css}`, "aria-hidden": "true" }), `${entry.name} `, this.entries.get(entry.key))),
      );
    }
    for (const entry of legend) setText(this.entries.get(entry.key), entry.text(row));
  }
}

function nearest(rows, t) {
  let [low, high] = [0, rows.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (rows[middle].t < t) low = middle + 1;
    else high = middle;
  }
  return low > 0 && t - rows[low - 1].t < rows[low].t - t ? rows[low - 1] : rows[low];
}

function axes(frame) {
  const nodes = [];
  for (const { value, label } of frame.yAxis.ticks) {
    const y = frame.y(value);
    nodes.push(s("line", { class: "grid", x1: frame.left, x2: frame.right, y1: y, y2: y }));
    nodes.push(s("text", { x: frame.left - 8, y, dy: "0.32em", "text-anchor": "end" }, label));
  }
  let free = -Infinity;
  for (const { value, label } of frame.xAxis.ticks) {
    const x = frame.x(value);
    const half = 3.4 * label.length;
    nodes.push(s("line", { class: "tick", x1: x, x2: x, y1: frame.bottom, y2: frame.bottom + 4 }));
    if (x - half < free || x + half > frame.width) continue;
    free = x + half + 8;
    nodes.push(s("text", { x, y: frame.bottom + 17, "text-anchor": "middle" }, label));
  }
  nodes.push(s("line", { class: "axis", x1: frame.left, x2: frame.right, y1: frame.bottom, y2: frame.bottom }));
  return nodes;
}

function drawMarks(frame, marks) {
  return marks
    .filter((mark) => mark.t >= frame.xAxis.low && mark.t <= frame.xAxis.high)
    .map((mark) => s("line", { class: "mark", x1: frame.x(mark.t), x2: frame.x(mark.t), y1: frame.top, y2: frame.bottom }));
}

/**
 * A line through `values`, with gaps at missing numbers. `steps`: each value holds for the time up to its own. `holds`: the
 * line joins the neighbours of missing numbers, because the last value is still the newest.
 */
export function line(frame, rows, values, { css, steps = false, holds = false }) {
  let path = "";
  let open = false;
  const alone = [];
  values.forEach((value, at) => {
    if (!Number.isFinite(value)) {
      open &&= holds;
      return;
    }
    const [x, y] = [frame.x(rows[at].t), frame.y(value)];
    const from = frame.x(rows[at].t - (rows[at].span_s ?? 0));
    if (steps) path += open ? `V${y}H${x}` : `M${from} ${y}H${x}`;
    else path += open ? `L${x} ${y}` : `M${x} ${y}`;
    if (!steps && !open && !(holds ? values.slice(at + 1).some(Number.isFinite) : Number.isFinite(values[at + 1]))) alone.push(s("circle", { class: `dot ${css}`, cx: x, cy: y, r: 2.5 }));
    open = true;
  });
  return [s("path", { class: `line ${css}${steps ? " steps" : ""}`, d: path || "M0 0" }), ...alone];
}

/** The area between two series. */
export function area(frame, rows, low, high, css) {
  const paths = [];
  let run = [];
  const flush = () => {
    if (run.length > 1) {
      const there = run.map((at) => `${frame.x(rows[at].t)} ${frame.y(high[at])}`);
      const back = run.reverse().map((at) => `${frame.x(rows[at].t)} ${frame.y(low[at])}`);
      paths.push(`M${[...there, ...back].join("L")}Z`);
    }
    run = [];
  };
  rows.forEach((_, at) => (Number.isFinite(low[at]) && Number.isFinite(high[at]) ? run.push(at) : flush()));
  flush();
  return s("path", { class: `area ${css}`, d: paths.join("") || "M0 0" });
}

/** A single value. */
export function dot(frame, t, value, css) {
  return s("circle", { class: `dot ${css}`, cx: frame.x(t), cy: frame.y(value), r: 4 });
}
