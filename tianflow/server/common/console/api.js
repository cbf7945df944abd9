// Requests to the API of this page's server, with the token from the page's address.

const KEY = "tianflow-token";
const TIMEOUT_MS = 10_000;

export const RUNS = "/api/v1/runs";
export const MERGE_PATCH = "application/merge-patch+json";

/** A refusal: the server's problem document, or a substitute for a server that does not answer. */
export class Refusal extends Error {
  constructor(status, problem) {
    super(problem.detail || problem.title || `The server answered with status ${status}.`);
    this.status = status;
    this.problem = problem;
    this.errors = Array.isArray(problem.errors) ? problem.errors : [];
  }
}

/** Path of a run. */
export function runPath(id, rest = "") {
  return `${RUNS}/${encodeURIComponent(id)}${rest}`;
}

/** Move `#token=…` from the address to the storage of this tab, so that bookmarks and the browser's history do not hold it. */
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
    memory = token.trim(); // storage is disabled: valid until the page is closed
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
 * Send a request.
 * @returns {Promise<{data: any, text: string, etag: string | null}>} `data`: the answer as JSON, null if it is not JSON.
 * @throws {Refusal} an error answer; status 0: no answer.
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
    response = await fetch(path, { method, headers: sent, body: data, cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
    text = await response.text();
  } catch (error) {
    throw new Refusal(0, { detail: error.name === "TimeoutError" ? "The server does not answer." : "The server cannot be reached." });
  }
  const data = parsed(text);
  if (response.status === 401) document.dispatchEvent(new Event("token-needed"));
  if (!response.ok) throw new Refusal(response.status, data && typeof data === "object" ? data : {});
  return { data, text, etag: response.headers.get("ETag") };
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}
