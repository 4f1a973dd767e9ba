// The lists of the rollouts page: the groups of a step, the results of a filter, and the visits of one item over the
// steps of a run. Draws rows of the API; makes no requests and keeps no state.

import { counted, el } from "./common.js";
import { advantageText, rewardText, tagsOf } from "./rollout_card.js";
import { appendVisible } from "./tokens.js";

const SVG = "http://www.w3.org/2000/svg";
const LEVELS = 4;
const TAIL_CHARACTERS = 140;
const LEAST_TAIL = 16;
const CONTEXT_CHARACTERS = 12;
const CHART = { height: 96, left: 34, right: 10, top: 8, bottom: 18 };

/** A number where there is one. @param {(number|null)[]} rewards @returns {number[]} */
const graded = (rewards) => rewards.filter((reward) => reward !== null && reward !== undefined);

/** @param {(number|null)[]} rewards */
export const meanOf = (rewards) => {
  const known = graded(rewards);
  return known.length ? known.reduce((sum, reward) => sum + reward, 0) / known.length : null;
};

/** The mean as text. @param {(number|null)[]} rewards */
export const meanText = (rewards) => rewardText(meanOf(rewards));

/** Whether a group's rewards differ. @param {(number|null)[]} rewards */
export const hasSignal = (rewards) => new Set(graded(rewards)).size > 1;

/**
 * Rewards as dots, best first: filled for the highest reward shown, hollow for the lowest.
 * @param {(number|null)[]} rewards @param {{low: number, high: number}} range
 */
export function dots(rewards, { low, high }) {
  const sorted = graded(rewards).sort((one, other) => other - one);
  const said = sorted.map(rewardText).join(", ");
  const row = el("span", {
    class: `dots${rewards.length > 16 ? " dots--many" : ""}`,
    role: "img",
    "aria-label": `rewards ${said}`,
    title: said,
  });
  for (const reward of sorted) {
    const level = high > low ? Math.round((LEVELS * (reward - low)) / (high - low)) : reward > 0 ? LEVELS : 0;
    row.append(el("i", { class: `dot dot-${level}` }));
  }
  for (let left = rewards.length - sorted.length; left > 0; left--) row.append(el("i", { class: "dot dot-none" }));
  return row;
}

/** The lowest and the highest of several groups' rewards. @param {{rewards: (number|null)[]}[]} groups */
export function rangeOf(groups) {
  const all = groups.flatMap((group) => graded(group.rewards));
  return { low: Math.min(0, ...all), high: Math.max(...all, 0) };
}

/** Text on one line, invisible characters by name. @param {string} text @param {string} kind */
function line(text, kind) {
  const box = el("bdi", { class: kind });
  appendVisible(box, text.replace(/\s+/g, " ").trim());
  return box;
}

/**
 * The end of a prompt without the markers of a chat template, because prompts begin alike.
 * @param {string} prompt
 */
function tailOf(prompt) {
  const lines = prompt
    .slice(-4000)
    .replace(/<\|[^|<>\s]{1,30}\|>(system|user|assistant|tool)?/g, "\n")
    .split("\n")
    .filter((line) => line.trim());
  let tail = "";
  while (lines.length && tail.length < LEAST_TAIL) tail = `${lines.pop()} ${tail}`;
  return tail.slice(0, TAIL_CHARACTERS);
}

/** A group of a step as an entry. @param {any} group @param {{low: number, high: number}} range @param {string} link */
export function groupEntry(group, range, link) {
  const isFlat = !hasSignal(group.rewards);
  return el(
    "li",
    {},
    el(
      "a",
      { class: `entry${isFlat ? " entry--flat" : ""}`, href: link, dataset: { group: group.group } },
      el(
        "span",
        { class: "entry-head" },
        el("b", { class: "num entry-number" }, group.group),
        dots(group.rewards, range),
        el("span", { class: "num" }, meanText(group.rewards)),
        group.error && el("span", { class: "tag tag--error" }, "error"),
        isFlat &&
          el(
            "span",
            { class: "muted small entry-end", title: "All rewards are equal: nothing to learn here" },
            "= no signal",
          ),
      ),
      line(tailOf(group.prompt || group.error || ""), "entry-text"),
    ),
  );
}

/** Text around the search text, which is marked; the beginning if the text does not contain it. */
function found(text, searched) {
  const box = el("bdi", { class: "entry-text mono" });
  const flat = text.replace(/\s+/g, " ").trim();
  const at = searched ? flat.toLowerCase().indexOf(searched.toLowerCase()) : -1;
  if (at < 0) {
    appendVisible(box, flat);
    return box;
  }
  const mark = el("mark");
  appendVisible(mark, flat.slice(at, at + searched.length));
  appendVisible(box, (at > CONTEXT_CHARACTERS ? "…" : "") + flat.slice(Math.max(0, at - CONTEXT_CHARACTERS), at));
  box.append(mark);
  appendVisible(box, flat.slice(at + searched.length));
  return box;
}

/** A found rollout as an entry. @param {any} row @param {string} searched @param {string} link */
export function resultEntry(row, searched, link) {
  return el(
    "li",
    {},
    el(
      "a",
      { class: "entry", href: link, dataset: { step: row.step, row: row.row } },
      el(
        "span",
        { class: "entry-head" },
        el("span", { class: "muted num" }, `step ${row.step} · ${row.group}`),
        el("b", { class: "num" }, rewardText(row.reward)),
        advantageText(row.advantage),
        el("span", { class: "muted num small" }, `${row.length} tok`),
        ...tagsOf(row.flags),
      ),
      found(row.text || tailOf(row.prompt), searched),
    ),
  );
}

/**
 * The rewards of one item over the steps: a dot for each sample, a line through the means; each visit is a link.
 * @param {{step: number, rewards: (number|null)[]}[]} visits
 * @param {Set<number>} picked the steps that are shown below
 * @param {(step: number) => void} toggle
 * @param {number} width in pixels
 */
export function visitChart(visits, picked, toggle, width) {
  const { height, left, right, top, bottom } = CHART;
  const { low, high } = rangeOf(visits);
  const steps = visits.map((visit) => visit.step);
  const [first, last] = [Math.min(...steps), Math.max(...steps)];
  const x = (step) =>
    first === last ? width / 2 : left + 8 + ((width - left - right - 16) * (step - first)) / (last - first);
  const y = (reward) =>
    high === low ? height / 2 : height - bottom - ((height - top - bottom) * (reward - low)) / (high - low);
  const chart = svg("svg", {
    class: "visits",
    viewBox: `0 0 ${width} ${height}`,
    width,
    height,
    role: "group",
    "aria-label": "Rewards over steps",
  });
  for (const level of new Set([low, high])) {
    chart.append(svg("line", { class: "visits-grid", x1: left, x2: width - right, y1: y(level), y2: y(level) }));
    chart.append(
      svg("text", { class: "visits-label", x: left - 5, y: y(level) + 4, "text-anchor": "end" }, rewardText(level)),
    );
  }
  const means = visits
    .filter((visit) => meanOf(visit.rewards) !== null)
    .map((visit) => `${x(visit.step)},${y(meanOf(visit.rewards))}`);
  chart.append(svg("polyline", { class: "visits-mean", points: means.join(" ") }));
  for (const visit of visits) chart.append(visitMark(visit, x(visit.step), y, picked.has(visit.step), toggle));
  return chart;
}

function visitMark(visit, at, y, isPicked, toggle) {
  const mark = svg("g", {
    class: `visit${isPicked ? " visit--picked" : ""}`,
    tabindex: 0,
    role: "button",
    "aria-pressed": isPicked,
    "aria-label": `step ${visit.step}, mean reward ${meanText(visit.rewards)}`,
  });
  mark.append(
    svg("title", {}, `step ${visit.step} · mean ${meanText(visit.rewards)} · ${counted(visit.rewards.length, "sample")}`),
  );
  mark.append(
    svg("rect", { x: at - 6, y: 0, width: 12, height: CHART.height - CHART.bottom + 4, class: "visit-area" }),
  );
  const counts = new Map();
  for (const reward of graded(visit.rewards)) counts.set(reward, (counts.get(reward) ?? 0) + 1);
  for (const [reward, count] of counts) {
    mark.append(svg("circle", { cx: at, cy: y(reward), r: 1.5 + 2.5 * Math.sqrt(count / visit.rewards.length) }));
  }
  if (isPicked)
    mark.append(
      svg("text", { class: "visits-label", x: at, y: CHART.height - 4, "text-anchor": "middle" }, visit.step),
    );
  const act = () => toggle(visit.step);
  mark.addEventListener("click", act);
  mark.addEventListener("keydown", (event) => {
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      act();
    }
  });
  return mark;
}

function svg(tag, attributes, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  for (const child of children) element.append(String(child));
  return element;
}
