// Views of the page: one run, the list of runs, a comparison, a form for a new run, or a form for the token.

import { ask, RUNS, takeToken, useToken } from "./api.js";
import { compared, CompareView } from "./compare.js";
import { h, setText } from "./dom.js";
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
    setText(connection, "live");
  },
  lost(text) {
    connection.className = "bad";
    setText(connection, text);
  },
};

function put(next) {
  view?.close?.();
  view = next;
  place.replaceChildren(next.node);
}

/** Show the view of the address. */
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
  else if (compared().length) put(new CompareView(compared(), { status }));
  else if (location.hash === "#/submit" && service) put(new SubmitView({ status }));
  else if (!service && listed.runs.length === 1) history.replaceState(null, "", pageOf(listed.runs[0].id)), route();
  else put(new RunsView({ status }));
}

/** The run in the address; empty without a valid one. */
function named() {
  try {
    return decodeURIComponent(/^#\/runs\/(.+)$/.exec(location.hash)?.[1] ?? "");
  } catch {
    return "";
  }
}

function failure(error) {
  status.lost(error.message);
  const retry = h("button", { type: "button", class: "primary", onclick: route }, "Retry");
  return { node: h("section", { class: "card alone" }, h("h1", {}, "No answer"), h("p", {}, error.message), retry) };
}

function askForToken() {
  status.lost("token required");
  const input = h("input", { type: "password", id: "token", autocomplete: "off", spellcheck: "false", required: true });
  const submit = (event) => {
    event.preventDefault();
    useToken(input.value);
    route();
  };
  const form = h(
    "form",
    { class: "card alone", onsubmit: submit },
    h("h1", {}, "Token required"),
    h("p", {}, "The token is in ", h("code", {}, "control.json"), " in the directory of the run, or in ", h("code", {}, "service.json"), " in the directory of a service. The ", h("code", {}, "read_token"), " allows reading only."),
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
