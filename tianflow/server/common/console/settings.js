// A form for each resource of live settings. A change is a merge patch of the edited fields, for the generation that was read.

import { ask, MERGE_PATCH, runPath } from "./api.js";
import { announce, h, setText, show } from "./dom.js";
import { Field } from "./fields.js";
import { refused } from "./words.js";

const RESOURCES = ["balance", "actors", "inference", "learner", "replay", "weights", "evaluation", "env"];
const OPEN = ["balance", "actors", "learner"];
const RESOURCE_OF = { algorithm: "learner" };
/** Sections whose resource has another name. */
const SCHEDULED = { algorithm: ["learning_rate", "entropy_cost"], replay: ["beta"] };
/** Live settings that may follow a schedule, by section. */

/** All forms of a run. */
export class SettingsPanel {
  constructor(id) {
    this.id = id;
    this.forms = new Map(RESOURCES.map((name) => [name, new ResourceForm(id, name)]));
    this.problem = h("p", { class: "error", hidden: true });
    this.generation = null;
    this.note = h("p", { class: "unit" }, "Changes take effect within a second, and are recorded in the audit log.");
    this.node = h(
      "section",
      { class: "settings", id: "settings", tabindex: "-1", "aria-labelledby": "settings-title" },
      h("h2", { id: "settings-title" }, "Settings"),
      this.note,
      this.problem,
      ...[...this.forms.values()].map((form) => form.node),
    );
  }

  /**
   * Reload all forms if `generation` differs from the one that is shown. A form is hidden if the run has no settings of its
   * section in `sections`; null: all are shown.
   */
  async follow(generation, sections = null) {
    if (generation === this.generation) return;
    for (const [name, form] of this.forms) show(form.node, !sections || name in sections);
    try {
      this.schemas ??= await schemasOf();
      await Promise.all([...this.forms.values()].map((form) => form.load(this.schemas[form.name])));
      this.generation = generation;
      show(this.problem, false);
    } catch (error) {
      if (error.status === 401 || error.status === 0) throw error;
      setText(this.problem, `The settings cannot be loaded. ${error.message}`);
      show(this.problem, true);
    }
  }

  /** Show the values in force of settings that follow a schedule. `schedules`: of the run's document. */
  showSchedules(schedules = {}) {
    for (const [section, names] of Object.entries(SCHEDULED)) {
      for (const name of names) this.field(`${section}.${name}`)?.showNow(schedules[`${section}.${name}`]);
    }
  }

  /** Whether the setting at `path` has a field. */
  hasField(path) {
    return Boolean(this.field(path));
  }

  /** Put `value` into the field of the setting at `path`; the user applies it. */
  use(path, value) {
    const form = this.form(path);
    form.node.open = true;
    this.field(path).type(value);
    announce(`${path} = ${value} is in the form; apply it to change the setting`);
  }

  /** Change a setting at once. */
  async put(path, value) {
    await this.form(path).send({ [key(path)]: value });
  }

  form(path) {
    const section = path.split(".")[0];
    return this.forms.get(RESOURCE_OF[section] ?? section);
  }

  field(path) {
    return this.form(path)?.fields.get(key(path));
  }
}

function key(path) {
  return path.split(".")[1];
}

/** Schemas of the patches, by resource; empty if the server does not describe them. */
async function schemasOf() {
  const { data } = await ask("/openapi.json");
  const found = {};
  for (const name of RESOURCES) {
    found[name] = data?.paths?.[`/api/v1/runs/{run}/${name}`]?.patch?.requestBody?.content?.[MERGE_PATCH]?.schema;
  }
  return found;
}

/** The properties of the algorithm that `values` belong to, if a resource has alternatives. */
function propertiesOf(schema, values) {
  const names = Object.keys(values);
  const fitting = [schema ?? {}, ...(schema?.anyOf ?? [])].find((entry) => names.every((name) => entry.properties?.[name]));
  return fitting?.properties ?? {};
}

/** One resource. */
class ResourceForm {
  constructor(id, name) {
    this.path = runPath(id, `/${name}`);
    this.name = name;
    this.fields = new Map();
    this.etag = null;
    this.body = h("div", { class: "fields" });
    this.error = h("p", { class: "error", role: "alert", hidden: true });
    this.done = h("span", { class: "done" });
    this.apply = h("button", { type: "submit", class: "primary", disabled: true }, "Apply");
    this.undo = h("button", { type: "button", disabled: true, onclick: () => this.reset() }, "Undo");
    const form = h(
      "form",
      { novalidate: true, "aria-label": `Settings of ${name}`, onsubmit: (event) => this.submit(event) },
      this.body,
      this.error,
      h("div", { class: "row" }, this.apply, this.undo, this.done),
    );
    this.node = h("details", { class: "card", open: OPEN.includes(name), id: `settings-${name}` }, h("summary", {}, name), form);
  }

  async load(schema) {
    this.schema = schema ?? this.schema;
    const { data, etag } = await ask(this.path);
    this.show(data, etag);
  }

  show(values, etag) {
    this.etag = etag;
    const properties = propertiesOf(this.schema, values);
    for (const [name, value] of Object.entries(values)) {
      const field = this.fields.get(name);
      if (field) {
        field.set(value, { keep: true });
        continue;
      }
      const made = new Field({ name, schema: properties[name], value, edited: () => this.edited() });
      this.fields.set(name, made);
      this.body.append(made.node);
    }
    this.edited({ quiet: true });
  }

  edited({ quiet = false } = {}) {
    const dirty = [...this.fields.values()].some((field) => field.dirty);
    this.apply.disabled = !dirty;
    this.undo.disabled = !dirty;
    if (!quiet) setText(this.done, "");
  }

  reset() {
    for (const field of this.fields.values()) {
      field.refuse(null);
      field.set(field.value);
    }
    this.refuse(null);
    this.edited();
    this.fields.values().next().value?.input.focus();
  }

  async submit(event) {
    event.preventDefault();
    const patch = {};
    let wrong = null;
    for (const [name, field] of this.fields) {
      if (!field.dirty) continue;
      try {
        patch[name] = field.read();
      } catch (error) {
        field.refuse(error.message);
        wrong ??= field;
      }
    }
    if (wrong) wrong.input.focus();
    else await this.send(patch);
  }

  async send(patch) {
    const applying = this.apply.contains(document.activeElement);
    this.refuse(null);
    for (const field of this.fields.values()) field.refuse(null);
    try {
      const { data, etag } = await ask(this.path, { method: "PATCH", body: patch, type: MERGE_PATCH, etag: this.etag });
      this.accept(patch, data, etag);
    } catch (error) {
      await this.blame(error);
    }
    // A button loses the keyboard focus when it is disabled.
    if (applying && this.apply.disabled) this.fields.values().next().value?.input.focus();
  }

  accept(patch, values, etag) {
    for (const name of Object.keys(patch)) this.fields.get(name)?.set(values[name]);
    this.show(values, etag);
    setText(this.done, "Applied");
    const changes = Object.keys(patch).map((name) => `${name} = ${JSON.stringify(values[name])}`);
    announce(`Applied: ${changes.join(", ")}`);
  }

  async blame(error) {
    this.node.open = true;
    let first = null;
    const rest = [];
    for (const found of error.errors ?? []) {
      const field = this.fields.get(key(found.path));
      if (!field) rest.push(`${found.path}: ${refused(found)}`);
      else field.refuse(found.path.split(".").length > 2 ? `${found.path.split(".").slice(2).join(".")}: ${refused(found)}` : refused(found));
      first ??= field;
    }
    if (first) first.input.focus();
    if (error.status === 412) {
      await this.load();
      this.refuse("Settings were changed meanwhile. The other fields show the new values; apply again to apply your change.");
    } else if (rest.length || !first) {
      this.refuse(rest.join(" ") || error.message);
    }
  }

  refuse(text) {
    show(this.error, text);
    setText(this.error, text ?? "");
  }
}
