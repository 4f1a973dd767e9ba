// The head above the samples: the group or item, its rewards, and its prompt, folded to the end. Draws rows of the API;
// makes no requests and keeps no state.

import { el } from "./common.js";
import { dots, hasSignal, meanText, rangeOf } from "./rollout_lists.js";
import { longText } from "./timeline.js";
import { appendVisible } from "./tokens.js";

const PROMPT_TAIL_LINES = 6;
const PROMPT_TAIL_CHARACTERS = 700;
const PROMPT_CHARACTERS = 20000;

/**
 * @param {string} label
 * @param {() => void} act
 * @param {Record<string, unknown>} [attributes]
 */
export const button = (label, act, attributes = {}) =>
  el("button", { type: "button", class: "button", onclick: act, ...attributes }, label);

/**
 * @param {any} group of the API, with its rows
 * @param {HTMLElement[]} tools
 * @returns {HTMLElement[]}
 */
export function groupHead(group, tools) {
  const rewards = rewardsOf(group);
  const flat = hasSignal(rewards) ? null : el("span", { class: "tag" }, "= no signal");
  return [
    stageLine(tools, el("h2", {}, `Step ${group.step} · group ${group.group}`), ...spread(rewards), flat),
    promptFold(group.prompt, group.item),
  ];
}

/**
 * @param {string} item
 * @param {number} visits how often it was asked
 * @param {HTMLElement[]} tools
 */
export function itemHead(item, visits, tools) {
  const times = ["never asked in this run", "asked once in this run"][visits];
  const said = times ?? `asked ${visits} times; click one to add or remove it`;
  return stageLine(tools, el("h2", {}, `Item ${item} through training`), el("span", { class: "muted" }, said));
}

/** @param {any} group @param {string} link its address */
export const columnTitle = (group, link) =>
  el("h3", { class: "column-title" }, el("a", { href: link }, `Step ${group.step}`), ...spread(rewardsOf(group)));

const rewardsOf = (group) => group.rows.map((row) => row.reward ?? null);

const spread = (rewards) => [
  dots(rewards, rangeOf([{ rewards }])),
  el("span", { class: "num" }, `mean ${meanText(rewards)}`),
];

const stageLine = (tools, ...parts) =>
  el("div", { class: "stage-line" }, ...parts, el("span", { class: "stage-tools" }, ...tools));

/**
 * The end of a prompt, because prompts begin alike; a click shows all of it.
 * @param {string} prompt
 * @param {string|number|null} item
 */
export function promptFold(prompt, item) {
  const tail = prompt.split("\n").slice(-PROMPT_TAIL_LINES).join("\n").slice(-PROMPT_TAIL_CHARACTERS);
  const left = prompt.length - tail.length;
  const box = el("div", { class: "prompt mono" });
  const draw = (isWhole) => {
    fold.textContent = isWhole
      ? "show the end only"
      : `show all: ${left.toLocaleString("en-US")} characters before this`;
    fold.setAttribute("aria-expanded", String(isWhole));
    box.replaceChildren();
    if (isWhole) box.append(longText(prompt, PROMPT_CHARACTERS));
    else appendVisible(box, (left ? "… " : "") + tail);
  };
  const fold = button("", () => draw(fold.getAttribute("aria-expanded") === "false"), {
    class: "button button--plain",
  });
  draw(false);
  const label = item === null || item === undefined ? "prompt" : `prompt · item ${item}`;
  return el(
    "div",
    { class: "prompt-box" },
    el("div", { class: "muted small prompt-label" }, label, left ? fold : null),
    box,
  );
}

/** Copies an address, and says so. @param {() => string} addressOf */
export function copyButton(addressOf) {
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(addressOf());
      copier.textContent = "copied";
    } catch {
      copier.textContent = "it is in the address bar"; // without a secure context there is no clipboard
    }
    setTimeout(() => (copier.textContent = "copy link"), 1500);
  };
  const copier = button("copy link", copy, { id: "copy-link", title: "Copy a link to exactly this (c)" });
  return copier;
}
