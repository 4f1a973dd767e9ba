// How charts look: colours, dashes, legend keys, and what uPlot does not draw itself.

import { shortTime, STEP_TICKS, tickText, TIME_TICKS_S } from "./chart_numbers.js";
import { colorOf } from "./common.js";

/** @typedef {import("./charts.js").Line} Line @typedef {ReturnType<typeof readColors>} Colors */

const FEW_READINGS = 60;
/** Readings at the same step stand beside each other, this far apart. */
const BESIDE_PX = 6;
/** One dash pattern per compared run, so that runs differ by more than colour. */
export const DASHES = [[], [7, 3], [2, 2.5], [10, 3, 2, 3], [4, 4], [14, 3], [1.5, 4], [7, 2, 1.5, 2, 1.5, 2]];
export const COLORS = DASHES.length;

export const withAlpha = (color, alpha) => color.replace(/^rgba?\(([^)]+?)\)$/, (_, parts) => `rgba(${parts.split(",").slice(0, 3).join(",")}, ${alpha})`);

/** The colours of the current theme, in the form that a canvas needs. */
export const readColors = () => ({
  lines: Array.from({ length: COLORS }, (_, i) => colorOf(`--line-${i + 1}`)),
  panel: colorOf("--panel"),
  muted: colorOf("--muted"),
  grid: colorOf("--line"),
  severities: { error: colorOf("--error"), warning: colorOf("--warning"), info: colorOf("--info") },
});

/** A short line in the colour and dash of a series or a run. @param {number} color @param {number[]} dash */
export function swatch(color, dash) {
  const picture = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  picture.setAttribute("class", `swatch line-${color + 1}`);
  picture.setAttribute("viewBox", "0 0 18 8");
  picture.setAttribute("aria-hidden", "true");
  const line = document.createElementNS("http://www.w3.org/2000/svg", "path");
  line.setAttribute("d", "M0 4H18");
  if (dash.length) line.setAttribute("stroke-dasharray", dash.map((length) => length * 0.8).join(" "));
  picture.append(line);
  return picture;
}

/** The axes of a chart, as uPlot takes them. @param {Colors} colors @param {{isTime: boolean, unit?: string, usesRight: boolean, y: string, right?: string}} chart
 * `y` and `right` are the titles of the axes */
export function axesOf(colors, { isTime, unit, usesRight, y, right }) {
  const axis = { stroke: colors.muted, font: "10px system-ui, sans-serif", labelFont: "10px system-ui, sans-serif", labelSize: 14, labelGap: 0, ticks: { show: false },
    grid: { stroke: colors.grid, width: 1 } };
  const upright = { ...axis, size: 42, gap: 4, space: 26 };
  return [
    { ...axis, label: isTime ? "time since the start" : "step", size: 20, gap: 3, space: 55, incrs: isTime ? TIME_TICKS_S : STEP_TICKS, values: (_plot, ticks) => ticks.map((tick) => (isTime ? shortTime(tick) : tick)) },
    { ...upright, label: y || null, values: (_plot, ticks) => ticks.map((tick) => tickText(tick, unit)) },
    { ...upright, label: right ?? null, scale: "right", side: 1, show: usesRight, grid: { show: false }, values: (_plot, ticks) => ticks.map((tick) => tickText(tick)) },
  ];
}

/**
 * Evaluations as points with whiskers for their intervals. Of very many, the whiskers are thin and have no caps.
 * @param {any} plot @param {Line[]} lines @param {Colors} colors
 */
export function drawReadings(plot, lines, colors) {
  const { ctx, bbox } = plot;
  const px = devicePixelRatio;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left - 4 * px, bbox.top - 4 * px, bbox.width + 8 * px, bbox.height + 8 * px);
  ctx.clip();
  lines.forEach(({ x, y, low = [], high = [], color }, place) => {
    const isFew = x.length <= FEW_READINGS;
    const beside = isFew ? (place - (lines.length - 1) / 2) * BESIDE_PX * px : 0;
    const cap = isFew ? 3 * px : 0;
    ctx.strokeStyle = ctx.fillStyle = colors.lines[color];
    ctx.lineWidth = (isFew ? 1.3 : 0.6) * px;
    ctx.globalAlpha = isFew ? 1 : 0.35;
    const lefts = x.map((at) => plot.valToPos(at, "x", true) + beside);
    ctx.beginPath();
    lefts.forEach((left, i) => {
      const ends = [low[i], high[i]].map((value) => plot.valToPos(value, "y", true));
      ctx.moveTo(left, ends[0]);
      ctx.lineTo(left, ends[1]);
      for (const end of ends) {
        ctx.moveTo(left - cap, end);
        ctx.lineTo(left + cap, end);
      }
    });
    ctx.stroke();
    ctx.globalAlpha = 1;
    lefts.forEach((left, i) => {
      ctx.beginPath();
      ctx.arc(left, plot.valToPos(y[i], "y", true), (isFew ? 3 : 1.6) * px, 0, 2 * Math.PI);
      ctx.fill();
    });
  });
  ctx.restore();
}

/** A triangle at the upper edge for each finding. @param {any} plot @param {{place: number, severity: string}[]} marks @param {Colors} colors */
export function drawMarks(plot, marks, colors) {
  const size = 4 * devicePixelRatio;
  const { ctx, bbox } = plot;
  for (const { place, severity } of marks) {
    const x = plot.valToPos(place, "x", true);
    ctx.fillStyle = colors.severities[severity] ?? colors.muted;
    ctx.beginPath();
    ctx.moveTo(x - size, bbox.top - size);
    ctx.lineTo(x + size, bbox.top - size);
    ctx.lineTo(x, bbox.top + size);
    ctx.fill();
  }
}
