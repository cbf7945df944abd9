// Actions on a whole run.

import { ask, runPath } from "./api.js";
import { announce, h, setText, show } from "./dom.js";
import { Removal } from "./removal.js";
import { capital, ENDED } from "./words.js";

const LABELS = {
  pause: "Pause",
  resume: "Resume",
  checkpoint: "Checkpoint",
  drain: "Drain",
  stop: "Stop",
};
const WARNINGS = {
  drain: "No new trajectories are sampled. The run trains on the open ones as far as they fill batches, and then ends.",
  stop: "The run ends with a checkpoint. Trajectories that are being sampled are dropped.",
};

function allowed(state, service) {
  if (ENDED.includes(state)) return service && state !== "done" ? ["resume"] : [];
  if (state === "stopping") return [];
  if (state === "pending" || state === "draining") return ["stop"];
  return [state === "paused" ? "resume" : "pause", "checkpoint", "drain", "stop"];
}

/** Buttons of a run; `done(state)` is called after each success, with the resulting state. */
export class Actions {
  constructor(id, done) {
    this.id = id;
    this.done = done;
    this.error = h("p", { class: "error", role: "alert", hidden: true });
    this.buttons = new Map(Object.entries(LABELS).map(([name, text]) => [name, this.button(name, text)]));
    this.dialog = h("dialog", { "aria-labelledby": "confirm-title" });
    this.message = h("span", { class: "done" });
    this.removal = new Removal({ error: this.error, done: () => (location.hash = "#/") });
    this.remove = h("button", { type: "button", class: "danger", onclick: () => this.removal.confirm([id]) }, "Delete");
    this.row = h("div", { class: "row actions", role: "group", "aria-label": "Actions" }, this.message, ...this.buttons.values(), this.remove);
    this.node = h("div", {}, this.row, this.error, this.dialog);
  }

  button(name, text) {
    const style = name === "stop" ? "danger" : false;
    return h("button", { type: "button", class: style, onclick: () => (WARNINGS[name] ? this.confirm(name) : this.act(name)) }, text);
  }

  /** Show the allowed buttons. `service`: whether this server can resume ended runs. */
  allow(state, service) {
    const names = allowed(state, service);
    const focused = document.activeElement;
    for (const [name, button] of this.buttons) show(button, names.includes(name));
    show(this.remove, service && ENDED.includes(state));
    setText(this.buttons.get("resume"), ENDED.includes(state) ? "Resume run" : LABELS.resume);
    // Pause becomes Resume while it has the keyboard focus.
    if (focused?.hidden && this.row.contains(focused)) [...this.buttons.values()].find((button) => !button.hidden)?.focus();
  }

  confirm(name) {
    const no = h("button", { type: "button", onclick: () => this.dialog.close() }, "Cancel");
    const yes = h("button", { type: "button", class: "danger", onclick: () => this.confirmed(name) }, `${LABELS[name]} ${this.id}`);
    this.dialog.replaceChildren(
      h("h2", { id: "confirm-title" }, `${LABELS[name]} this run?`),
      h("p", {}, WARNINGS[name]),
      h("div", { class: "row" }, yes, no),
    );
    this.dialog.showModal();
    no.focus();
  }

  async confirmed(name) {
    this.dialog.close();
    await this.act(name);
  }

  async act(name) {
    try {
      const { data } = await ask(runPath(this.id, `/${name}`), { method: "POST" });
      show(this.error, false);
      setText(this.message, name === "checkpoint" ? "Checkpoint requested" : "");
      announce(`${capital(name)}: ${data?.state ?? "requested"}`);
      this.done(data?.state);
    } catch (error) {
      setText(this.error, error.message);
      show(this.error, true);
    }
  }
}
