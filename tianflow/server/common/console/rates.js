// Speeds of a run over whole cycles of updates. Steps of slow updates arrive in bursts, and a second shows one burst or none.

const LEAST_UPDATES = 2;
const LONGEST_S = 300;
const RATES = ["steps_per_s", "updates_per_s"];

/** What a chart of smoothed speeds shows. */
export const WINDOW = "over two updates or more";

/** A speed of `row`, as `smoothed` has it; that of its own span without it. `name`: steps_per_s or updates_per_s. */
export function speedOf(row, name) {
  return row.smooth?.[name] ?? row[name];
}

/**
 * `rows` with `smooth`: speeds over a window that ends with the newest update and has at least `LEAST_UPDATES` updates, and no
 * more than `LONGEST_S` seconds. The window is longer if an update is overdue, so the speed of a stalled run falls. A row that has
 * the updates itself, or no speed, or another state than running, has the speed of its own span.
 */
export function smoothed(rows) {
  const updates = rows.map((row, at) => updatesIn(row, rows[at - 1]));
  const seconds = sums(rows.map((row) => row.span_s ?? 0));
  const counts = Object.fromEntries(RATES.map((name) => [name, sums(rows.map((row) => (row[name] ?? 0) * (row.span_s ?? 0)))]));
  let first = 0;
  let newest = -1;
  return rows.map((row, at) => {
    if (!isSteady(row)) {
      first = at + 1;
      newest = -1;
      return row;
    }
    if (updates[at] > 0) newest = at;
    if (updates[at] >= LEAST_UPDATES) return row;
    const [begin, end] = windowOf({ at, first, newest, updates, seconds });
    const passed = seconds[end + 1] - seconds[begin];
    if (passed <= 0) return row;
    return { ...row, smooth: Object.fromEntries(RATES.map((name) => [name, Number.isFinite(row[name]) ? (counts[name][end + 1] - counts[name][begin]) / passed : row[name]])) };
  });
}

/** First and last row of the window of the row `at`. The rows before `first` do not belong together with it. */
function windowOf({ at, first, newest, updates, seconds }) {
  let end = newest < 0 ? at : newest;
  let begin = end;
  let found = updates[end];
  // it begins after an update, so that it has whole cycles
  while (begin > first && (found < LEAST_UPDATES || !updates[begin - 1])) {
    begin -= 1;
    found += updates[begin];
  }
  const cycle = (seconds[end + 1] - seconds[begin]) / Math.max(1, found);
  if (seconds[at + 1] - seconds[end + 1] > cycle) end = at;
  while (begin < end && seconds[end + 1] - seconds[begin] > LONGEST_S) begin += 1;
  return [begin, end];
}

/** Whether the speeds of `row` and of its neighbours may be added. */
function isSteady(row) {
  return Number.isFinite(row.steps_per_s) && (row.state ?? "running") === "running";
}

/** Number of updates of `row`: by the counters, or by its speed where there is no counter. */
function updatesIn(row, before) {
  if (Number.isFinite(row.updates) && Number.isFinite(before?.updates)) return Math.max(0, row.updates - before.updates);
  return Math.round((row.updates_per_s ?? 0) * (row.span_s ?? 0)) || 0;
}

/** Sums of the first values, from none to all of them. */
function sums(values) {
  const found = [0];
  for (const value of values) found.push(found.at(-1) + value);
  return found;
}

/**
 * The newest speed in a run's document: of the shortest window in which there were two updates.
 * @param {{env_steps_per_s: object, updates_per_s: object} | undefined} throughput by the seconds of the window
 */
export function steadySpeed(throughput) {
  const speeds = throughput?.env_steps_per_s ?? {};
  const updates = throughput?.updates_per_s ?? {};
  const windows = Object.keys(speeds).sort((a, b) => a - b);
  if (!windows.some((window) => updates[window] > 0)) return speeds[windows[0]];
  return speeds[windows.find((window) => updates[window] * window >= LEAST_UPDATES) ?? windows.at(-1)];
}
