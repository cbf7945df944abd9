// Form fields of settings, from their schemas, or from their values if there is no schema.

import { h, newId, setText, show } from "./dom.js";
import { number } from "./scales.js";
import { shortValue } from "./words.js";

/** Kind of field for a schema; JSON if no other kind fits. */
function kindOf(schema, value) {
  const found = alternatives(schema ?? guessed(value));
  const types = found.map((entry) => entry.type);
  const words = found.filter((entry) => typeof entry.const === "string").map((entry) => entry.const);
  const numeric = found.filter((entry) => entry.type === "integer" || entry.type === "number");
  const choices = found.flatMap((entry) => entry.enum ?? []);
  const scheduled = numeric.length && types.includes("object") && value !== null && typeof value === "object";
  if (scheduled) return { name: "json" };
  if (numeric.length) return { name: "number", words, whole: numeric.every((entry) => entry.type === "integer"), limits: numeric[0] };
  if (types.includes("boolean")) return { name: "choice", choices: [true, false] };
  if (choices.length) return { name: "choice", choices };
  if (types.includes("object")) return { name: "table" };
  if (types.includes("array") || types.includes("string")) return { name: types.includes("array") ? "names" : "text" };
  return { name: "json" };
}

function alternatives(schema) {
  const parts = schema.anyOf ?? schema.oneOf;
  return (parts ? parts.flatMap(alternatives) : [schema]).filter((entry) => entry.type !== "null");
}

function guessed(value) {
  const type = Array.isArray(value) ? "array" : typeof value;
  return { type: value === null ? undefined : type };
}

function found(schema, key) {
  if (schema === undefined || schema === null) return undefined;
  if (key in schema) return schema[key];
  return (schema.anyOf ?? schema.oneOf ?? []).map((entry) => found(entry, key)).find((value) => value !== undefined);
}

function toText(kind, value) {
  if (value === null || value === undefined) return "";
  if (kind.name === "names") return [value].flat().join(", ");
  if (kind.name === "table") return Object.entries(value).map(([key, item]) => `${key} = ${item}`).join("\n");
  return kind.name === "json" ? JSON.stringify(value) : String(value);
}

/** Parse `text`; null is the default. Throws an error for invalid input. */
function fromText(kind, text, old) {
  const given = text.trim();
  if (kind.name === "table") return tableFrom(given, old ?? {});
  if (given === "") return null;
  if (kind.name === "number") return kind.words.includes(given) ? given : numberFrom(given, kind.words);
  if (kind.name === "choice") return kind.choices.find((choice) => String(choice) === given);
  if (kind.name === "names") return given.includes(",") ? given.split(",").map((name) => name.trim()).filter(Boolean) : given;
  return kind.name === "json" ? JSON.parse(given) : given;
}

function numberFrom(text, words) {
  const value = Number(text.replaceAll("_", "").replace("−", "-"));
  if (!Number.isFinite(value)) throw new Error(`Is not a number${words.length ? ` or ${words.join(" or ")}` : ""}`);
  return value;
}

function tableFrom(text, old) {
  const patch = Object.fromEntries(Object.keys(old).map((key) => [key, null])); // in a merge patch, null removes a key
  for (const row of text.split("\n").filter((part) => part.trim())) {
    const [, key, value] = /^\s*([^=\s]+)\s*=\s*(\S+)\s*$/.exec(row) ?? [];
    if (key === undefined) throw new Error(`“${row.trim()}” does not have the form name = number`);
    patch[key] = numberFrom(value, []);
  }
  return patch;
}

function hintOf(kind, schema, described) {
  const parts = [];
  const { minimum, maximum, exclusiveMinimum: above } = kind.limits ?? {};
  if (kind.name === "number") parts.push(kind.whole ? "whole number" : "number");
  if (minimum !== undefined) parts.push(`from ${minimum}`);
  if (above !== undefined) parts.push(kind.whole ? `from ${above + 1}` : `above ${above}`);
  if (maximum !== undefined && maximum < 1e15) parts.push(`to ${maximum}`);
  if (kind.name === "names") parts.push("one name, or several separated by commas");
  if (kind.name === "table") parts.push("name = number, one per line");
  const standard = found(schema, "default");
  const unset = standard === null || standard === undefined;
  const empty = kind.name === "table" || (unset && described) ? "" : unset ? "empty: chosen by tianflow" : `default ${shortValue(standard)}`;
  const words = kind.words?.length ? `or ${kind.words.join(", ")}` : "";
  return [[parts.join(" "), words].filter(Boolean).join(", "), empty].filter(Boolean).join(" · ");
}

/** Label, input, hint, and a place for the server's refusal. */
export class Field {
  /** `edited()` is called after each change by the user. */
  constructor({ name, schema, value, edited }) {
    this.name = name;
    this.kind = kindOf(schema, value);
    this.id = newId(`field-${name}`);
    this.hint = h("p", { class: "hint", id: `${this.id}-hint` }, ...this.about(schema));
    this.error = h("p", { class: "error", id: `${this.id}-error`, hidden: true });
    this.was = h("span", { class: "was", hidden: true });
    this.now = h("span", { class: "now", hidden: true });
    this.input = this.makeInput();
    this.input.addEventListener("input", () => {
      this.refuse(null);
      this.compare();
      edited();
    });
    this.node = h(
      "div",
      { class: `field ${this.kind.name}`, "data-name": name },
      h("label", { for: this.id }, name, this.now, this.was),
      this.input,
      this.error,
      this.hint,
    );
    this.set(value);
  }

  about(schema) {
    // None in a description is an empty field here.
    const text = (found(schema, "description") ?? "").replace(/\bNone\b/g, "empty");
    const form = hintOf(this.kind, schema, text.includes("empty"));
    return [text ? h("span", {}, text) : null, h("span", { class: "form" }, form)].filter(Boolean);
  }

  makeInput() {
    const more = { id: this.id, name: this.name, "aria-describedby": `${this.id}-hint`, autocomplete: "off", spellcheck: "false" };
    if (this.kind.name === "table") return h("textarea", { rows: 2, ...more });
    if (this.kind.name === "choice") return h("select", more, ...this.kind.choices.map((choice) => h("option", { value: String(choice) }, String(choice))));
    const numeric = this.kind.name === "number" && !this.kind.words.length;
    return h("input", { type: "text", inputmode: numeric ? "decimal" : false, placeholder: "default", ...more });
  }

  /** True while the input differs from the value in force. */
  get dirty() {
    return this.input.value.trim() !== toText(this.kind, this.value);
  }

  /** Set the value in force. With `keep`, edited input stays. */
  set(value, { keep = false } = {}) {
    const edited = keep && this.value !== undefined && this.dirty;
    this.value = value;
    if (!edited) this.input.value = toText(this.kind, value);
    this.compare();
  }

  compare() {
    show(this.was, this.dirty);
    setText(this.was, ` was ${toText(this.kind, this.value) || "default"}`);
    this.node?.classList.toggle("dirty", this.dirty);
  }

  /** Show the value in force of a schedule. `state`: of the run's document; undefined: the setting has no schedule. */
  showNow(state) {
    show(this.now, state);
    setText(this.now, state ? ` now ${number(state.value)}` : "");
  }

  /** Enter `value` as the user would. */
  type(value) {
    this.input.value = toText(this.kind, value);
    this.input.dispatchEvent(new Event("input"));
    this.input.focus();
    this.input.scrollIntoView({ block: "center" });
  }

  /** The entered value. Throws an error for invalid input. */
  read() {
    return fromText(this.kind, this.input.value, this.value);
  }

  /** Show why the value was refused; null: clear the message. */
  refuse(text) {
    show(this.error, text);
    setText(this.error, text ?? "");
    this.node?.classList.toggle("refused", Boolean(text));
    this.input.setAttribute("aria-invalid", String(Boolean(text)));
    this.input.setAttribute("aria-describedby", text ? `${this.id}-error ${this.id}-hint` : `${this.id}-hint`);
  }
}
