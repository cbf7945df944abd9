// A form for a new run: a shipped config, its settings as TOML to edit, and a name. The server checks them before the run is
// submitted, and its refusals stand at their lines.

import { ask, RUNS } from "./api.js";
import { announce, h, newId, setText, show } from "./dom.js";
import { Editor } from "./editor.js";
import { pageOf } from "./runs.js";
import { lineOf, linesOf } from "./toml.js";
import { capital, refused } from "./words.js";

const FIRST = "cartpole_ppo";
const PAUSE_MS = 700;
/** Time without a change before the settings are checked. */
const NAME = "run.name";

/** Submits a run, and goes to its page. */
export class SubmitView {
  constructor({ status }) {
    this.status = status;
    this.turn = 0;
    const [config, name] = [newId("config"), newId("name")];
    this.select = h("select", { id: config, "aria-describedby": `${config}-hint` });
    this.summary = h("p", { class: "hint", id: `${config}-hint` }, "\u00a0");
    this.name = h("input", { type: "text", id: name, autocomplete: "off", spellcheck: "false", "aria-describedby": `${name}-hint`, placeholder: "chosen by the service" });
    this.nameError = h("p", { class: "error", id: `${name}-error`, hidden: true });
    this.editor = new Editor({ label: "Settings", hint: "A config file in TOML. The settings are checked while you edit.", edited: () => this.later() });
    this.error = h("p", { class: "error", role: "alert", hidden: true });
    this.verdict = h("p", { class: "done", role: "status" });
    this.advice = h("ul", { class: "hint advice-list" });
    this.select.addEventListener("change", () => this.take(this.select.value));
    this.name.addEventListener("input", () => this.later());
    const form = h("form", { novalidate: true, class: "card submit", onsubmit: (event) => this.send(event) });
    form.append(
      field(config, "Config", this.select, this.summary),
      field(name, "Name", this.name, this.nameError, h("p", { class: "hint", id: `${name}-hint` }, "Name of the run and of its directory.")),
      this.editor.node,
      this.verdict,
      this.advice,
      this.error,
      h("div", { class: "row" }, h("button", { type: "submit", class: "primary" }, "Submit"), h("button", { type: "button", onclick: () => this.check("environment") }, "Check"), h("a", { class: "button", href: "#/" }, "Back")),
    );
    this.node = h("div", {}, h("header", { class: "head" }, h("h1", {}, "Submit a run")), form);
    document.title = "Submit a run · tianflow";
    this.load();
  }

  close() {
    this.closed = true;
    clearTimeout(this.timer);
  }

  async load() {
    try {
      this.configs = (await ask("/api/v1/configs")).data?.configs ?? [];
      this.status.live();
    } catch (error) {
      this.refuse(`The shipped configs cannot be loaded. ${error.message}`);
      return;
    }
    this.select.replaceChildren(...this.configs.map((found) => h("option", { value: found.name, selected: found.name === FIRST }, found.name)));
    if (!this.editor.value) this.take(this.select.value);
  }

  /** Put the settings of a shipped config into the editor. */
  take(name) {
    const found = this.configs.find((config) => config.name === name);
    if (!found) return;
    setText(this.summary, `${found.summary}.`);
    this.editor.value = found.toml;
    this.check("settings");
  }

  later() {
    setText(this.verdict, "");
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.check("settings"), PAUSE_MS);
  }

  body() {
    const name = this.name.value.trim();
    const overrides = name ? { [NAME]: name } : {};
    // An unchanged config is sent by its name: it may name objects of modules that a text may not.
    const shipped = this.configs?.find((config) => config.toml === this.editor.value);
    return shipped ? { config: shipped.name, overrides } : { toml: this.editor.value, overrides };
  }

  /** Check the settings; with "environment", also that the environment can be made. */
  async check(what) {
    clearTimeout(this.timer);
    const mine = (this.turn += 1);
    if (what === "environment") setText(this.verdict, "Checking…");
    try {
      const { data } = await ask(`${RUNS}?check=${what}`, { method: "POST", body: this.body() });
      if (mine !== this.turn) return;
      this.clear();
      setText(this.verdict, what === "environment" ? `Valid: ${data.algorithm} on ${data.environment}` : "The settings are valid");
      this.advice.replaceChildren(...(data.advice ?? []).map((text) => h("li", {}, `${capital(text)}.`)));
    } catch (error) {
      if (mine === this.turn) this.blame(error);
    }
  }

  async send(event) {
    event.preventDefault();
    clearTimeout(this.timer);
    const mine = (this.turn += 1);
    const body = this.body();
    setText(this.verdict, "Submitting…");
    try {
      // With the same key, a repeated request after a broken connection starts one run, not two.
      const sent = JSON.stringify(body);
      this.key = this.key && this.sent === sent ? this.key : crypto.randomUUID?.() ?? String(Math.random());
      this.sent = sent;
      const { data } = await ask(RUNS, { method: "POST", body, headers: { "Idempotency-Key": this.key } });
      if (!this.closed) location.hash = pageOf(data.id);
    } catch (error) {
      if (error.status !== 0) this.key = null;
      if (mine !== this.turn) return;
      this.blame(error);
      if (!this.nameError.hidden) this.name.focus();
      else if (this.first) this.editor.select(this.first);
    }
  }

  clear() {
    this.refuse(null);
    this.refuseName(null);
    this.editor.refuse([]);
    this.advice.replaceChildren();
    setText(this.verdict, "");
  }

  /** Show each refused setting at its line, the name at its field, and anything else below. */
  blame(error) {
    this.clear();
    const lines = linesOf(this.editor.value);
    const found = [];
    for (const problem of error.errors) {
      const path = problem.path.replace(/^(config|toml)\.?/, "");
      const text = path ? `${path}: ${refused(problem)}` : refused(problem);
      if (path === NAME && this.name.value.trim()) this.refuseName(refused(problem));
      else found.push({ line: path ? lineOf(lines, path) : lineIn(problem.message, this.editor.value), text });
    }
    found.sort((a, b) => (a.line ?? 0) - (b.line ?? 0));
    this.editor.refuse(found);
    this.first = found.find(({ line }) => line)?.line;
    if (found.length) announce(found.map(({ line, text }) => (line ? `Line ${line}: ${text}` : text)).join(" "));
    if (!error.errors.length) this.refuse(error.message);
  }

  refuseName(text) {
    show(this.nameError, text);
    setText(this.nameError, text ?? "");
    this.name.setAttribute("aria-invalid", String(Boolean(text)));
    const hint = `${this.name.id}-hint`;
    this.name.setAttribute("aria-describedby", text ? `${this.nameError.id} ${hint}` : hint);
  }

  refuse(text) {
    show(this.error, text);
    setText(this.error, text ?? "");
  }
}

/** The line that a message about invalid TOML names; null if it names none. */
function lineIn(message, text) {
  if (message.includes("at end of document")) return text.split("\n").length;
  return Number(/\bline (\d+)/.exec(message)?.[1]) || null;
}

function field(id, label, ...rest) {
  return h("div", { class: "field stacked" }, h("label", { for: id }, label), ...rest);
}
