// The list of runs, newest first, page by page.

import { ask, RUNS } from "./api.js";
import { h, setText, show } from "./dom.js";
import { poll } from "./polling.js";
import { number, whole } from "./scales.js";
import { stateClass } from "./words.js";

const EVERY_MS = 2000;
const COLUMNS = ["Run", "State", "Algorithm", "Steps", "Steps/s", "Return", "Staleness", "Diagnosis"];

/** Address of a run's page. */
export function pageOf(id) {
  return `#/runs/${encodeURIComponent(id)}`;
}

/** The list of runs. */
export class RunsView {
  constructor({ status }) {
    this.status = status;
    this.pages = 1;
    this.body = h("tbody");
    this.shown = new Map();
    this.none = h("p", { class: "unit", hidden: true }, "No runs yet.");
    this.onDisk = h("p", { class: "hint", hidden: true });
    this.submit = h("a", { class: "button primary", href: "#/submit", hidden: true }, "Submit a run");
    this.more = h("button", { type: "button", hidden: true, onclick: () => this.showMore() }, "Show older runs");
    const head = h("thead", {}, h("tr", {}, ...COLUMNS.map((name) => h("th", { scope: "col" }, name))));
    const scroll = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Runs" }, h("table", { class: "runs" }, head, this.body));
    this.node = h(
      "div",
      {},
      h("header", { class: "head" }, h("div", { class: "title" }, h("h1", {}, "Runs"), this.submit)),
      h("section", { class: "card" }, this.none, scroll, this.more, this.onDisk),
    );
    this.polling = poll(() => this.update(), { every: EVERY_MS, failed: (error) => this.status.lost(error.message) });
  }

  close() {
    this.polling.stop();
  }

  showMore() {
    this.pages += 1;
    this.polling.now();
  }

  async update() {
    const runs = [];
    let next = RUNS;
    let service = false;
    const onDisk = [];
    for (let page = 0; page < this.pages && next; page += 1) {
      const { data } = await ask(next);
      runs.push(...(data.runs ?? []));
      onDisk.push(...(data.on_disk ?? []));
      service = data.can_submit === true;
      next = data.next;
    }
    this.status.live();
    show(this.submit, service);
    show(this.none, runs.length === 0);
    show(this.more, next);
    show(this.onDisk, onDisk.length > 0);
    setText(this.onDisk, `On disk and not in the store of this service: ${onDisk.map((run) => `${run.id} (${run.state})`).join(", ")}`);
    document.title = `${runs.length} runs · tianflow`;
    this.draw(runs);
  }

  draw(runs) {
    const ids = runs.map((run) => run.id);
    for (const id of this.shown.keys()) if (!ids.includes(id)) this.shown.delete(id);
    for (const run of runs) {
      if (!this.shown.has(run.id)) this.shown.set(run.id, new Line(run.id));
      this.shown.get(run.id).draw(run);
    }
    const wanted = ids.map((id) => this.shown.get(id).node);
    // Rows are replaced only when runs were added or removed, so that a link does not lose the focus.
    if (wanted.length !== this.body.children.length || wanted.some((node, at) => node !== this.body.children[at])) this.body.replaceChildren(...wanted);
  }
}

class Line {
  constructor(id) {
    this.state = h("span", { class: "state" });
    this.cells = COLUMNS.slice(2).map(() => h("td", {}));
    this.node = h("tr", {}, h("th", { scope: "row" }, h("a", { href: pageOf(id) }, id)), h("td", {}, this.state), ...this.cells);
  }

  draw(run) {
    this.state.className = `state ${stateClass(run.state)}`;
    setText(this.state, run.state);
    const staleness = run.staleness?.max === null || run.staleness?.max === undefined ? "–" : `${whole(run.staleness.max)} of ${run.staleness.bound === "unbounded" ? "∞" : run.staleness.bound}`;
    const reasons = (run.reasons ?? []).join("; ");
    const texts = [
      [run.algorithm, run.environment].filter(Boolean).join(" on ") || "–",
      whole(run.progress?.env_steps),
      number(run.throughput?.env_steps_per_s?.["10"]),
      number(run.returns?.mean),
      staleness,
      run.bottleneck ?? (reasons || "–"),
    ];
    texts.forEach((text, at) => setText(this.cells[at], text));
  }
}
