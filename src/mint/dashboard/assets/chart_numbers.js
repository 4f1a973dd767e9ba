// The numbers of a chart before it is drawn: smoothing, stacking, the range of a scale, labels. Pure.

import { compact, el } from "./common.js";

/** @typedef {import("./charts.js").Line} Line */

/** Lines with the very same numbers hide each other: the lower ones are drawn wider, and show as an edge. @param {Line[]} lines */
export function withEdges(lines) {
  const isSame = (a, b) => a.x === b.x && a.y.length === b.y.length && a.y.every((value, i) => value === b.y[i]);
  return lines.map((line, i) => ({ ...line, under: Math.min(2, lines.slice(i + 1).filter((other) => isSame(line, other)).length) }));
}

/** Held-out evaluations as readings; of two at one step, the later one. */
export function placed(run, evaluations, axis) {
  const byStep = new Map(evaluations.map((evaluation) => [evaluation.step, evaluation]));
  const sorted = [...byStep.values()].sort((a, b) => a.step - b.step);
  return {
    x: sorted.map(({ step }) => run.placeOf(step, axis)),
    steps: sorted.map(({ step }) => step),
    y: sorted.map(({ mean }) => mean),
    low: sorted.map(({ low }) => low),
    high: sorted.map(({ high }) => high),
  };
}

/** The exponential mean, without the pull of its beginning. @param {(number | null)[]} values @param {number} weight of what came before */
export function smoothed(values, weight) {
  let [sum, mass] = [0, 0];
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    sum = weight * sum + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return sum / mass;
  });
}

/** A layer stacked on the layers below it. */
export const stackedOn = (values, below) => (below ? values.map((value, i) => (value ?? 0) + (below[i] ?? 0)) : values);

/** The range of a scale, with a margin around the numbers, but none below zero if all numbers are positive. */
export function padded(low, high, include) {
  const least = Math.min(low ?? Infinity, ...include);
  const most = Math.max(high ?? -Infinity, ...include);
  if (!Number.isFinite(least) || !Number.isFinite(most)) return [0, 1];
  if (least === most) return most > 0 ? [0, 2 * most] : most < 0 ? [2 * most, 0] : [-0.03, 1];
  const span = most - least;
  const [below, above] = [include.includes(least) ? 0.03 : 0.07, include.includes(most) ? 0.03 : 0.07];
  return [least - below * span, most + above * span];
}

/** @param {number} value @param {string} [unit] */
export function tickText(value, unit) {
  const clean = Number(value.toPrecision(6));
  if (unit === "share") return `${Number((100 * clean).toPrecision(4))} %`;
  if (unit === "seconds") return shortTime(clean);
  const size = Math.abs(clean);
  if (size >= 10000) return compact(clean);
  return (size > 0 && size < 1e-3 ? clean.toExponential(Number.isInteger(clean / 10 ** Math.floor(Math.log10(size))) ? 0 : 1) : String(clean)).replaceAll("-", "−");
}

/** 30 s, 1:30, 10 min, 1:10 h, 2.5 d. @param {number} seconds */
export function shortTime(seconds) {
  if (seconds === 0) return "0";
  if (Math.abs(seconds) < 60) return `${Number(seconds.toPrecision(3))} s`;
  if (seconds < 3600) return seconds % 60 ? `${Math.floor(seconds / 60)}:${String(Math.round(seconds % 60)).padStart(2, "0")}` : `${seconds / 60} min`;
  if (seconds >= 172800) return `${Number((seconds / 86400).toFixed(2))} d`;
  const minutes = Math.round((seconds % 3600) / 60);
  return minutes ? `${Math.floor(seconds / 3600)}:${String(minutes).padStart(2, "0")} h` : `${seconds / 3600} h`;
}

/** The distance between two ticks of an axis: round amounts of time, or whole steps. */
export const TIME_TICKS_S = [0.1, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800];
export const STEP_TICKS = [1, 2, 5].flatMap((first) => [1, 10, 100, 1000, 10000, 100000].map((unit) => first * unit)).sort((a, b) => a - b);

/** A table of what a chart shows. @param {string[]} heads @param {string[][]} rows @param {string} caption */
export const tableOf = (heads, rows, caption) => el("table", { class: "table" },
  el("caption", { class: "muted small" }, caption),
  el("thead", {}, el("tr", {}, ...heads.map((head) => el("th", { scope: "col", class: "num" }, head)))),
  el("tbody", {}, ...rows.map(([place, ...values]) => el("tr", {}, el("th", { scope: "row", class: "num" }, place),
    ...values.map((value) => el("td", { class: "num" }, value))))));
