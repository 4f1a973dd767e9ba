// The numbers of one run as columns with one entry per step; they grow while the run continues. Knows the names of the
// time metrics only; run_charts.js knows the others.

/**
 * @typedef {{step: number, when: string, temperature?: number, metric?: string, mean: number, low: number, high: number, n: number,
 *   success?: number}} Evaluation
 * @typedef {{code: string, severity: string, step: number, evidence: string, remedy: string}} Finding
 * @typedef {"step" | "time"} Axis
 */

const UNIX_S = "time/unix_s";
const PHASES = ["time/rollouts_s", "time/train_s"];

export class RunData {
  /**
   * @param {string} name
   * @param {{columns: Record<string, (number | null)[]>, evaluations: Evaluation[], findings: Finding[], summary: any,
   *   cursor?: string}} answer of `runs/{run}/columns`
   */
  constructor(name, { columns, evaluations, findings, summary, cursor = "" }) {
    this.name = name;
    this.columns = columns;
    this.evaluations = evaluations;
    this.findings = findings;
    this.summary = summary;
    this.cursor = cursor;
    /** Whether only a part of the steps is there, because the reader has zoomed in. */
    this.isPart = false;
    /** @type {number[]} */
    this.elapsed = [];
    this.#countSeconds();
  }

  /** The distance between two steps: more than 1 in a long run, of which only every nth step is there. */
  get every() {
    const { steps } = this;
    return steps.length > 2 ? Math.max(1, steps[1] - steps[0]) : 1;
  }

  /** Takes other steps of the same run. @param {{columns: Record<string, (number | null)[]>}} answer @param {boolean} isPart */
  replace({ columns }, isPart) {
    this.columns = columns;
    this.isPart = isPart;
    this.elapsed = [];
    this.#countSeconds();
  }

  /** The finished steps, in order. */
  get steps() {
    return /** @type {number[]} */ (this.columns.step ??= []);
  }

  /** The names of all metrics. */
  get names() {
    return Object.keys(this.columns).filter((name) => name !== "step" && name !== UNIX_S).sort();
  }

  /** The phases of a step by name, in seconds. They follow each other; the other times of a step are parts of them. */
  get phases() {
    return PHASES.filter((name) => name in this.columns);
  }

  /** @param {string} name @returns {(number | null)[]} */
  column(name) {
    return this.columns[name] ?? [];
  }

  /** Adds a step; one that is there already is left as it is. @param {Record<string, number>} metrics */
  append(metrics) {
    const steps = this.steps;
    if (this.isPart || (steps.length && metrics.step <= steps[steps.length - 1])) return;
    for (const name of Object.keys(metrics)) this.columns[name] ??= new Array(steps.length).fill(null);
    for (const name of Object.keys(this.columns)) this.columns[name].push(metrics[name] ?? null);
    this.#countSeconds();
  }

  /** Where the steps lie on an axis: their numbers, or seconds since the run began. @param {Axis} axis */
  places(axis) {
    return axis === "step" ? this.steps : this.elapsed;
  }

  /** Where one step lies. @param {number} step @param {Axis} axis */
  placeOf(step, axis) {
    if (axis === "step") return step;
    return step < 1 ? 0 : (this.elapsed[nearest(this.steps, step)] ?? 0);
  }

  /** Which step lies nearest to a place. @param {number} place @param {Axis} axis */
  stepAt(place, axis) {
    return this.steps[nearest(this.places(axis), place)];
  }

  #countSeconds() {
    const clock = this.column(UNIX_S);
    const phases = this.phases.map((name) => this.column(name));
    for (let i = this.elapsed.length; i < this.steps.length; i += 1) {
      const took = phases.reduce((sum, phase) => sum + (phase[i] ?? 0), 0);
      const before = i ? this.elapsed[i - 1] : 0;
      const [now, last] = [clock[i], i ? clock[i - 1] : null];
      // The time between steps counts too, such as that of held-out evaluations.
      const passed = i === 0 && now && this.summary.began_at ? now - this.summary.began_at : now && last ? now - last : took;
      this.elapsed.push(before + Math.max(passed, 1e-3));
    }
  }
}

/** The index of the entry nearest to a value in a sorted list. @param {number[]} sorted @param {number} value */
export function nearest(sorted, value) {
  let [low, high] = [0, sorted.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low > 0 && value - sorted[low - 1] <= sorted[low] - value ? low - 1 : low;
}
