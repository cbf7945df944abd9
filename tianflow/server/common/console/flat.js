// Settings as a flat table, by path, and the differences between the settings of several runs.

/** Settings that name a run, and say nothing about it. */
const NAMES = ["run.name", "run.preset"];

/** `sections` as a map from paths to values; tables inside of sections have longer paths. */
export function flattened(sections) {
  const found = new Map();
  const walk = (path, value) => {
    if (value !== null && typeof value === "object" && !Array.isArray(value) && Object.keys(value).length) {
      for (const [key, inner] of Object.entries(value)) walk(path ? `${path}.${key}` : key, inner);
    } else if (path) {
      found.set(path, value);
    }
  };
  walk("", sections ?? {});
  return found;
}

/** Paths whose values are not the same in all of `settings`, each with its value in each of them; undefined if it has none. */
export function differing(settings) {
  const paths = [...new Set(settings.flatMap((found) => [...found.keys()]))];
  return paths
    .filter((path) => !NAMES.includes(path))
    .map((path) => ({ path, values: settings.map((found) => found.get(path)) }))
    .filter(({ values }) => new Set(values.map((value) => JSON.stringify(value) ?? "")).size > 1);
}
