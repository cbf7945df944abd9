// A text field with line numbers, and with messages at lines.

import { h, newId, setText, show } from "./dom.js";

/** An editor of several lines. `edited()` is called after each change by the user. */
export class Editor {
  constructor({ label, hint, edited }) {
    const id = newId("editor");
    this.numbers = h("div", { class: "numbers", "aria-hidden": "true" });
    this.input = h("textarea", { id, rows: 22, wrap: "off", autocomplete: "off", autocapitalize: "off", spellcheck: "false", "aria-describedby": `${id}-problems ${id}-hint` });
    this.problems = h("ul", { class: "problems", id: `${id}-problems`, hidden: true });
    this.node = h(
      "div",
      { class: "field stacked" },
      h("label", { for: id }, label),
      h("div", { class: "editor" }, this.numbers, this.input),
      this.problems,
      h("p", { class: "hint", id: `${id}-hint` }, hint),
    );
    this.wrong = new Map();
    this.input.addEventListener("scroll", () => (this.numbers.scrollTop = this.input.scrollTop));
    this.input.addEventListener("input", () => {
      this.draw();
      edited();
    });
    this.draw();
  }

  get value() {
    return this.input.value;
  }

  set value(text) {
    this.input.value = text;
    this.draw();
  }

  /** Show `found`: messages, each with the line that it belongs to, or null. */
  refuse(found) {
    this.wrong = new Map(found.filter(({ line }) => line).map(({ line, text }) => [line, text]));
    show(this.problems, found.length);
    this.problems.replaceChildren(...found.map(({ line, text }) => h("li", { class: "error" }, line ? this.jump(line) : null, text)));
    this.input.setAttribute("aria-invalid", String(found.length > 0));
    this.draw();
  }

  jump(line) {
    return h("button", { type: "button", class: "jump", onclick: () => this.select(line) }, `Line ${line}`);
  }

  /** Select `line`, and scroll to it. */
  select(line) {
    const rows = this.value.split("\n");
    const start = rows.slice(0, line - 1).reduce((sum, row) => sum + row.length + 1, 0);
    this.input.focus();
    this.input.setSelectionRange(start, start + (rows[line - 1] ?? "").length);
    const height = this.input.scrollHeight / Math.max(1, rows.length);
    this.input.scrollTop = Math.max(0, (line - 4) * height);
  }

  draw() {
    const count = this.value.split("\n").length;
    while (this.numbers.children.length > count) this.numbers.lastChild.remove();
    while (this.numbers.children.length < count) this.numbers.append(h("div", {}));
    [...this.numbers.children].forEach((node, at) => {
      const text = this.wrong.get(at + 1);
      setText(node, text ? `✕ ${at + 1}` : at + 1);
      node.classList.toggle("wrong", Boolean(text));
      node.title = text ?? "";
    });
    this.numbers.scrollTop = this.input.scrollTop;
  }
}
