// One sample as a card: reward and its parts, stop reason, tokens, and the timeline of its episode. Knows a full row of the
// API; knows nothing of requests, URLs or other cards.

import { el, number } from "./common.js";
import { asText, longText, timeline, values } from "./timeline.js";
import { firstTokens, hasPieces, spansOf, TokenBlock } from "./tokens.js";

const SHORT_FACT = 60;
const TAGS = new Map([
  ["error", ["tag--error", "not graded"]],
  ["timed_out", ["tag--error", "timed out"]],
  ["unsupported", ["tag--warning", "unsupported"]],
  ["truncated", ["tag--warning", "truncated"]],
  ["duplicate", ["", "duplicate"]],
]);

/** A reward in as few digits as say it: at most three after the point. @param {number|null|undefined} value */
export function rewardText(value) {
  if (value === null || value === undefined) return "no reward";
  const size = Math.abs(value);
  if (size >= 1e6 || (size > 0 && size < 0.001)) return number(value);
  return String(Number(value.toFixed(3))).replace("-", "−");
}

/** @param {string[]} flags @returns {HTMLElement[]} */
export const tagsOf = (flags) =>
  [...TAGS]
    .filter(([flag]) => flags.includes(flag))
    .map(([, [kind, label]]) => el("span", { class: `tag ${kind}` }, label));

/** An advantage with its sign in the text, not in the colour alone. @param {number|null} value */
export function advantageText(value) {
  const sign = !value ? "" : value > 0 ? "sign--pos" : "sign--neg";
  const text = value === null || value === undefined ? "no advantage" : (value > 0 ? "+" : "") + rewardText(value);
  return el("span", { class: `num sign ${sign}`, title: "advantage" }, text);
}

/**
 * The samples with those that are equal in everything that a card shows behind the first of them.
 * @param {any[]} rows @returns {any[][]}
 */
export function foldEqual(rows) {
  const byContent = new Map();
  for (const row of rows) {
    const { text, tokens, reward, advantage, parts, error, flags, stop_reason, trace, info } = row;
    const shown = (flags ?? []).filter((flag) => flag !== "duplicate");
    const timeless = (trace ?? []).map((entry) => ({ ...entry, ms: 0 }));
    const key = JSON.stringify([text, tokens, reward, advantage, parts, error, shown, stop_reason, timeless, info, row.is_shortened]);
    byContent.set(key, [...(byContent.get(key) ?? []), row]);
  }
  return [...byContent.values()];
}

/** The facts of the grader that are 0 in every sample: they go into the details. @param {any[]} rows @returns {Set<string>} */
export function zeroFacts(rows) {
  const names = new Set(rows.flatMap((row) => Object.keys(row.info ?? {})));
  return new Set([...names].filter((name) => rows.every((row) => (row.info?.[name] ?? 0) === 0)));
}

/** A sample's card. */
export class Card {
  /**
   * @param {any} row a full row of the API
   * @param {{place: number, partLimit: number, link: string, isLeftOut: boolean, count?: number, unfold?: () => void,
   *   zeros?: Set<string>, blocks?: number, loadWhole?: () => void}} context its place by reward from 1, the largest part
   *   in sight, its address, and whether others of its group were trained on and it was not; `count` equal samples stand
   *   behind it, and `unfold` shows them; `blocks` cards are in sight; `loadWhole` gets the tokens that are not here
   */
  constructor(row, { place, partLimit, link, isLeftOut, count = 1, unfold, zeros = new Set(), blocks = 1, loadWhole }) {
    this.row = row;
    this.zeros = zeros;
    this.first = firstTokens(blocks);
    this.loadWhole = loadWhole;
    this.fold = { count, unfold };
    /** @type {TokenBlock[]} */
    this.blocks = [];
    /** Whether the run has logged the texts of the tokens. */
    this.isReadable = true;
    this.element = el(
      "article",
      { class: "sample panel", dataset: { row: row.row, step: row.step }, "aria-label": `Sample ${place}` },
      this.#head(place, link, isLeftOut),
      row.error && el("div", { class: "sample-error" }, longText(row.error, 300)),
      this.#parts(partLimit),
      ...this.#body(),
      el("footer", { class: "sample-foot" }, this.#facts(), this.#details()),
    );
  }

  /** Colours all tokens that are shown. @param {import("./tokens.js").Scale} scale */
  colour(scale) {
    for (const block of this.blocks) block.colour(scale);
  }

  #head(place, link, isLeftOut) {
    const { row } = this;
    const length = row.length ?? row.tokens?.length ?? 0;
    const { count, unfold } = this.fold;
    const said = [`${length.toLocaleString("en-US")} tok`, row.stop_reason];
    if (row.turns > 1) said.push(`${row.turns} turns`);
    if (row.tool_calls) said.push(`${row.tool_calls} call${row.tool_calls === 1 ? "" : "s"}`);
    return el(
      "header",
      { class: "sample-head" },
      el("a", { class: "sample-place muted num", href: link, title: "Link to this sample" }, `${place}`),
      count > 1 && el("button", { type: "button", class: "button sample-count", "aria-expanded": "false", onclick: unfold,
        title: `${count} equal samples: show each`, "aria-label": `${count} equal samples, show each` }, `${count} ×`),
      el("strong", { class: "sample-reward num", title: "reward" }, rewardText(row.reward)),
      advantageText(row.advantage ?? null),
      ...tagsOf((row.flags ?? []).filter((flag) => flag !== "duplicate" || count === 1)),
      isLeftOut && el("span", { class: "tag" }, "not trained on"),
      el("span", { class: "sample-end muted small" }, said.filter(Boolean).join(" · ")),
    );
  }

  #parts(limit) {
    const parts = Object.entries(this.row.parts ?? {});
    if (!parts.length) return null;
    const list = el("dl", { class: "parts", "aria-label": "Parts of the reward" });
    for (const [name, value] of parts) {
      const bar = value ? el("span", { class: `bar ${value < 0 ? "bar--neg" : "bar--pos"}` }) : null;
      if (bar) bar.style.width = `${(50 * Math.abs(value)) / limit}%`;
      list.append(
        el("dt", { title: name }, el("bdi", {}, name)),
        el("dd", { class: "parts-bar", "aria-hidden": "true" }, bar),
        el("dd", { class: "num" }, (value > 0 ? "+" : "") + rewardText(value)),
      );
    }
    return list;
  }

  #body() {
    const { row } = this;
    const box = el("div", { class: "sample-body" });
    const spans = row.tokens ? spansOf(row) : [];
    const isKnown = row.tokens?.length ? hasPieces(row) : false;
    this.isReadable = isKnown || !row.tokens?.length;
    if (!isKnown && row.text) box.append(longText(row.text, 2000));
    const trace = (row.trace ?? []).filter((entry) => entry.turn > 0 || entry.role === "error");
    const spoken = trace.filter((entry) => entry.role === "assistant").length;
    const lengths = row.turn_lengths ?? (spoken === 1 ? [spans.at(-1)?.end ?? 0] : []);
    const isByTurn = isKnown && spoken > 0 && lengths.length === spoken;
    if (spans.length && !isByTurn) box.append(this.#block(spans));
    if (trace.length) box.append(timeline(trace, isByTurn ? this.#turns(spans, lengths) : () => null));
    if (!box.childNodes.length) box.append(el("p", { class: "muted" }, "Nothing was sampled."));
    if (row.is_shortened) {
      box.append(el("button", { type: "button", class: "button more", onclick: this.loadWhole },
        `load all: ${(row.length - row.tokens.length).toLocaleString("en-US")} more tokens`));
    }
    return [box];
  }

  #turns(spans, lengths) {
    const ends = [];
    for (const length of lengths) ends.push((ends.at(-1) ?? 0) + length);
    return (turn) => {
      const first = ends[turn - 2] ?? 0;
      const own = spans.filter((span) => span.start >= first && span.start < ends[turn - 1]);
      return own.length ? this.#block(own) : null;
    };
  }

  #block(spans) {
    const block = new TokenBlock(this.row, spans, this.first);
    this.blocks.push(block);
    return block.element;
  }

  #facts() {
    const facts = Object.entries(this.row.info ?? {})
      .filter(([name, value]) => !this.zeros.has(name) && asText(value).length <= SHORT_FACT);
    if (!facts.length) return null;
    const list = el("dl", { class: "facts-line small", "aria-label": "What the grader says" });
    for (const [name, value] of facts) {
      const shown = typeof value === "number" ? number(value) : longText(asText(value));
      list.append(el("div", {}, el("dt", {}, el("bdi", {}, name)), el("dd", {}, shown)));
    }
    return list;
  }

  #details() {
    const { row } = this;
    const fold = el("details", { class: "fold small" }, el("summary", {}, "details"));
    const fill = () => {
      const facts = {
        row: `${row.row} of step ${row.step}`,
        "weights of step": row.policy_step ?? "–",
        sample: row.sample ?? "",
      };
      const long = Object.entries(row.info ?? {})
        .filter(([name, value]) => this.zeros.has(name) || asText(value).length > SHORT_FACT);
      fold.append(values({ ...facts, ...Object.fromEntries(long) }, "Details"));
      if (row.text) fold.append(el("div", { class: "muted" }, "text without special tokens"), longText(row.text, 2000));
    };
    fold.addEventListener("toggle", fill, { once: true });
    return fold;
  }
}
