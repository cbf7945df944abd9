// Charts of learning statistics: specifications for panels, from the names in the rows.

/** Value of the statistic `name` in a row. */
const of = (name) => (row) => row.learning?.[name]?.mean;
const MOST_FURTHER = 24;
const UPDATES = "mean over updates";

/**
 * A chart of the statistics `names`; without `always` it is hidden while no row has one of them. A row without an update has
 * none: the line joins its neighbours, and the legend holds the last value.
 */
function chart(key, title, names, { unit = UPDATES, always = false, ...more } = {}) {
  return {
    key,
    title,
    unit,
    names,
    zero: false,
    when: always ? undefined : (rows) => rows.some((row) => names.some((name) => row.learning?.[name])),
    lines: (_, rows) =>
      names
        .map((name, at) => ({ name: shortName(name), css: `c${at}`, holds: true, of: of(name), full: name }))
        .filter(({ full }) => always || rows.some((row) => row.learning?.[full])),
    ...more,
  };
}

/** Charts that every run has. */
export const LEARNING = [
  chart("losses", "Losses", ["train/loss", "train/value_loss"], { always: true }),
  {
    key: "length",
    title: "Episode length",
    unit: "steps, mean of the last 100 episodes",
    lines: () => [{ name: "steps", css: "c2", of: (row) => row.mean_length }],
  },
];

/** Charts that depend on the algorithm. */
export const OF_ALGORITHMS = [
  // A value loss is often thousands of times as large, so the policy loss has a scale of its own.
  chart("policy-loss", "Policy loss", ["train/policy_loss"]),
  chart("entropy", "Entropy", ["train/entropy"], { unit: `nats, ${UPDATES}` }),
  chart("kl", "KL divergence", ["train/approx_kl", "train/kl"], { unit: `nats, ${UPDATES}`, zero: true }),
  chart("explained-variance", "Explained variance", ["train/explained_variance"]),
  chart("clip-fraction", "Clip fraction", ["train/clip_fraction"], { zero: true }),
  chart("q-values", "Action values", ["train/q_value", "train/td_error"]),
  chart("grad-norm", "Gradient norm", ["train/grad_norm"], { zero: true }),
  chart("learning-rate", "Learning rate", ["train/learning_rate"], { zero: true }),
  chart("exploration", "Exploration", ["rollout/exploration_rate", "rollout/noise_std", "train/temperature"], { zero: true }),
];

const KNOWN = new Set([...LEARNING, ...OF_ALGORITHMS].flatMap((spec) => spec.names ?? []));

/** Charts of statistics that have none of those, such as a user's own; the first `MOST_FURTHER` names. */
export function furtherCharts(rows) {
  const names = new Set(rows.flatMap((row) => Object.keys(row.learning ?? {})));
  return [...names]
    .filter((name) => !KNOWN.has(name))
    .sort()
    .slice(0, MOST_FURTHER)
    .map((name) => chart(`statistic-${name}`, name, [name], { unit: unitOf(name) }));
}

/** What a value of the statistic `name` is the mean of. */
export function unitOf(name) {
  return name.startsWith("rollout/") ? "mean over episodes" : UPDATES;
}

function shortName(name) {
  return name.split("/").slice(1).join("/") || name;
}
