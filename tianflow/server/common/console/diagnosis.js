// Which half holds things back, in words and in two bars, and what would change it.

import { h, say, show } from "./dom.js";
import { stateColour, stateName } from "./panels.js";
import { duration, number, percent } from "./scales.js";
import { capital, verdictTitle } from "./words.js";

const ROLES = { learner: "Learner", actor: "Actors", replay: "Replay" };

/** Words, bars and suggestions. */
export class DiagnosisPanel {
  /** `takes(path)`: whether there is a field for a setting; `use(path, value)`: put a value into it. */
  constructor({ takes, use }) {
    Object.assign(this, { takes, use });
    this.title = h("p", { class: "verdict" }, "–");
    this.tag = h("span", { class: "tag" });
    this.advice = h("p", { class: "advice" });
    this.suggestions = h("ul", { class: "suggestions" });
    this.bars = h("div", { class: "bars" });
    this.shown = "";
    this.node = h(
      "section",
      { class: "card diagnosis", "aria-labelledby": "diagnosis-title" },
      h("h2", { id: "diagnosis-title" }, "What holds it back"),
      h("div", { class: "halves" }, h("div", { class: "says" }, this.title, this.tag, this.advice, this.suggestions), this.bars),
    );
  }

  draw(diagnosis) {
    show(this.node, diagnosis);
    if (!diagnosis) return;
    say(this.title, verdictTitle(diagnosis));
    say(this.tag, `${diagnosis.verdict} for ${duration(diagnosis.for_s, 1)}`);
    say(this.advice, `${capital(diagnosis.advice)}.`);
    this.suggest(diagnosis);
    this.compare(diagnosis.shares ?? {});
  }

  suggest({ suggested = {}, steps_per_s: pace, forecast_steps_per_s: forecast }) {
    const paths = Object.keys(suggested);
    // The list is made anew only when it says something else: a button that is pressed must not be replaced under the pointer.
    const key = paths.map((path) => `${path} ${this.takes(path)}`).join();
    if (key !== this.shown) {
      this.shown = key;
      this.buttons = paths.map((path) => ({ path, text: h("span", {}), value: null }));
      this.suggestions.replaceChildren(...this.buttons.map((entry) => h("li", {}, this.button(entry))));
      this.gain = h("li", { class: "gain" });
      if (paths.length) this.suggestions.append(this.gain);
    }
    for (const entry of this.buttons ?? []) {
      entry.value = suggested[entry.path];
      say(entry.text, `${entry.path} = ${entry.value}`);
    }
    if (this.gain) say(this.gain, forecast && pace ? gainOf(forecast, pace) : "");
  }

  button(entry) {
    if (!this.takes(entry.path)) return h("span", { class: "chip" }, entry.text, h("small", {}, " in a new run"));
    return h("button", { type: "button", class: "chip", onclick: () => this.use(entry.path, entry.value) }, h("small", {}, "Try "), entry.text);
  }

  compare(shares) {
    const roles = Object.keys(ROLES).filter((role) => shares[role]);
    this.bars.replaceChildren(...roles.map((role) => bar(ROLES[role], shares[role])));
  }
}

function gainOf(forecast, pace) {
  const same = Math.abs(forecast - pace) < 0.01 * pace;
  return same ? "at about the same speed" : `about ${number(forecast)} steps/s instead of ${number(pace)}`;
}

function bar(name, shares) {
  const states = Object.entries(shares)
    .filter(([, share]) => share >= 0.005)
    .sort(([a], [b]) => (b === "busy") - (a === "busy") || a.localeCompare(b));
  const track = h("span", { class: "track", "aria-hidden": "true" });
  for (const [state, share] of states) {
    const part = h("i", { class: stateColour(state) });
    part.style.flexGrow = String(share);
    track.append(part);
  }
  const text = states.map(([state, share]) => h("span", {}, h("i", { class: `swatch block ${stateColour(state)}`, "aria-hidden": "true" }), `${stateName(state)} ${percent(share)}`));
  return h("div", { class: "half" }, h("h3", {}, name), track, h("p", { class: "parts" }, ...text));
}
