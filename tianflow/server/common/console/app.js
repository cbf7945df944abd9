// What is shown: the page of one run, the list of runs, a form for a new one, or the question for a token.

import { ask, RUNS, takeToken, useToken } from "./api.js";
import { h, say } from "./dom.js";
import { pageOf, RunsView } from "./runs.js";
import { RunView } from "./run.js";
import { SubmitView } from "./submit.js";

const place = document.getElementById("place");
const connection = document.getElementById("connection");
const list = document.getElementById("list");
let view = null;
let turn = 0;

const status = {
  live() {
    connection.className = "good";
    say(connection, "live");
  },
  lost(text) {
    connection.className = "bad";
    say(connection, text);
  },
};

function put(next) {
  view?.close?.();
  view = next;
  place.replaceChildren(next.node);
}

/** Show what the address names. */
async function route() {
  const mine = (turn += 1);
  let listed;
  try {
    ({ data: listed } = await ask(RUNS));
  } catch (error) {
    if (mine !== turn) return;
    if (error.status !== 401) put(failure(error));
    return;
  }
  if (mine !== turn) return;
  const service = listed.can_submit === true;
  list.hidden = !service && listed.runs.length < 2;
  const run = named();
  if (run) put(new RunView(run, { service, status }));
  else if (location.hash === "#/submit" && service) put(new SubmitView({ status }));
  else if (!service && listed.runs.length === 1) history.replaceState(null, "", pageOf(listed.runs[0].id)), route();
  else put(new RunsView({ status }));
}

/** The run that the address names; nothing if it names none that could be one. */
function named() {
  try {
    return decodeURIComponent(/^#\/runs\/(.+)$/.exec(location.hash)?.[1] ?? "");
  } catch {
    return "";
  }
}

function failure(error) {
  status.lost(error.message);
  const again = h("button", { type: "button", class: "primary", onclick: route }, "Try again");
  return { node: h("section", { class: "card alone" }, h("h1", {}, "No answer"), h("p", {}, error.message), again) };
}

function askForToken() {
  status.lost("needs a token");
  const input = h("input", { type: "password", id: "token", autocomplete: "off", spellcheck: "false", required: true });
  const submit = (event) => {
    event.preventDefault();
    useToken(input.value);
    route();
  };
  const form = h(
    "form",
    { class: "card alone", onsubmit: submit },
    h("h1", {}, "This server asks for a token"),
    h("p", {}, "It is in ", h("code", {}, "control.json"), " in the directory of the run, or in ", h("code", {}, "service.json"), " in that of all runs. Its ", h("code", {}, "read_token"), " lets you look without changing anything."),
    h("label", { for: "token" }, "Token"),
    input,
    h("div", { class: "row" }, h("button", { type: "submit", class: "primary" }, "Open")),
  );
  put({ node: form });
  input.focus();
}

document.addEventListener("token-needed", () => {
  turn += 1;
  askForToken();
});
document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault();
  const settings = document.getElementById("settings");
  (settings ?? place).scrollIntoView();
  (settings ?? place).focus();
});
window.addEventListener("hashchange", () => {
  takeToken();
  route();
});
takeToken();
route();
