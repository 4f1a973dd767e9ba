// The course of an episode: messages, tool calls and their results, with times. Knows the entries of a logged `trace`; knows
// nothing of pages or requests. The caller passes in the coloured tokens of a turn. Text of a model or a tool only becomes
// text nodes.

import { el } from "./common.js";
import { appendVisible } from "./tokens.js";

const FIRST_CHARACTERS = 600;
const MORE_CHARACTERS = 20000;

/**
 * @typedef {{turn: number, role: string, ms?: number, content?: unknown, name?: string, tool?: string, ok?: boolean,
 *            arguments?: unknown, tool_calls?: {function?: {name?: string, arguments?: unknown}}[]}} Entry
 */

/**
 * The timeline of an episode.
 * @param {Entry[]} trace
 * @param {(turn: number) => Element | null} tokensOf the coloured tokens of a turn, where they are known
 * @returns {HTMLElement}
 */
export function timeline(trace, tokensOf) {
  const list = el("ol", { class: "timeline" });
  for (const entry of trace) list.append(event(entry, entry.role === "assistant" ? tokensOf(entry.turn) : null));
  return list;
}

/** @param {Entry} entry @param {Element | null} tokens */
function event(entry, tokens) {
  const name = entry.name ?? entry.tool;
  const failed = entry.ok === false || entry.role === "error";
  const item = el(
    "li",
    { class: `event event--${["assistant", "tool", "user", "error"].includes(entry.role) ? entry.role : "other"}` },
    el(
      "div",
      { class: "event-head" },
      el("span", { class: "event-role" }, clean(entry.role)),
      name && el("b", { class: "mono" }, clean(name)),
      failed && el("span", { class: "tag tag--error" }, "failed"),
      el("span", { class: "muted num" }, milliseconds(entry.ms)),
    ),
  );
  if (entry.arguments !== undefined) item.append(values(entry.arguments, "called with"));
  if (tokens) item.append(tokens);
  else if (entry.content !== undefined && entry.content !== null) item.append(longText(asText(entry.content)));
  for (const call of tokens || entry.arguments !== undefined ? [] : (entry.tool_calls ?? [])) {
    item.append(
      el("div", { class: "event-call" }, "→ ", el("b", { class: "mono" }, clean(call.function?.name ?? "?"))),
    );
    if (call.function?.arguments !== undefined) item.append(values(call.function.arguments, ""));
  }
  return item;
}

/**
 * Names and values as a list; anything else as text.
 * @param {unknown} value @param {string} title
 * @returns {HTMLElement}
 */
export function values(value, title) {
  const isObject = value !== null && typeof value === "object" && !Array.isArray(value);
  const list = el("dl", { class: "values", "aria-label": title || null });
  /** @type {[string, unknown][]} */
  const pairs = isObject ? Object.entries(value) : [["", value]];
  for (const [name, one] of pairs) {
    list.append(el("dt", {}, clean(name)), el("dd", {}, longText(asText(one))));
  }
  return list;
}

/**
 * Text with invisible characters by name; a long text is folded, and clicks show its parts.
 * @param {string} text
 * @param {number} [first] characters that are shown at once
 * @returns {HTMLElement}
 */
export function longText(text, first = FIRST_CHARACTERS) {
  const box = el("div", { class: "long mono" });
  let shown = 0;
  const more = el("button", { type: "button", class: "button more", onclick: () => extend(MORE_CHARACTERS) });
  const extend = (count) => {
    const end = whole(text, shown + count);
    more.remove();
    appendVisible(box, text.slice(shown, end));
    shown = end;
    if (shown >= text.length) return;
    more.textContent = `show more: ${(text.length - shown).toLocaleString("en-US")} characters to go`;
    box.append(more);
  };
  extend(text.length < first * 1.3 ? text.length : first);
  return box;
}

/** A place to cut that does not split a surrogate pair. */
function whole(text, end) {
  const unit = text.charCodeAt(end - 1);
  return end < text.length && unit >= 0xd800 && unit < 0xdc00 ? end + 1 : end;
}

/** A short name as an element, invisible characters by name. @param {string} text */
function clean(text) {
  const box = el("bdi");
  appendVisible(box, text.length > 200 ? `${text.slice(0, 200)}…` : text);
  return box;
}

/** @param {unknown} value @returns {string} */
export const asText = (value) => (typeof value === "string" ? value : (JSON.stringify(value) ?? String(value)));

/** @param {number | undefined} ms */
function milliseconds(ms) {
  if (ms === undefined || ms === null) return "";
  if (ms >= 1000) return `${(ms / 1000).toFixed(2)} s`;
  return ms >= 10 ? `${ms.toFixed(0)} ms` : `${ms.toFixed(2)} ms`;
}
