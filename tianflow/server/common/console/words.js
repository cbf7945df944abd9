// What states, verdicts and refusals are called.

export const ENDED = ["done", "failed", "stopped"];

/** What holds a run back, as a headline. */
const VERDICTS = {
  "sampling-bound": "The actors hold it back",
  "learning-bound": "The learner holds it back",
  "transport-bound": "The way between the halves holds it back",
  "balance-bound": "Each half waits for the other in turn",
  balanced: "Neither half holds the other back",
  stalled: "It stands still",
  starting: "Too early to say",
  paused: "Paused",
  draining: "Draining: nothing new is begun",
  stopping: "Stopping",
};

export function verdictTitle(diagnosis) {
  const title = VERDICTS[diagnosis.verdict] ?? diagnosis.verdict;
  return diagnosis.component ? `${title}: ${diagnosis.component}` : title;
}

/** Which colour a state has: good, waiting, still or bad. */
export function mood(state) {
  if (state === "running" || state === "done") return "good";
  if (state === "failed") return "bad";
  return ["paused", "stopped"].includes(state) ? "still" : "waiting";
}

/** A refused setting in a sentence. */
export function refused(error) {
  const accepted = error.accepted ? `; accepted: ${error.accepted}` : "";
  const nearest = error.nearest ? `; did you mean ${error.nearest}?` : "";
  return `${capital(error.message)}${accepted}${nearest}`;
}

export function capital(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

/** Any value of a setting on one line. */
export function shortValue(value) {
  if (value === null || value === undefined) return "–";
  return typeof value === "string" ? value : JSON.stringify(value);
}
