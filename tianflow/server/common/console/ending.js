// How a run ended: its results, its error, and the rest of its summary.

import { h, show } from "./dom.js";
import { finalReturn, moment, resultsOf, targetText } from "./results.js";
import { duration, number, whole } from "./scales.js";
import { capital, ENDED, shortValue } from "./words.js";

/** A card for an ended run; hidden while the run is active. */
export class EndPanel {
  constructor() {
    this.node = h("section", { class: "card", id: "ending", "aria-labelledby": "ending-title", hidden: true });
    this.shown = null;
  }

  draw(run) {
    const over = ENDED.includes(run.state) && !run.progress;
    show(this.node, over);
    const key = JSON.stringify([run.state, run.ended, run.reasons]);
    if (!over || this.shown === key) return;
    this.shown = key;
    this.node.replaceChildren(h("h2", { id: "ending-title" }, capital(run.state)), ...this.why(run), this.results(run), ...rest(run.summary));
  }

  why(run) {
    // Reasons of a run on disk say where it is, and not how it ended.
    const reason = run.summary?.error ?? (run.on_disk ? run.summary?.reason : (run.reasons ?? []).join("\n"));
    if (!reason) return [];
    if (run.state === "failed") return [h("pre", { class: "log failure", id: "failure", tabindex: "0", role: "region", "aria-label": "Error" }, reason)];
    return [h("p", {}, h("span", { class: "unit" }, "Reason: "), reason)];
  }

  results(run) {
    const results = resultsOf(run);
    const { value, from } = finalReturn(results);
    const evaluation = run.summary?.evaluation ?? {};
    const items = [
      ["Return", value === null ? "–" : number(value), evaluationText(from, evaluation)],
      ["Target", targetText(results, true), ""],
      ["Started", moment(run.started), ""],
      ["Ended", moment(run.ended), ""],
      ["Duration", duration(results.seconds), Number.isFinite(run.summary?.training_s) ? `training ${duration(run.summary.training_s)}` : ""],
      ["Steps", whole(results.steps), Number.isFinite(results.episodes) ? `${whole(results.episodes)} episodes` : ""],
    ];
    return h("dl", { class: "summary" }, ...items.map(([name, text, note]) => h("div", {}, h("dt", {}, name), h("dd", {}, h("b", {}, text), note ? h("small", {}, note) : null))));
  }
}

function evaluationText(from, evaluation) {
  if (from !== "evaluation") return from && "mean of training";
  const episodes = Number.isFinite(evaluation.episodes) ? `, ${whole(evaluation.episodes)} episodes` : "";
  const metrics = Object.entries(evaluation).filter(([name]) => !["version", "mean_return", "episodes"].includes(name));
  return `evaluation of version ${whole(evaluation.version)}${episodes}${metrics.map(([name, value]) => `, ${name} ${number(value)}`).join("")}`;
}

function rest(summary) {
  const shown = Object.entries(summary ?? {}).filter(([name, value]) => value !== null && typeof value !== "object" && name !== "error" && name !== "run");
  if (!shown.length) return [];
  const items = shown.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, typeof value === "number" ? number(value) : shortValue(value))));
  return [h("details", {}, h("summary", {}, "Summary"), h("dl", { class: "summary" }, ...items))];
}
