// The audit log: changes and actions, newest first.

import { h, setText, show } from "./dom.js";
import { shortValue } from "./words.js";

const SHOWN = 12;

/** A table of the records of `…/audit`. */
export class AuditPanel {
  constructor() {
    this.rows = h("tbody");
    this.none = h("p", { class: "unit" }, "No changes yet.");
    this.more = h("button", { type: "button", onclick: () => this.showAll() });
    this.all = false;
    this.records = [];
    this.table = h(
      "div",
      { class: "scroll", tabindex: "0", role: "region", "aria-labelledby": "audit-title" },
      h(
        "table",
        {},
        h("thead", {}, h("tr", {}, ...["Time", "Change or action"].map((name) => h("th", { scope: "col" }, name)))),
        this.rows,
      ),
    );
    this.node = h(
      "section",
      { class: "card", id: "audit", "aria-labelledby": "audit-title" },
      h("h2", { id: "audit-title" }, "Audit log"),
      this.none,
      this.table,
      this.more,
    );
    this.draw([]);
  }

  draw(records) {
    this.records = records;
    const newest = [...records].reverse().slice(0, this.all ? Infinity : SHOWN);
    this.rows.replaceChildren(...newest.map(row));
    show(this.none, records.length === 0);
    show(this.table, records.length > 0);
    show(this.more, newest.length < records.length);
    setText(this.more, `Show all ${records.length}`);
  }

  showAll() {
    this.all = true;
    this.draw(this.records);
    this.table.focus();
  }
}

function row(record) {
  const when = new Date(record.time);
  const lines = changesOf(record).map(({ path, old, now }) => h("div", { class: "change" }, h("code", {}, path), ` ${shortValue(old)} → `, h("b", {}, shortValue(now))));
  return h(
    "tr",
    {},
    h("td", {}, h("time", { datetime: record.time, title: record.time }, Number.isNaN(when.valueOf()) ? record.time : moment(when)), h("small", {}, record.source)),
    h("td", {}, ...(lines.length ? lines : [record.action])),
  );
}

function moment(when) {
  const today = when.toDateString() === new Date().toDateString();
  return today ? when.toLocaleTimeString() : when.toLocaleString();
}

/** Changed settings of `record`, by path. */
export function changesOf(record) {
  if (record.action !== "change" || typeof record.new !== "object" || record.new === null) return [];
  return Object.entries(record.new).map(([path, now]) => ({ path, old: record.old?.[path], now }));
}

/** Label of `record` in a chart. */
export function labelOf(record) {
  return changesOf(record).map(({ path, now }) => `${path} = ${shortValue(now)}`).join(", ") || record.action;
}
