// The list of runs: sorted and filtered, page by page, the newest first. Selected runs can be compared and deleted.

import { ask, RUNS } from "./api.js";
import { COLUMNS, fits, sorted, STATES, textOf } from "./columns.js";
import { pageOfComparison, MOST_COMPARED } from "./compare.js";
import { h, newId, setText, show } from "./dom.js";
import { poll } from "./polling.js";
import { Removal } from "./removal.js";
import { whole } from "./scales.js";
import { ENDED, stateClass } from "./words.js";

const EVERY_MS = 2000;
const PAGE = 100;

/** Order, filter and selection, for as long as the page is open. */
const choice = { column: COLUMNS.find((column) => column.name === "Started"), down: true, text: "", state: "", selected: new Set() };

/** Address of a run's page. */
export function pageOf(id) {
  return `#/runs/${encodeURIComponent(id)}`;
}

/** The list of runs. */
export class RunsView {
  constructor({ status }) {
    this.status = status;
    this.pages = 1;
    this.runs = [];
    this.body = h("tbody");
    this.shown = new Map();
    this.none = h("p", { class: "unit", hidden: true }, "No runs yet.");
    this.onDisk = h("p", { class: "hint", hidden: true });
    this.submit = h("a", { class: "button primary", href: "#/submit", hidden: true }, "Submit a run");
    this.more = h("button", { type: "button", hidden: true, onclick: () => this.showMore() }, "Show older runs");
    this.error = h("p", { class: "error", role: "alert", hidden: true });
    this.removal = new Removal({ error: this.error, done: () => this.polling.now() });
    this.tools = this.toolbar();
    this.scroll = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Runs" }, h("table", { class: "runs" }, this.head(), this.body));
    this.node = h(
      "div",
      {},
      h("header", { class: "head" }, h("div", { class: "title" }, h("h1", {}, "Runs"), this.submit)),
      h("section", { class: "card" }, this.none, this.tools, this.error, this.scroll, this.more, this.onDisk),
    );
    this.polling = poll(() => this.update(), { every: EVERY_MS, failed: (error) => this.status.lost(error.message) });
  }

  close() {
    this.polling.stop();
  }

  toolbar() {
    const [text, state] = [newId("filter"), newId("state")];
    this.text = h("input", { type: "search", id: text, value: choice.text, placeholder: "name, environment, algorithm", autocomplete: "off", spellcheck: "false" });
    this.state = h("select", { id: state }, ...Object.entries(STATES).map(([value, name]) => h("option", { value, selected: value === choice.state }, name)));
    this.text.addEventListener("input", () => this.choose({ text: this.text.value }));
    this.state.addEventListener("change", () => this.choose({ state: this.state.value }));
    this.count = h("p", { class: "unit", role: "status" });
    this.compare = h("button", { type: "button", onclick: () => (location.hash = pageOfComparison(this.selection().map((run) => run.id))) }, "Compare");
    this.remove = h("button", { type: "button", class: "danger", onclick: () => this.removal.confirm(this.selection().map((run) => run.id)) }, "Delete");
    return h(
      "div",
      { class: "tools" },
      h("div", {}, h("label", { for: text }, "Filter"), this.text),
      h("div", {}, h("label", { for: state }, "State"), this.state),
      this.count,
      h("div", { class: "row" }, this.compare, this.remove),
    );
  }

  head() {
    this.all = h("input", { type: "checkbox", "aria-label": "Select all runs that are shown" });
    this.all.addEventListener("change", () => {
      for (const run of this.visible()) choice.selected[this.all.checked ? "add" : "delete"](run.id);
      this.draw();
    });
    this.heads = COLUMNS.map((column) => {
      const button = h("button", { type: "button", class: "sort", onclick: () => this.sort(column) }, column.name);
      return { column, node: h("th", { scope: "col", class: cssOf(column) }, button) };
    });
    return h("thead", {}, h("tr", {}, h("th", { scope: "col", class: "pick" }, this.all), ...this.heads.map(({ node }) => node)));
  }

  /** Sort by `column`; in the other direction if it is sorted by it already. */
  sort(column) {
    const again = choice.column === column;
    this.choose({ column, down: again ? !choice.down : Boolean(column.down) });
  }

  choose(change) {
    Object.assign(choice, change);
    this.draw();
  }

  visible() {
    return sorted(this.runs.filter((run) => fits(run, choice.text, choice.state)), choice.column, choice.down);
  }

  /** Selected runs, in the order in which they were selected. */
  selection() {
    const runs = new Map(this.runs.map((run) => [run.id, run]));
    return [...choice.selected].map((id) => runs.get(id)).filter(Boolean);
  }

  showMore() {
    this.pages += 1;
    this.polling.now();
  }

  async update() {
    const runs = [];
    let next = `${RUNS}?limit=${PAGE}`;
    let service = false;
    let onDisk = [];
    let more = 0;
    for (let page = 0; page < this.pages && next; page += 1) {
      const { data } = await ask(next);
      runs.push(...(data.runs ?? []));
      if (page === 0) [onDisk, more] = [data.on_disk ?? [], data.on_disk_more ?? 0];
      service = data.can_submit === true;
      next = data.next;
    }
    this.status.live();
    runs.push(...onDisk);
    this.runs = runs;
    this.older = Boolean(next);
    show(this.submit, service);
    show(this.none, runs.length === 0);
    show(this.scroll, runs.length > 0);
    show(this.tools, service && runs.length > 0);
    this.node.classList.toggle("unmanaged", !service);
    show(this.more, next);
    show(this.onDisk, onDisk.length > 0);
    setText(this.onDisk, `Runs “on disk” are in the directory of this service, and not in its store. They can be opened and compared, not changed.${more ? ` ${whole(more)} older ones are not listed.` : ""}`);
    document.title = `${runs.length} runs · tianflow`;
    const ids = new Set(runs.map((run) => run.id));
    for (const id of choice.selected) if (!ids.has(id)) choice.selected.delete(id);
    this.draw();
  }

  draw() {
    const runs = this.visible();
    const known = new Set(this.runs.map((run) => run.id));
    for (const id of this.shown.keys()) if (!known.has(id)) this.shown.delete(id);
    for (const run of runs) {
      if (!this.shown.has(run.id)) this.shown.set(run.id, new Line(run.id, () => this.drawTools(this.visible())));
      this.shown.get(run.id).draw(run);
    }
    for (const { column, node } of this.heads) {
      if (column === choice.column) node.setAttribute("aria-sort", choice.down ? "descending" : "ascending");
      else node.removeAttribute("aria-sort");
    }
    const wanted = runs.map((run) => this.shown.get(run.id).node);
    // Rows are replaced only when their order differs, and the focus stays in its row.
    if (wanted.length !== this.body.children.length || wanted.some((node, at) => node !== this.body.children[at])) {
      const focused = document.activeElement;
      this.body.replaceChildren(...wanted);
      if (focused && focused !== document.activeElement && this.body.contains(focused)) focused.focus();
    }
    this.drawTools(runs);
  }

  drawTools(runs) {
    const selection = this.selection();
    const active = selection.filter((run) => !ENDED.includes(run.state)).length;
    const picked = runs.filter((run) => choice.selected.has(run.id)).length;
    this.all.checked = runs.length > 0 && picked === runs.length;
    this.all.indeterminate = picked > 0 && picked < runs.length;
    setText(this.count, `${runs.length === this.runs.length ? "" : `${runs.length} of `}${this.runs.length}${this.older ? " newest" : ""} ${this.runs.length === 1 ? "run" : "runs"}${selection.length ? `, ${selection.length} selected` : ""}`);
    this.compare.disabled = selection.length < 2 || selection.length > MOST_COMPARED;
    this.compare.title = this.compare.disabled ? `Select 2 to ${MOST_COMPARED} runs to compare them` : "";
    const others = selection.some((run) => run.on_disk);
    this.remove.disabled = selection.length === 0 || active > 0 || others;
    this.remove.title = others ? "Runs on disk are not deleted by this service" : active ? "Only runs that have ended can be deleted" : selection.length ? "" : "Select ended runs to delete them";
  }
}

function cssOf(column) {
  return [column.least ? "" : "more", column.number ? "number" : "", column.long ? "long" : ""].filter(Boolean).join(" ") || false;
}

class Line {
  constructor(id, picked) {
    this.id = id;
    this.box = h("input", { type: "checkbox", "aria-label": `Select ${id}` });
    this.box.addEventListener("change", () => {
      choice.selected[this.box.checked ? "add" : "delete"](id);
      picked();
    });
    this.state = h("span", { class: "state" });
    this.tag = h("small");
    this.cells = COLUMNS.slice(2).map((column) => ({ column, text: h("span"), note: h("small") }));
    this.node = h(
      "tr",
      {},
      h("td", { class: "pick" }, this.box),
      h("th", { scope: "row" }, h("a", { href: pageOf(id) }, id), this.tag),
      h("td", {}, this.state),
      ...this.cells.map(({ column, text, note }) => h("td", { class: cssOf(column) }, text, column.note ? note : null)),
    );
  }

  draw(run) {
    this.box.checked = choice.selected.has(this.id);
    this.state.className = `state ${stateClass(run.state)}`;
    setText(this.state, run.state);
    setText(this.tag, run.on_disk ? "on disk" : "");
    for (const { column, text, note } of this.cells) {
      setText(text, textOf(column, run));
      if (column.long) text.title = textOf(column, run);
      if (column.note) setText(note, column.note(run));
    }
  }
}
