// Axes with round ticks, and short forms of numbers.

const STEPS = [1, 2, 2.5, 5, 10];
const TIMES = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400];
const UNITS = [[216000, 86400, "d"], [10800, 3600, "h"], [180, 60, "min"], [0, 1, "s"]];
/** Unit of a time axis by its length in seconds. */
const NOTHING = "–";

function roundStep(least, whole) {
  const magnitude = 10 ** Math.floor(Math.log10(least));
  const found = STEPS.map((factor) => factor * magnitude).find((step) => step >= least * (1 - 1e-9)) ?? 10 * magnitude;
  return whole ? Math.max(1, Math.ceil(found)) : found;
}

/**
 * An axis for `values`; missing numbers are ignored.
 * @returns {{low: number, high: number, ticks: {value: number, label: string}[]}}
 */
export function valueAxis(values, { zero = true, whole = false, count = 4, unit = 1, suffix = "" } = {}) {
  let low = zero ? 0 : Infinity;
  let high = zero ? 0 : -Infinity;
  for (const value of values) {
    if (!Number.isFinite(value)) continue;
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  if (!Number.isFinite(low)) [low, high] = [0, 1];
  if (high - low < 1e-9 * Math.max(1, Math.abs(high))) {
    const room = low === 0 ? 1 : Math.max(Math.abs(low) * 0.1, whole ? 1 : 0);
    [low, high] = low === 0 ? [0, 1] : [low - room, high + room];
  }
  const step = roundStep((high - low) / count, whole);
  low = Math.floor(low / step + 1e-9) * step;
  high = Math.ceil(high / step - 1e-9) * step;
  const ticks = [];
  for (let at = 0; at <= Math.round((high - low) / step); at += 1) {
    const value = low + at * step;
    ticks.push({ value, label: tickLabel(value / unit, step / unit) + suffix });
  }
  return { low, high, ticks };
}

function tickLabel(value, step) {
  const size = Math.max(Math.abs(value), step);
  const [scale, prefix] = size >= 1e9 ? [1e9, "G"] : size >= 1e6 ? [1e6, "M"] : size >= 1e4 ? [1e3, "k"] : [1, ""];
  if (value !== 0 && size < 1e-3) return minus(Number(value.toPrecision(3)).toExponential());
  const digits = Math.max(0, Math.min(6, -Math.floor(Math.log10(step / scale) + 1e-9)));
  const shown = (value / scale).toFixed(Math.abs(step / scale - Number((step / scale).toFixed(digits))) > 1e-9 ? digits + 1 : digits);
  return Number(shown) === 0 ? "0" : minus(shown) + prefix;
}

/** An axis of seconds from `low` to `high`. */
export function timeAxis(low, high, count = 5) {
  const span = Math.max(1, high - low);
  const step = TIMES.find((seconds) => seconds >= span / count) ?? 86400 * Math.ceil(span / count / 86400);
  const [, size, name] = UNITS.find(([from]) => low + span >= from);
  const ticks = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= low + span + 1e-9; at += 1) {
    ticks.push({ value: at * step, label: at === 0 ? "0" : `${Number(((at * step) / size).toFixed(2))} ${name}` });
  }
  return { low, high: low + span, ticks };
}

/** Seconds in at most `parts` units: `5 min`, `1 h 30 min`. */
export function duration(seconds, parts = 2) {
  if (!Number.isFinite(seconds)) return NOTHING;
  let left = Math.round(seconds);
  const found = [];
  for (const [size, name] of [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]]) {
    const whole = Math.floor(left / size);
    left -= whole * size;
    if (whole > 0 && found.length < parts) found.push(`${whole} ${name}`);
    else if (found.length > 0) break;
  }
  return found.join(" ") || "0 s";
}

/** A number in about four characters. */
export function number(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return NOTHING;
  const size = Math.abs(value);
  if (size >= 1e9) return minus(`${(value / 1e9).toFixed(2)}G`);
  if (size >= 1e6) return minus(`${(value / 1e6).toFixed(2)}M`);
  if (Number.isInteger(value) && size < 1e5) return minus(value.toLocaleString("en"));
  if (size >= 1e5) return minus(`${(value / 1e3).toFixed(0)}k`);
  if (size >= 1000) return minus(Math.round(value).toLocaleString("en"));
  return minus(size >= 100 ? value.toFixed(0) : size >= 10 ? value.toFixed(1) : size >= 0.01 || size === 0 ? value.toFixed(2) : value.toExponential(1));
}

/** A fraction as a percentage. */
export function percent(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return NOTHING;
  return `${(100 * value).toFixed(value > 0 && value < 0.0995 ? 1 : 0)}%`;
}

/** A whole number in full. */
export function whole(value) {
  return Number.isFinite(value) ? minus(Math.round(value).toLocaleString("en")) : NOTHING;
}

/** Bytes with a binary unit. */
export function bytes(value) {
  if (!Number.isFinite(value)) return NOTHING;
  const step = value < 1024 ? 0 : Math.min(4, Math.floor(Math.log2(value) / 10));
  return step ? `${(value / 1024 ** step).toFixed(1)} ${["", "KiB", "MiB", "GiB", "TiB"][step]}` : `${value} B`;
}

function minus(text) {
  return text.replace("-", "−");
}
