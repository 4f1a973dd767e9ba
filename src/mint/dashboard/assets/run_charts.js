// The charts on the page of a run: their titles and metrics. Pure; draws nothing.

/**
 * @typedef {import("./run_data.js").RunData} RunData
 * @typedef {{values?: (number | null)[], evaluations?: import("./run_data.js").Evaluation[]}} Read one value per step, or
 *   evaluations with intervals at some steps
 * @typedef {{key: string, label: string, side?: "right", isTold?: boolean, read: (run: RunData) => Read}} Series `isTold`:
 *   its label has its value, and it is not drawn
 * @typedef {"share" | "seconds" | "count" | "number"} Unit
 * @typedef {{id: string, title: string, series: (runs: RunData[]) => Series[], unit?: Unit, include?: number[],
 *   isStacked?: boolean, isWide?: boolean, note?: string, y?: string, right?: string}} ChartSpec `include` are values that
 *   the scale always shows; `y` and `right` are the titles of the axes
 */

/** A metric as it is logged. @param {string} name @param {string} [label] @param {"right"} [side] @returns {Series} */
export const metric = (name, label = name, side) => ({ key: name, label, side, read: (run) => ({ values: run.column(name) }) });

/** One metric divided by others' sum. @param {string} name @param {string} label @param {string} of @returns {Series} */
const share = (name, label, of) => ({
  key: `${name}:${of}`,
  label,
  read: (run) => ({ values: divided(run.column(name), [run.column(of)]) }),
});

/** The evaluations with one value of a field. @param {"temperature" | "metric"} field @param {number | string} value
 * @param {string} label @returns {Series} */
const heldout = (field, value, label) => ({
  key: `heldout:${value}`,
  label,
  read: (run) => ({ evaluations: run.evaluations.filter((evaluation) => evaluation[field] === value) }),
});

/** @type {Series} */
const throughput = {
  key: "tokens_per_s",
  label: "tokens/s",
  read: (run) => ({ values: divided(run.column("rollouts/tokens"), run.phases.map((name) => run.column(name))) }),
};

function divided(above, below) {
  return above.map((value, i) => {
    const sum = below.reduce((total, column) => total + (column[i] ?? 0), 0);
    return value === null || !(sum > 0) ? null : value / sum;
  });
}

/** All metrics below a prefix, in any of the runs. @param {string} prefix @param {string} [end] */
const below = (prefix, end = "") => (/** @type {RunData[]} */ runs) => {
  const names = new Set(runs.flatMap((run) => run.names.filter((name) => name.startsWith(prefix) && name.endsWith(end))));
  return [...names].sort().map((name) => metric(name, name.slice(prefix.length, name.length - end.length)));
};

/** The values that a field has in any evaluation. @param {RunData[]} runs @param {"temperature" | "metric"} field */
const valuesOf = (runs, field) =>
  [...new Set(runs.flatMap((run) => run.evaluations.map((evaluation) => evaluation[field])))].filter((value) => value !== undefined);

/** Held-out rewards of RL runs. */
const temperatures = (/** @type {RunData[]} */ runs) =>
  valuesOf(runs, "temperature").sort((a, b) => b - a)
    .map((one) => heldout("temperature", one, one === 0 ? "greedy" : `temperature ${one}`));

/** Held-out losses and accuracies of supervised runs. */
const heldoutMetrics = (/** @type {RunData[]} */ runs) => valuesOf(runs, "metric").map((name) => heldout("metric", name, name));

/** The losses of supervised runs; an RL run is shown by its rewards. */
const losses = (/** @type {RunData[]} */ runs) =>
  runs.some(({ names }) => names.includes("reward/mean")) ? []
    : [metric("train/loss", "loss"), metric("train/pair_loss", "loss of a pair"), metric("train/reverse_kl", "reverse KL")];

const hasTurns = (/** @type {RunData} */ run) => run.column("rollouts/turns_mean").some((turns) => turns !== null && turns > 1);

const hasSampling = (/** @type {RunData} */ run) => run.column("time/sampling_s").some((seconds) => seconds !== null);

const wholePhases = [metric("time/rollouts_s", "rollouts"), metric("time/train_s", "training")];

/** Parts of a step that follow each other, so that their sum is its time. @type {Series[]} */
const partsOfStep = [
  metric("time/sampling_s", "sampling"),
  metric("time/grading_after_sampling_s", "grading after it"),
  {
    key: "time/rollouts_s:rest",
    label: "rest of rollouts",
    read: (run) => {
      const [sampling, grading] = [run.column("time/sampling_s"), run.column("time/grading_after_sampling_s")];
      return { values: run.column("time/rollouts_s").map((all, i) =>
        (all === null ? null : Math.max(0, all - (sampling[i] ?? 0) - (grading[i] ?? 0)))) };
    },
  },
  metric("time/train_s", "training"),
];

const always = (/** @type {Series[]} */ ...series) => () => series;

/** @type {ChartSpec[]} */
export const CHARTS = [
  { id: "reward", title: "Success and reward", y: "mean per rollout", isWide: true, include: [0, 1],
    series: always(metric("success/rate", "success rate"), metric("reward/mean", "reward")) },
  { id: "heldout", title: "Held-out reward, 95 % intervals", y: "mean reward", isWide: true, include: [0, 1], series: temperatures },
  { id: "loss", title: "Loss", y: "loss", isWide: true, series: losses },
  { id: "heldout-metrics", title: "Held-out loss and accuracy, 95 % intervals", y: "mean", isWide: true, series: heldoutMetrics },
  { id: "parts", title: "Reward by part", y: "mean reward", include: [0], series: below("reward/part/") },
  { id: "categories", title: "Reward by category", y: "mean reward", include: [0], series: below("category/", "/reward") },
  { id: "groups", title: "Groups by signal", y: "share of groups", unit: "share", include: [0, 1],
    series: always(share("groups/used", "informative", "groups/total"), share("groups/all_good", "all good", "groups/total"),
      share("groups/all_bad", "all bad", "groups/total")) },
  { id: "ledger", title: "Where tokens go", y: "share of sampled tokens", unit: "share", include: [0, 1],
    series: always(share("ledger/informative", "informative", "ledger/generated"), share("ledger/trained", "trained", "ledger/generated"),
      share("ledger/gradient", "with gradient", "ledger/generated"), share("ledger/graded", "graded", "ledger/generated")) },
  { id: "entropy", title: "Entropy", y: "nats per token", include: [0],
    series: always(metric("train/entropy", "trained tokens"), metric("rollouts/entropy_estimate", "all, by logprob")) },
  { id: "kl", title: "KL to the sampling policy", y: "nats per token", series: always(metric("train/kl_k1", "k1"), metric("train/kl_k2", "k2"), metric("train/kl_k3", "k3")) },
  { id: "reference", title: "KL to the reference", y: "nats per token", series: always(metric("kl/policy_reference_k1", "k1"), metric("kl/policy_reference_k3", "k3")) },
  { id: "length", title: "Length", y: "tokens per rollout", unit: "count", series: always(metric("rollouts/mean_length", "mean"), metric("rollouts/max_length", "longest")) },
  { id: "truncation", title: "Truncated and duplicate", y: "share of rollouts", unit: "share", include: [0],
    series: always(metric("rollouts/truncated_share", "truncated"), metric("rollouts/duplicate_share", "duplicate")) },
  { id: "turns", title: "Turns and tool calls", y: "mean per rollout", include: [0],
    series: (runs) => (runs.some(hasTurns) ? [metric("rollouts/turns_mean", "turns"), metric("rollouts/tool_calls_mean", "tool calls")] : []) },
  { id: "norms", title: "Gradient and update norm", y: "gradient norm", right: "update norm", series: always(metric("optim/grad_norm", "gradient"), metric("optim/update_norm", "update", "right")) },
  { id: "ratio", title: "Probability ratio", y: "ratio to the sampling policy", series: always(metric("train/ratio", "mean"), metric("train/ratio_min", "min"),
    metric("train/ratio_max", "max"), metric("train/ratio_p99", "p99"), metric("train/ess", "effective sample size")) },
  { id: "mismatch", title: "Sampler–trainer mismatch", y: "|Δ logprob|, nats",
    series: always(metric("mismatch/mean_abs_logprob_diff", "mean"), metric("mismatch/max_abs_logprob_diff", "max"), metric("mismatch/k3", "k3")) },
  { id: "rate", title: "Learning rate and temperature", y: "learning rate", right: "temperature", series: always(metric("learning_rate", "learning rate"), metric("temperature", "temperature", "right")) },
  { id: "throughput", title: "Throughput", y: "sampled tokens per second", unit: "count", include: [0], series: always(throughput) },
  { id: "phases", title: "Time per phase", y: "time per step", unit: "seconds", include: [0], isStacked: true,
    series: (runs) => (runs.some(hasSampling) ? partsOfStep : wholePhases) },
];

/** Rooms of metrics whose names say nothing to a reader. */
const ROOMS = /^(optim|train|rollouts)\//;

/** The name of a metric in words: `optim/update_norm` is "update norm". @param {string} name */
const inWords = (name) => name.replace(ROOMS, "").replaceAll(/[/_]/g, " ");

/** A chart of one metric with a title in words; the metric's name is the title's tip. @param {string} name @returns {ChartSpec} */
export function chartInWords(name) {
  const words = inWords(name);
  return { id: `metric:${name}`, title: words[0].toUpperCase() + words.slice(1), note: name, y: words, series: always(metric(name, words)) };
}

/** A chart of one metric. @param {string} name @returns {ChartSpec} */
export const chartOf = (name) => ({ id: `metric:${name}`, title: name, y: name.split("/").at(-1), series: always(metric(name, name.split("/").at(-1))) });

/** What a task or a user's own metric reports: one chart for each number. @param {RunData[]} runs @returns {ChartSpec[]} */
export const taskCharts = (runs) =>
  [...below("info/")(runs), ...below("custom/")(runs)].map(({ key, label }) => ({ ...chartOf(key), id: `task:${key}`, title: label }));
