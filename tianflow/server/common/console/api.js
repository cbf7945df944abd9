// Requests to the API of the server that this page came from, with the token that its address carried.

const KEY = "tianflow-token";
const PATIENCE_MS = 10_000;

export const RUNS = "/api/v1/runs";
export const MERGE_PATCH = "application/merge-patch+json";

/** Why an answer is none: the server's problem document, or one made up for a server that says nothing. */
export class Refusal extends Error {
  constructor(status, problem) {
    super(problem.detail || problem.title || `The answer was ${status}.`);
    this.status = status;
    this.problem = problem;
    this.errors = Array.isArray(problem.errors) ? problem.errors : [];
  }
}

/** Where a run is. */
export function runPath(id, rest = "") {
  return `${RUNS}/${encodeURIComponent(id)}${rest}`;
}

/** Take `#token=…` out of the address, so that it is in no bookmark and no history, and keep it while this tab is open. */
export function takeToken() {
  if (!location.hash.startsWith("#token=")) return;
  const given = new URLSearchParams(location.hash.slice(1));
  useToken(given.get("token") ?? "");
  const run = given.get("run");
  history.replaceState(null, "", location.pathname + (run ? `#/runs/${encodeURIComponent(run)}` : ""));
}

/** Use `token` from now on. */
export function useToken(token) {
  try {
    sessionStorage.setItem(KEY, token.trim());
  } catch {
    memory = token.trim(); // storage is switched off: it lasts as long as the page
  }
}

let memory = "";

function token() {
  try {
    return sessionStorage.getItem(KEY) ?? memory;
  } catch {
    return memory;
  }
}

/**
 * Ask the server.
 * @returns {Promise<{data: any, etag: string | null}>}
 * @throws {Refusal} an answer that is an error; status 0: no answer.
 */
export async function ask(path, { method = "GET", body, type = "application/json", etag, headers = {} } = {}) {
  const sent = { Accept: "application/json, application/problem+json", ...headers };
  if (token()) sent.Authorization = `Bearer ${token()}`;
  if (body !== undefined) sent["Content-Type"] = type;
  if (etag) sent["If-Match"] = etag;
  let response;
  let text;
  try {
    const data = body === undefined ? undefined : JSON.stringify(body);
    response = await fetch(path, { method, headers: sent, body: data, cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
    text = await response.text();
  } catch (error) {
    throw new Refusal(0, { detail: error.name === "TimeoutError" ? "The server does not answer." : "The server cannot be reached." });
  }
  const data = parsed(text);
  if (response.status === 401) document.dispatchEvent(new Event("token-needed"));
  if (!response.ok) throw new Refusal(response.status, data && typeof data === "object" ? data : {});
  return { data, etag: response.headers.get("ETag") };
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}
