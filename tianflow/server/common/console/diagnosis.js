// The diagnosis: verdict, shares of time, and suggestions.

import { h, setText, show } from "./dom.js";
import { stateColour, stateName } from "./panels.js";
import { duration, number, percent } from "./scales.js";
import { capital, verdictTitle } from "./words.js";

const ROLES = { learner: "Learner", actor: "Actors", replay: "Replay" };

/** Verdict, bars and suggestions. */
export class DiagnosisPanel {
  /** `hasField(path)`: whether a setting has a field; `use(path, value)`: put a value into the field. */
  constructor({ hasField, use }) {
    Object.assign(this, { hasField, use });
    this.title = h("p", { class: "verdict" }, "–");
    this.tag = h("span", { class: "tag" });
    this.advice = h("p", { class: "advice" });
    this.suggestions = h("ul", { class: "suggestions" });
    this.says = h("div", { class: "says", ...scrolls("Verdict") }, this.title, this.tag, this.advice, this.suggestions);
    this.bars = h("div", { class: "bars", ...scrolls("Shares of time") });
    this.shown = "";
    this.node = h(
      "section",
      { class: "card diagnosis", "aria-labelledby": "diagnosis-title" },
      h("h2", { id: "diagnosis-title" }, "Diagnosis"),
      h("div", { class: "halves" }, this.says, this.bars),
    );
  }

  draw(diagnosis) {
    show(this.node, diagnosis);
    if (!diagnosis) return;
    setText(this.title, verdictTitle(diagnosis));
    setText(this.tag, `${diagnosis.verdict} for ${duration(diagnosis.for_s, 1)}`);
    setText(this.advice, `${capital(diagnosis.advice)}.`);
    this.suggest(diagnosis);
    this.compare(diagnosis.shares ?? {});
  }

  suggest({ suggested = {}, steps_per_s: pace, forecast_steps_per_s: forecast }) {
    const paths = Object.keys(suggested);
    // The list is replaced only when it differs: a button must not disappear while it is pressed.
    const key = paths.map((path) => `${path} ${this.hasField(path)}`).join();
    if (key !== this.shown) {
      this.shown = key;
      this.buttons = paths.map((path) => ({ path, text: h("span", {}), value: null }));
      this.suggestions.replaceChildren(...this.buttons.map((entry) => h("li", {}, this.button(entry))));
      this.gain = h("li", { class: "gain" });
      if (paths.length) this.suggestions.append(this.gain);
    }
    for (const entry of this.buttons ?? []) {
      entry.value = suggested[entry.path];
      setText(entry.text, `${entry.path} = ${entry.value}`);
    }
    if (this.gain) setText(this.gain, forecast && pace ? gainOf(forecast, pace) : "");
  }

  button(entry) {
    if (!this.hasField(entry.path)) return h("span", { class: "chip" }, entry.text, h("small", {}, " in a new run"));
    return h("button", { type: "button", class: "chip", onclick: () => this.use(entry.path, entry.value) }, h("small", {}, "Try "), entry.text);
  }

  compare(shares) {
    const roles = Object.keys(ROLES).filter((role) => shares[role]);
    this.bars.replaceChildren(...roles.map((role) => bar(ROLES[role], shares[role])));
  }
}

/** Attributes of a part that a keyboard can scroll. */
function scrolls(label) {
  return { tabindex: "0", role: "region", "aria-label": label };
}

function gainOf(forecast, pace) {
  const same = Math.abs(forecast - pace) < 0.01 * pace;
  return same ? "forecast: about the same speed" : `forecast: ${number(forecast)} steps/s instead of ${number(pace)}`;
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
