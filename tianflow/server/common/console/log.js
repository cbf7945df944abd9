// The last lines of the output of a run's process.

import { ask, runPath } from "./api.js";
import { h, setText, show } from "./dom.js";

/** Sequences that colour a terminal. */
const ESCAPES = /\u001b\[[0-9;?]*[A-Za-z]/g;

/** A part of the page that loads the log when it is opened. */
export class LogPanel {
  constructor(id) {
    this.id = id;
    this.text = h("pre", { class: "log", tabindex: "0", role: "region", "aria-label": "Log" });
    this.none = h("p", { class: "unit", hidden: true });
    const again = h("button", { type: "button", onclick: () => this.load() }, "Reload");
    this.node = h("details", { class: "card", id: "log" }, h("summary", {}, "Log"), h("div", {}, this.none, this.text, h("div", { class: "row" }, again)));
    this.node.addEventListener("toggle", () => this.node.open && this.load());
  }

  async load() {
    let text = "";
    let problem = "";
    try {
      text = (await ask(runPath(this.id, "/log"))).text.replace(ESCAPES, "");
    } catch (error) {
      problem = `The log cannot be read. ${error.message}`;
    }
    setText(this.text, text);
    setText(this.none, problem || "The process has written nothing.");
    show(this.text, text);
    show(this.none, !text);
    this.text.scrollTop = this.text.scrollHeight;
  }
}
