// What can be done with a whole run.

import { ask, runPath } from "./api.js";
import { announce, h, say, show } from "./dom.js";
import { capital, ENDED } from "./words.js";

const WORDS = {
  pause: "Pause",
  resume: "Resume",
  checkpoint: "Checkpoint",
  drain: "Drain",
  stop: "Stop",
};
const SURE = {
  drain: "Nothing new is begun, what is there is trained on as far as it fills batches, and then the run ends.",
  stop: "The run ends with a checkpoint. What is being sampled now is dropped.",
};

function allowed(state, service) {
  if (ENDED.includes(state)) return service && state !== "done" ? ["resume"] : [];
  if (state === "stopping") return [];
  if (state === "pending" || state === "draining") return ["stop"];
  return [state === "paused" ? "resume" : "pause", "checkpoint", "drain", "stop"];
}

/** Buttons of a run; `done(state)` is called after each that worked, with the state that it leads to. */
export class Actions {
  constructor(id, done) {
    this.id = id;
    this.done = done;
    this.error = h("p", { class: "error", role: "alert", hidden: true });
    this.buttons = new Map(Object.entries(WORDS).map(([name, text]) => [name, this.button(name, text)]));
    this.dialog = h("dialog", { "aria-labelledby": "sure-title" });
    this.told = h("span", { class: "done" });
    this.row = h("div", { class: "row actions", role: "group", "aria-label": "Actions" }, this.told, ...this.buttons.values());
    this.node = h("div", {}, this.row, this.error, this.dialog);
  }

  button(name, text) {
    const look = name === "stop" ? "danger" : false;
    return h("button", { type: "button", class: look, onclick: () => (SURE[name] ? this.ask(name) : this.act(name)) }, text);
  }

  /** `service`: whether this server takes runs that have ended up again. */
  allow(state, service) {
    const names = allowed(state, service);
    const focused = document.activeElement;
    for (const [name, button] of this.buttons) show(button, names.includes(name));
    say(this.buttons.get("resume"), ENDED.includes(state) ? "Go on" : WORDS.resume);
    // Pause becomes Resume under the keyboard's focus.
    if (focused?.hidden && this.row.contains(focused)) [...this.buttons.values()].find((button) => !button.hidden)?.focus();
  }

  ask(name) {
    const no = h("button", { type: "button", onclick: () => this.dialog.close() }, "Not now");
    const yes = h("button", { type: "button", class: "danger", onclick: () => this.sure(name) }, `${WORDS[name]} ${this.id}`);
    this.dialog.replaceChildren(
      h("h2", { id: "sure-title" }, `${WORDS[name]} this run?`),
      h("p", {}, SURE[name]),
      h("div", { class: "row" }, yes, no),
    );
    this.dialog.showModal();
    no.focus();
  }

  async sure(name) {
    this.dialog.close();
    await this.act(name);
  }

  async act(name) {
    try {
      const { data } = await ask(runPath(this.id, `/${name}`), { method: "POST" });
      show(this.error, false);
      say(this.told, name === "checkpoint" ? "Checkpoint asked for" : "");
      announce(`${capital(name)}: the run is ${data?.state ?? "told"}`);
      this.done(data?.state);
    } catch (error) {
      say(this.error, error.message);
      show(this.error, true);
    }
  }
}
