// A form for a new run: a shipped config or sections as JSON, with overrides.

import { ask, RUNS } from "./api.js";
import { h, newId, setText, show } from "./dom.js";
import { pageOf } from "./runs.js";
import { refused } from "./words.js";

/** Submits a run, and goes to its page. */
export class SubmitView {
  constructor({ status }) {
    this.status = status;
    this.name = this.text("Config", "input", { value: "cartpole_ppo", type: "text" }, "Name of a shipped config, such as cartpole_ppo or pong_impala.");
    this.config = this.text("Config as JSON", "textarea", { rows: 6, placeholder: '{"env": {"id": "CartPole-v1"}, "algorithm": {"name": "ppo"}}' }, "Sections of a config as JSON; replaces the name if it is not empty.");
    this.overrides = h("div", { class: "overrides" });
    this.error = h("p", { class: "error", role: "alert", hidden: true });
    const add = h("button", { type: "button", onclick: () => this.add().key.focus() }, "Add a setting");
    const settings = h(
      "fieldset",
      { class: "plain" },
      h("legend", {}, "Overrides"),
      this.overrides,
      add,
      h("p", { class: "hint" }, "For example balance.max_staleness and 2. Values are JSON or plain text."),
    );
    const form = h("form", { novalidate: true, class: "card submit", onsubmit: (event) => this.send(event) });
    form.append(this.name.node, this.config.node, settings, this.error, h("div", { class: "row" }, h("button", { type: "submit", class: "primary" }, "Submit"), h("a", { class: "button", href: "#/" }, "Back")));
    this.lines = [];
    this.add("run.name");
    this.node = h("div", {}, h("header", { class: "head" }, h("h1", {}, "Submit a run")), form);
    document.title = "Submit a run · tianflow";
  }

  close() {
    this.closed = true;
  }

  text(label, tag, more, hint) {
    const id = newId("submit");
    const error = h("p", { class: "error", id: `${id}-error`, hidden: true });
    const input = h(tag, { id, autocomplete: "off", spellcheck: "false", "aria-describedby": `${id}-hint`, ...more });
    const node = h("div", { class: "field stacked" }, h("label", { for: id }, label), input, error, h("p", { class: "hint", id: `${id}-hint` }, hint));
    return { node, input, error, refuse: (text) => blame(input, error, text, `${id}-hint`) };
  }

  add(path = "") {
    const id = newId("override");
    const key = h("input", { type: "text", value: path, "aria-label": "Setting", placeholder: "section.key", autocomplete: "off", spellcheck: "false" });
    const value = h("input", { type: "text", "aria-label": "Value", placeholder: "value", autocomplete: "off", spellcheck: "false" });
    const error = h("p", { class: "error", id: `${id}-error`, hidden: true });
    const line = { key, value, error, refuse: (text) => blame(value, error, text, "") };
    const away = h("button", { type: "button", "aria-label": "Remove this setting", onclick: () => this.remove(line) }, "×");
    line.node = h("div", { class: "override" }, key, value, away, error);
    this.lines.push(line);
    this.overrides.append(line.node);
    return line;
  }

  remove(line) {
    this.lines = this.lines.filter((other) => other !== line);
    line.node.remove();
  }

  async send(event) {
    event.preventDefault();
    this.refuse(null);
    for (const part of [this.name, this.config, ...this.lines]) part.refuse(null);
    let config = this.name.input.value.trim();
    if (this.config.input.value.trim()) {
      try {
        config = JSON.parse(this.config.input.value);
      } catch (error) {
        this.config.refuse(`Is not valid JSON: ${error.message}`);
        this.config.input.focus();
        return;
      }
    }
    const given = this.lines.filter((line) => line.key.value.trim() && line.value.value.trim());
    const overrides = Object.fromEntries(given.map((line) => [line.key.value.trim(), valueOf(line.value.value.trim())]));
    try {
      // With the same key, a repeated request after a broken connection starts one run, not two.
      this.key = this.key && this.sent === JSON.stringify({ config, overrides }) ? this.key : crypto.randomUUID?.() ?? String(Math.random());
      this.sent = JSON.stringify({ config, overrides });
      const { data } = await ask(RUNS, { method: "POST", body: { config, overrides }, headers: { "Idempotency-Key": this.key } });
      if (!this.closed) location.hash = pageOf(data.id);
    } catch (error) {
      if (error.status !== 0) this.key = null;
      this.blame(error);
    }
  }

  blame(error) {
    const rest = [];
    let first = null;
    for (const found of error.errors) {
      const path = found.path.replace(/^config\.?/, "");
      const line = this.lines.find((one) => one.key.value.trim() === path);
      const part = line ?? (this.config.input.value.trim() ? this.config : path ? null : this.name);
      const text = line || !path ? refused(found) : `${path}: ${refused(found)}`;
      if (part) part.refuse(text);
      else rest.push(text);
      first ??= line?.value ?? part?.input;
    }
    first?.focus();
    if (rest.length || !first) this.refuse(rest.join(" ") || error.message);
  }

  refuse(text) {
    show(this.error, text);
    setText(this.error, text ?? "");
  }
}

function blame(input, error, text, hint) {
  setText(error, text ?? "");
  show(error, text);
  input.setAttribute("aria-invalid", String(Boolean(text)));
  const described = [text ? error.id : "", hint].filter(Boolean).join(" ");
  if (described) input.setAttribute("aria-describedby", described);
  else input.removeAttribute("aria-describedby");
}

function valueOf(text) {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}
