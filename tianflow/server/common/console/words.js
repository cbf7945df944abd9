// Labels of states, verdicts and refusals.

/** States in which no process of a run exists. interrupted: it was killed, and is on disk only. */
export const ENDED = ["done", "failed", "stopped", "interrupted"];

/** Headlines of the diagnosis. */
const VERDICTS = {
  "sampling-bound": "The learner waits for the actors",
  "learning-bound": "The actors wait for the learner",
  "inference-bound": "The actors wait for inference servers",
  "transport-bound": "Most of the time is spent in transit",
  "balance-bound": "Actors and learner wait in turn",
  balanced: "Neither actors nor learner wait",
  stalled: "Stalled",
  starting: "Not enough data yet",
  unknown: "The diagnosis failed",
  paused: "Paused",
  draining: "Draining: no new trajectories",
  stopping: "Stopping",
};

export function verdictTitle(diagnosis) {
  const title = VERDICTS[diagnosis.verdict] ?? diagnosis.verdict;
  return diagnosis.component ? `${title}: ${diagnosis.component}` : title;
}

/** CSS class of a state: good, waiting, still or bad. */
export function stateClass(state) {
  if (state === "running" || state === "done") return "good";
  if (state === "failed") return "bad";
  return ["paused", "stopped", "interrupted"].includes(state) ? "still" : "waiting";
}

/** A refused setting as a sentence. */
export function refused(error) {
  const accepted = error.accepted ? `; accepted: ${error.accepted}` : "";
  const nearest = error.nearest ? `; did you mean ${error.nearest}?` : "";
  return `${capital(error.message)}${accepted}${nearest}`;
}

export function capital(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

/** A value of a setting on one line. */
export function shortValue(value) {
  if (value === null || value === undefined) return "–";
  return typeof value === "string" ? value : JSON.stringify(value);
}
