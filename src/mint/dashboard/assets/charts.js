// Charts over uPlot that share a crosshair, zoom, axis and smoothing. A board holds them; a chart is drawn when it becomes
// visible. Knows run data and chart specs, not the page around them.

import uPlot from "./uplot.js";
import { padded, placed, smoothed, stackedOn, tableOf, withEdges } from "./chart_numbers.js";
import { axesOf, COLORS, DASHES, drawMarks, drawReadings, readColors, swatch, withAlpha } from "./chart_paint.js";
import { afterPause, compact, duration, el, NONE, number, oncePerFrame, onTheme, percent } from "./common.js";
import { nearest } from "./run_data.js";

/**
 * @typedef {import("./run_data.js").RunData} RunData
 * @typedef {import("./run_data.js").Axis} Axis
 * @typedef {import("./run_charts.js").ChartSpec} ChartSpec
 * @typedef {import("./run_charts.js").Series} Series
 * @typedef {{run: RunData, series: Series, color: number, dash: number[], x: number[], y: (number | null)[],
 *   low?: number[], high?: number[], steps?: number[], under?: number}} Line a line with `low`, `high` and `steps` holds
 *   evaluations; `under` counts the lines that will hide it
 */

const HEIGHT = 172;
const NEAR_PX = 18;
const FEW_READINGS = 3;
/** Constants of a run this short say nothing yet. */
const LEAST_STEPS = 3;
const FEW_POINTS = 12;
const TABLE_ROWS = 300;

let boards = 0;

/** Charts that share runs, axis, smoothing, zoom and crosshair. */
export class Board {
  /** @type {Chart[]} */
  charts = [];
  /** @type {RunData[]} */
  runs = [];

  /**
   * @param {{axis?: Axis, smoothing?: number, zoom?: [number, number] | null, onPoint?: (run: RunData, step: number) => void,
   *   onHover?: (step: number | null) => void, onZoom?: (zoom: [number, number] | null) => void, constants?: HTMLElement}} [options]
   *   smoothing is the weight of what came before, 0 to below 1; `constants` gets one line of text for all charts in which
   *   nothing changes
   */
  constructor({ axis = "step", smoothing = 0, zoom = null, onPoint, onHover, onZoom, constants } = {}) {
    this.axis = axis;
    this.smoothing = smoothing;
    this.zoom = zoom;
    this.onPoint = onPoint;
    this.onHover = onHover;
    this.onZoom = onZoom;
    this.constants = constants;
    this.key = `board-${boards++}`;
    this.changed = oncePerFrame(() => {
      this.charts.forEach((chart) => chart.invalidate());
      this.#showConstants();
    });
    this.seen = new IntersectionObserver((changes) => changes.forEach(({ target, isIntersecting }) =>
      this.charts.find((chart) => chart.card === target)?.setSeen(isIntersecting)), { rootMargin: "200px" });
    this.sized = new ResizeObserver((changes) => changes.forEach(({ target }) =>
      this.charts.find((chart) => chart.place === target)?.fit()));
    onTheme(() => {
      this.colors = readColors();
      this.charts.forEach((chart) => chart.rebuild());
    });
    this.colors = readColors();
  }

  /** Lists the folded charts, each as a button that draws it. */
  #showConstants() {
    if (!this.constants) return;
    const folded = this.charts.filter(({ isFolded }) => isFolded);
    this.constants.hidden = folded.length === 0;
    const unfold = (chart) => {
      chart.unfold();
      this.#showConstants();
      chart.place.focus();
    };
    this.constants.replaceChildren(el("span", { class: "muted" }, "Constant: "), ...folded.map((chart) => el("button",
      { type: "button", class: "constant", dataset: { folded: chart.spec.id }, title: "Draw this chart", onclick: () => unfold(chart) },
      el("span", { class: "muted" }, `${chart.spec.title} `), chart.constantText())));
  }

  /** Whether several runs are compared: then colour stands for the run, and each chart shows one series. */
  get isComparing() {
    return this.runs.length > 1;
  }

  /** Adds a chart to an element. @param {HTMLElement} host @param {ChartSpec} spec @param {{marks?: {step: number, severity: string}[]}} [options] */
  add(host, spec, { marks = [] } = {}) {
    const chart = new Chart(this, spec, marks);
    this.charts.push(chart);
    host.append(chart.card);
    this.seen.observe(chart.card);
    this.sized.observe(chart.place);
    return chart;
  }

  /** @param {Chart} chart */
  remove(chart) {
    this.charts = this.charts.filter((other) => other !== chart);
    this.seen.unobserve(chart.card);
    this.sized.unobserve(chart.place);
    chart.destroy();
  }

  /** @param {RunData[]} runs */
  setRuns(runs) {
    this.runs = runs;
    this.changed();
  }

  /** @param {Axis} axis */
  setAxis(axis) {
    this.axis = axis;
    this.setZoom(null);
    this.charts.forEach((chart) => chart.rebuild());
  }

  /** @param {number} smoothing */
  setSmoothing(smoothing) {
    this.smoothing = smoothing;
    this.changed();
  }

  /** @param {[number, number] | null} zoom in steps or seconds, as the axis is */
  setZoom(zoom) {
    this.zoom = zoom;
    this.onZoom?.(zoom);
    this.changed();
  }

  /** The range of the axis over all runs, so that all charts are aligned. @returns {[number, number]} */
  get extent() {
    const places = this.runs.flatMap((run) => {
      const own = run.places(this.axis);
      return [own[0], own[own.length - 1], ...run.evaluations.map(({ step }) => run.placeOf(step, this.axis))];
    }).filter((place) => place !== undefined);
    const [low, high] = [Math.min(...places), Math.max(...places)];
    if (!Number.isFinite(low)) return [0, 1];
    const room = 0.012 * (high - low) || 1;
    return [low - room, high + room];
  }

  /** The visible range of the axis. */
  get range() {
    return this.zoom ?? this.extent;
  }
}

/** The series of a run, those whose values are equal at every step as one with all their labels.
 * @param {Series[]} all @param {RunData} run @returns {Series[]} */
function joinedWhereEqual(all, run) {
  /** @type {{series: Series, values?: (number | null)[]}[]} */
  const found = [];
  for (const series of all) {
    const { values } = series.read(run);
    const same = found.find((other) => series.side === other.series.side && values?.length === other.values?.length
      && values?.every((value, i) => value === other.values?.[i]));
    if (same) same.series = { ...same.series, label: `${same.series.label} = ${series.label}` };
    else found.push({ series, values });
  }
  return found.map(({ series }) => series);
}

/** The value of a series that is the same at every step of a run; null for others. @param {Series} series @param {RunData} run */
function constantOf(series, run) {
  const values = (series.read(run).values ?? []).filter((value) => value !== null);
  return values.length >= LEAST_STEPS && values.every((value) => value === values[0]) ? values[0] : null;
}

/** One chart in its panel: title, legend, plot, and the data as a table. */
class Chart {
  /** @type {uPlot | null} */
  plot = null;
  /** What each of uPlot's series stands for. @type {{line: Line, role: "raw" | "main" | "low" | "high"}[]} */
  roles = [];
  /** @type {Line[]} */
  lines = [];
  shape = "";
  /** Whether nothing in it changes, so that a line of text stands for it. */
  isFolded = false;
  /** Whether the reader asked to see it nevertheless. */
  isUnfolded = false;
  isSeen = false;
  isStale = true;
  /** @type {Set<string>} */
  hidden = new Set();
  chosen = "";

  /** @param {Board} board @param {ChartSpec} spec @param {{step: number, severity: string}[]} marks */
  constructor(board, spec, marks) {
    this.board = board;
    this.spec = spec;
    this.marks = marks;
    this.legend = el("div", { class: "chart-legend" });
    this.place = el("div", { class: "chart-plot", tabindex: "0", role: "img", "aria-label": spec.title, onkeydown: (event) => this.#walk(event) });
    this.table = el("div", { class: "chart-table", tabindex: "0", role: "region", "aria-label": `${spec.title}, table`, hidden: true });
    this.toggle = el("button", { type: "button", class: "button button--plain chart-toggle", "aria-pressed": "false",
      "aria-label": `${spec.title} as a table`, title: "As a table", onclick: () => this.#toggleTable() }, "≡");
    this.card = el("section", { class: `panel chart${spec.isWide ? " chart--wide" : ""}`, dataset: { chart: spec.id } },
      el("header", {}, el("h2", { title: spec.note }, spec.title), this.toggle), this.legend, this.place, this.table);
    this.describe = afterPause(() => this.place.setAttribute("aria-label", this.#inWords()), 400);
  }

  setSeen(isSeen) {
    this.isSeen = isSeen;
    if (isSeen && this.isStale && this.lines.length && !this.isFolded) this.draw();
  }

  invalidate() {
    this.isStale = true;
    this.lines = this.#lines();
    this.isFolded = !this.isUnfolded && Boolean(this.board.constants) && this.lines.length > 0 && this.constantText() !== "";
    this.card.hidden = this.lines.length === 0 || this.isFolded;
    this.card.classList.toggle("chart--wide", Boolean(this.spec.isWide) && this.lines.some(({ x, low }) => !low || x.length >= FEW_READINGS));
    if (this.isSeen && this.lines.length && !this.isFolded) this.draw();
  }

  /** Draws a chart in which nothing changes. */
  unfold() {
    this.isUnfolded = true;
    this.invalidate();
  }

  /** The value of each series if none of them ever changes, in any run; otherwise an empty text. */
  constantText() {
    const { runs } = this.board;
    if (Math.max(...runs.map(({ steps }) => steps.length)) < LEAST_STEPS) return "";
    const values = [];
    const present = this.#present();
    for (const series of present) {
      const found = new Set();
      for (const run of runs) {
        const read = series.read(run);
        if (read.evaluations?.length) return "";
        for (const value of read.values ?? []) if (value !== null) found.add(value);
        if (found.size > 1) return "";
      }
      const label = present.length === 1 && series.label === this.spec.title ? "" : `${series.label} `;
      values.push(label + this.#format([...found][0]));
    }
    return values.join(", ");
  }

  rebuild() {
    this.shape = "";
    this.invalidate();
  }

  destroy() {
    this.plot?.destroy();
    this.card.remove();
  }

  fit() {
    if (this.plot && this.place.clientWidth) this.plot.setSize({ width: this.place.clientWidth, height: HEIGHT });
  }

  draw() {
    this.isStale = false;
    const { lines } = this;
    const shape = JSON.stringify([lines.map(({ run, series, low, under }) => [run.name, series.key, Boolean(low), under]), this.board.smoothing > 0, this.board.axis]);
    if (shape !== this.shape || !this.plot) this.#build(lines, shape);
    else {
      this.#takeLines(lines);
      this.plot.setData(this.#data(lines));
    }
    this.#showValues((this.plot?.cursor.left ?? -1) >= 0 ? this.plot?.cursor.idxs : null);
    if (!this.table.hidden) this.#fillTable();
    this.describe();
  }

  /** @returns {Series[]} the shown series that have numbers */
  #shown() {
    const all = this.#available();
    if (!this.board.isComparing) return all.filter(({ key }) => !this.hidden.has(key));
    return all.filter(({ key }, i) => (this.chosen ? key === this.chosen : i === 0));
  }

  /** @returns {Series[]} those that have numbers; of one run, those with equal numbers as one, which would hide each other;
   * one on an axis of its own that never changes is told in the legend only */
  #available() {
    const present = this.#present();
    if (this.board.isComparing || this.spec.isStacked) return present;
    const [run] = this.board.runs;
    return joinedWhereEqual(present, run).map((series) => {
      const value = series.side ? constantOf(series, run) : null;
      return value === null ? series : { ...series, side: undefined, isTold: true, label: `${series.label} ${this.#format(value)}` };
    });
  }

  #present() {
    const { runs } = this.board;
    return this.spec.series(runs).filter((series) => runs.some((run) => {
      const { values, evaluations } = series.read(run);
      return evaluations?.length || values?.some((value) => value !== null);
    }));
  }

  /** @returns {Line[]} */
  #lines() {
    const { runs, axis, isComparing } = this.board;
    const available = this.#available();
    const shown = this.#shown();
    return withEdges(runs.flatMap((run, i) => shown.flatMap((series) => {
      /** @type {Line[]} */
      const none = [];
      const color = (isComparing ? i : available.findIndex(({ key }) => key === series.key)) % COLORS;
      const dash = isComparing ? DASHES[i % COLORS] : [];
      const { values, evaluations } = series.read(run);
      if (series.isTold) return none;
      if (evaluations?.length) return [{ run, series, color, dash, ...placed(run, evaluations, axis) }];
      return !values?.some((value) => value !== null) ? none : [{ run, series, color, dash, x: run.places(axis), y: values }];
    })));
  }

  get #isStacked() {
    return Boolean(this.spec.isStacked) && !this.board.isComparing;
  }

  #smooths(line) {
    return this.board.smoothing > 0 && !line.low;
  }

  #takeLines(lines) {
    this.roles = lines.flatMap((line) => {
      /** @type {("raw" | "main" | "low" | "high")[]} */
      const roles = line.low ? ["main", "low", "high"] : this.#smooths(line) && !this.#isStacked ? ["raw", "main"] : ["main"];
      return roles.map((role) => ({ line, role }));
    });
  }

  /** The columns for uPlot: the x values of all lines together, then the y values of each line. */
  #data(lines) {
    /** @type {Map<number[], any[][]>} */
    const tables = new Map();
    let below = null;
    for (const line of lines) {
      const table = tables.get(line.x) ?? [line.x];
      tables.set(line.x, table);
      let main = this.#smooths(line) ? smoothed(line.y, this.board.smoothing) : line.y;
      if (this.#isStacked) main = below = stackedOn(main, below);
      else if (this.#smooths(line)) table.push(line.y);
      table.push(main);
      if (line.low) table.push(line.low, line.high ?? []);
    }
    return tables.size ? uPlot.join([...tables.values()]) : [[], []];
  }

  #build(lines, shape) {
    this.shape = shape;
    this.plot?.destroy();
    this.#takeLines(lines);
    this.plot = new uPlot(this.#options(), this.#data(lines), this.place);
    this.plot.over.addEventListener("click", (event) => this.#click(event));
    this.plot.over.addEventListener("mouseleave", () => this.board.onHover?.(null));
    this.#buildLegend(lines);
  }

  #options() {
    const { board } = this;
    const { colors } = board;
    const usesRight = this.roles.some(({ line }) => line.series.side) && !board.isComparing;
    return {
      width: Math.max(this.place.clientWidth, 120),
      height: HEIGHT,
      legend: { show: false },
      padding: [6, usesRight ? 0 : 14, 0, 0],
      cursor: this.#cursor(),
      scales: {
        x: { time: false, range: () => board.range },
        y: { range: (_plot, low, high) => padded(low, high, this.spec.include ?? []) },
        right: { range: (_plot, low, high) => padded(low, high, []) },
      },
      series: [{}, ...this.roles.map(({ line, role }) => this.#seriesOf(line, role))],
      bands: this.#bands(),
      axes: axesOf(colors, { isTime: board.axis === "time", unit: this.spec.unit, usesRight, y: this.#axisTitle, right: this.spec.right }),
      hooks: {
        drawAxes: [(plot) => drawMarks(plot, this.#marksInView(), colors)],
        draw: [(plot) => drawReadings(plot, this.lines.filter(({ low }) => low), colors)],
        setCursor: [(plot) => this.#follow(plot)],
        setSelect: [(plot) => this.#zoomTo(plot)],
      },
    };
  }

  #cursor() {
    const { board } = this;
    return {
      y: false,
      points: { size: (_plot, i) => (this.roles[i - 1]?.role === "main" ? 8 : 0), width: 1.5, stroke: board.colors.panel,
        fill: (_plot, i) => board.colors.lines[this.roles[i - 1]?.line.color ?? 0] },
      drag: { x: true, y: false, setScale: false, dist: 5 },
      bind: { dblclick: () => () => { clearTimeout(this.opening); board.setZoom(null); } },
      sync: { key: board.key, scales: ["x", null], setSeries: false,
        filters: { pub: (type) => type === "mousemove" || type === "mouseleave" || type === "mouseenter", sub: () => true } },
    };
  }

  #seriesOf(line, role) {
    const color = this.board.colors.lines[line.color];
    const scale = line.series.side && !this.board.isComparing ? "right" : "y";
    if (role === "low" || role === "high") return { scale, width: 0, stroke: color, points: { show: false } };
    // Evaluations are single readings: a line between them would claim what nobody measured.
    if (line.low) return { scale, stroke: color, paths: () => null, points: { show: false } };
    const hasFew = (_plot, _series, from, to) => to - from < FEW_POINTS;
    if (role === "raw") return { scale, spanGaps: true, stroke: color, width: 1, alpha: 0.28, points: { size: 4, fill: color, width: 0, show: hasFew } };
    const fill = this.#isStacked && this.roles[0].line === line ? withAlpha(color, 0.35) : undefined;
    // A smoothed line has no points of its own: the dots are at what was measured.
    const show = this.#smooths(line) ? false : hasFew;
    return { scale, stroke: color, width: 1.5 + 1.1 * (line.under ?? 0), dash: line.dash, fill, spanGaps: true, points: { size: 4, fill: color, width: 0, show } };
  }

  #bands() {
    const { lines } = this.board.colors;
    const places = this.roles.map(({ line, role }, i) => ({ line, role, i: i + 1 }));
    return this.#isStacked ? places.slice(1).map(({ line, i }) => ({ series: [i, i - 1], fill: withAlpha(lines[line.color], 0.35) })) : [];
  }

  /** What the left axis counts. */
  get #axisTitle() {
    return this.spec.y ?? "";
  }

  #marksInView() {
    const [run] = this.board.runs;
    const [from, to] = this.board.range;
    const marks = run ? this.marks.map(({ step, severity }) => ({ place: run.placeOf(step, this.board.axis), severity })) : [];
    return marks.filter(({ place }) => place >= from && place <= to);
  }

  /* crosshair, zoom, click */

  #follow(plot) {
    const isInside = plot.cursor.left >= 0;
    this.#showValues(isInside ? plot.cursor.idxs : null);
    if (!isInside || !plot.over.matches(":hover")) return;
    const place = plot.posToVal(plot.cursor.left, "x");
    this.board.onHover?.(this.board.runs[0]?.stepAt(place, this.board.axis) ?? null);
    plot.over.classList.toggle("is-near", Boolean(this.board.onPoint && this.#pointAt(plot)));
  }

  /** The line with a point near the mouse. @returns {{line: Line, place: number} | null} */
  #pointAt(plot) {
    let best = null;
    let least = NEAR_PX;
    this.roles.forEach(({ line, role }, i) => {
      const at = plot.cursor.idxs?.[i + 1];
      const value = at === null || at === undefined ? null : plot.data[i + 1][at];
      if (role !== "main" || value === null || value === undefined) return;
      const scale = plot.series[i + 1].scale;
      const far = Math.hypot(plot.valToPos(value, scale) - plot.cursor.top, (plot.valToPos(plot.data[0][at], "x") - plot.cursor.left) / 2);
      if (far < least) [best, least] = [{ line, place: plot.data[0][at] }, far];
    });
    return best;
  }

  #click(event) {
    const point = this.plot && this.#pointAt(this.plot);
    // A touch cannot hover first, so it does not open a step; the link in the toolbar does.
    if (!point || !this.board.onPoint || event.pointerType === "touch") return;
    const { run } = point.line;
    clearTimeout(this.opening);
    // A double click resets the zoom: wait to see if this is one.
    this.opening = setTimeout(() => this.board.onPoint?.(run, run.stepAt(point.place, this.board.axis)), 260);
  }

  #zoomTo(plot) {
    const { left, width } = plot.select;
    if (width < 5) return;
    const zoom = /** @type {[number, number]} */ ([plot.posToVal(left, "x"), plot.posToVal(left + width, "x")]);
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.board.setZoom(zoom);
  }

  /** Arrow keys move the crosshair, Enter opens the step. */
  #walk(event) {
    const { plot } = this;
    if (!plot || event.ctrlKey || event.metaKey || event.altKey) return;
    const places = plot.data[0];
    const [from, to] = this.board.range;
    const at = plot.cursor.left >= 0 ? nearest(places, plot.posToVal(plot.cursor.left, "x")) : -1;
    const by = event.shiftKey ? 10 : 1;
    const next = { ArrowRight: at + by, ArrowLeft: at < 0 ? places.length - 1 : at - by, Home: 0, End: places.length - 1 }[event.key];
    if (next !== undefined) {
      const place = Math.min(to, Math.max(from, places[Math.max(0, Math.min(places.length - 1, next))]));
      plot.setCursor({ left: plot.valToPos(place, "x"), top: plot.over.clientHeight / 2 }, true, true);
      const step = this.board.runs[0].stepAt(place, this.board.axis);
      this.board.onHover?.(step);
      this.place.setAttribute("aria-label", `${this.spec.title}, step ${step}: ${this.#valuesInWords(plot.cursor.idxs)}`);
    } else if (event.key === "Enter" && at >= 0) this.board.onPoint?.(this.board.runs[0], this.board.runs[0].stepAt(places[at], this.board.axis));
    else if (event.key === "Escape") plot.setCursor({ left: -10, top: -10 }, true, true);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  /* legend, words, table */

  #buildLegend(lines) {
    this.legend.replaceChildren();
    this.values = new Map();
    const available = this.#available();
    const names = this.board.isComparing && available.length > 1 ? available : [];
    const shown = this.#shown().map(({ key }) => key);
    if (names.length) {
      this.legend.append(el("span", { class: "chart-choice", role: "group", "aria-label": "Which one" }, ...names.map((series) =>
        el("button", { type: "button", class: "key", "aria-pressed": String(shown.includes(series.key)), onclick: () => this.#choose(series.key) }, series.label))));
    }
    const keys = this.board.isComparing ? lines.map((line) => ({ key: line.run.name, label: "", line })) :
      available.filter(({ isTold }) => !isTold).map((series, color) => ({ key: series.key, label: series.label + (series.side ? " (right)" : ""), line: lines.find((line) => line.series.key === series.key) ?? { color, dash: [] } }));
    for (const { key, label, line } of keys) {
      const value = el("b", { class: "num" });
      this.values.set(key, value);
      const content = [swatch(line.color, line.dash), label && el("span", {}, label), value];
      this.legend.append(this.board.isComparing ? el("span", { class: "key", title: key }, ...content) :
        el("button", { type: "button", class: "key", "aria-pressed": String(shown.includes(key)), onclick: () => this.#hide(key) }, ...content));
    }
    this.legend.append(...available.filter(({ isTold }) => isTold).map(({ label }) => el("span", { class: "key", title: "the same at every step" }, label)));
  }

  #hide(key) {
    if (!this.hidden.delete(key)) this.hidden.add(key);
    if (this.#shown().every(({ isTold }) => isTold)) this.hidden.clear();
    this.rebuild();
  }

  #choose(key) {
    this.chosen = key;
    this.rebuild();
  }

  /** @param {(number | null)[] | null} at the crosshair's place in each series; the newest values without one */
  #showValues(at) {
    this.roles.forEach(({ line, role }, i) => {
      if (role !== "main") return;
      const text = this.#format(this.#valueAt(i, at)) + this.#stepText(i, at);
      const place = this.values?.get(this.board.isComparing ? line.run.name : line.series.key);
      if (place && place.textContent !== text) place.textContent = text;
    });
  }

  #valueAt(i, at) {
    const { line } = this.roles[i];
    if (!at || !this.plot) return line.y.findLast((value) => value !== null && value !== undefined) ?? null;
    const own = this.#placeAt(i, at);
    return own === null ? null : (line.y[own] ?? null);
  }

  /** The place in its own line of the value that stands for the crosshair: the nearest one. */
  #placeAt(i, at) {
    const { line } = this.roles[i];
    const place = this.plot?.data[0][at[i + 1] ?? -1];
    return place === undefined ? null : nearest(line.x, place);
  }

  /** The step of an evaluation: the crosshair may stand at a step without any. */
  #stepText(i, at) {
    const { steps } = this.roles[i].line;
    if (!steps?.length) return "";
    const own = at && this.plot ? this.#placeAt(i, at) : steps.length - 1;
    return own === null ? "" : ` at step ${steps[own]}`;
  }

  #format(value) {
    if (value === null) return NONE;
    if (this.spec.unit === "share") return percent(value);
    if (this.spec.unit === "seconds") return duration(value);
    return this.spec.unit === "count" ? compact(value) : number(value);
  }

  #nameOf({ run, series }) {
    return this.board.isComparing ? `${run.name}, ${series.label}` : series.label;
  }

  #valuesInWords(at) {
    return this.roles.map(({ line, role }, i) => (role === "main" ? `${this.#nameOf(line)} ${this.#format(this.#valueAt(i, at))}${this.#stepText(i, at)}` : "")).filter(Boolean).join(", ");
  }

  #inWords() {
    const said = this.roles.filter(({ role }) => role === "main").map(({ line }) => {
      const values = /** @type {number[]} */ (line.y.filter((value) => value !== null && value !== undefined));
      const [low, high] = values.reduce(([least, most], value) => [Math.min(least, value), Math.max(most, value)], [Infinity, -Infinity]);
      return `${this.#nameOf(line)}: latest ${this.#format(values.at(-1) ?? null)}, least ${this.#format(low)}, most ${this.#format(high)}`;
    });
    return `${this.spec.title}. ${said.join(". ")}. Arrow keys move along the steps.`;
  }

  #toggleTable() {
    this.table.hidden = !this.table.hidden;
    this.place.hidden = !this.table.hidden;
    this.toggle.setAttribute("aria-pressed", String(!this.table.hidden));
    if (this.table.hidden) this.fit();
    else this.#fillTable();
  }

  #fillTable() {
    if (!this.plot) return;
    const { axis, range: [from, to] } = this.board;
    const lines = this.roles.filter(({ role }) => role === "main").map(({ line }) => line);
    const within = [...this.plot.data[0]].filter((place) => place >= from && place <= to).reverse();
    const every = Math.ceil(within.length / TABLE_ROWS);
    const rows = within.filter((_, i) => i % every === 0).map((place) =>
      [axis === "time" ? duration(place) : String(place), ...lines.map((line) => this.#textAt(line, place))]);
    const caption = every > 1 ? `Newest first, every ${every}th of ${within.length}` : "Newest first";
    this.table.replaceChildren(tableOf([axis, ...lines.map((line) => this.#nameOf(line))], rows, caption));
  }

  #textAt(line, place) {
    const i = nearest(line.x, place);
    if (line.x[i] !== place) return "";
    return this.#format(line.y[i]) + (line.low ? ` [${this.#format(line.low[i])}, ${this.#format(line.high?.[i] ?? null)}]` : "");
  }
}
