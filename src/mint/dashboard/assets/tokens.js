/**
 * The sampled tokens of a rollout as spans: the text of each, and a colour for one of its numbers.
 *
 * Knows a logged row and the document; knows nothing of pages, requests or URLs. Text of a model is untrusted: it only
 * becomes text nodes, and characters that are invisible or move the text around them are shown by name.
 *
 * @typedef {{text: string, special: boolean, bytes?: string}} Piece
 * @typedef {{tokens: number[], logprobs: number[], pieces: Piece[], advantage: number|null,
 *            token_advantages?: number[], entropies?: number[], turn_lengths?: number[]}} Row
 * @typedef {{start: number, end: number, text: string, special: boolean}} Span  tokens start … end-1, shown as one
 * @typedef {{mode: string, valueOf: (row: Row, index: number) => number|null, classOf: (value: number|null) => string,
 *            legend: {name: string, label: string}[], missing: string|null}} Scale
 */

export const MODES = ["advantage", "logprob", "entropy", "none"];
const FIRST_TOKENS = 400;
const MORE_TOKENS = 2000;
/** All blocks of a page begin with about this many tokens together. */
const FIRST_TOKENS_TOGETHER = 2400;
const LEAST_TOKENS = 60;
const LONGEST_JOIN = 8;
const PROBABILITIES = [0.9, 0.5, 0.2, 0.05, 0.01];
const ENTROPIES = [0.1, 0.5, 1, 2, 3];

// control, format, unassigned, private, half a pair of surrogates; separators; blanks of odd widths; selectors
const BLANKS = "\\u00a0\\u034f\\u115f\\u1160\\u17b4\\u17b5\\u2000-\\u200a\\u202f\\u205f\\u3164\\uffa0";
const HIDDEN = new RegExp(`[\\p{C}\\p{Zl}\\p{Zp}${BLANKS}\\ufe00-\\ufe0d\\u{e0100}-\\u{e01ef}]`, "u");
const CONTROLS = (
  "NUL SOH STX ETX EOT ENQ ACK BEL BS HT LF VT FF CR SO SI DLE DC1 DC2 DC3 DC4 NAK SYN ETB CAN EM SUB " +
  "ESC FS GS RS US"
).split(" ");
const NAMES = new Map([
  [0x7f, "DEL"],
  [0xa0, "NBSP"],
  [0xad, "SHY"],
  [0x61c, "ALM"],
  [0x200b, "ZWSP"],
  [0x200c, "ZWNJ"],
  [0x200d, "ZWJ"],
  [0x200e, "LRM"],
  [0x200f, "RLM"],
  [0x2028, "LSEP"],
  [0x2029, "PSEP"],
  [0x202a, "LRE"],
  [0x202b, "RLE"],
  [0x202c, "PDF"],
  [0x202d, "LRO"],
  [0x202e, "RLO"],
  [0x2060, "WJ"],
  [0x2066, "LRI"],
  [0x2067, "RLI"],
  [0x2068, "FSI"],
  [0x2069, "PDI"],
  [0xfeff, "BOM"],
]);

/** The name under which an invisible character is shown. @param {string} character @returns {string} */
export function nameOf(character) {
  const code = character.codePointAt(0) ?? 0;
  return CONTROLS[code] ?? NAMES.get(code) ?? `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
}

/**
 * Text cut at characters that must be shown by name; line ends and tabs keep their effect and get a mark before them.
 * @param {string} text
 * @returns {{text: string, mark: boolean}[]}
 */
export function visible(text) {
  const parts = [];
  let plain = "";
  const flush = () => {
    if (plain) parts.push({ text: plain, mark: false });
    plain = "";
  };
  let before = "";
  for (const character of text) {
    const joinsEmoji = character === "\u200d" && /\p{Extended_Pictographic}|\p{Emoji_Modifier}|\ufe0f/u.test(before);
    if (character === "\n" || character === "\t") {
      flush();
      parts.push({ text: character === "\n" ? "⏎" : "⇥", mark: true });
      plain = character;
    } else if (HIDDEN.test(character) && !joinsEmoji) {
      flush();
      parts.push({ text: nameOf(character), mark: true });
    } else plain += character;
    before = character;
  }
  flush();
  return parts;
}

/** Appends text, invisible characters by name. @param {Element} parent @param {string} text @returns {void} */
export function appendVisible(parent, text) {
  for (const part of visible(text)) {
    if (!part.mark) {
      parent.append(part.text);
      continue;
    }
    const mark = document.createElement("span");
    mark.className = /^[⏎⇥]$/.test(part.text) ? "unseen unseen--space" : "unseen";
    mark.textContent = part.text;
    parent.append(mark);
  }
}

/**
 * The spans of a rollout: one per token, or one for several tokens that form a character together.
 * @param {Row} row
 * @returns {Span[]}
 */
export function spansOf(row) {
  const spans = [];
  for (let start = 0; start < row.tokens.length;) {
    const piece = row.pieces[start] ?? { text: `⟨${row.tokens[start]}⟩`, special: false };
    const joined = piece.bytes ? join(row.pieces, start) : null;
    const end = joined ? joined.end : start + 1;
    spans.push({ start, end, text: joined ? joined.text : piece.text, special: piece.special });
    start = end;
  }
  return spans;
}

/** The shortest sequence of pieces from `start` that is valid text, or null. */
function join(pieces, start) {
  const decoder = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });
  let hex = "";
  for (let end = start; end < Math.min(start + LONGEST_JOIN, pieces.length) && pieces[end].bytes; end++) {
    hex += pieces[end].bytes;
    const bytes = Uint8Array.from(hex.match(/../g) ?? [], (pair) => parseInt(pair, 16));
    try {
      return { end: end + 1, text: decoder.decode(bytes) };
    } catch {
      // Not valid text yet; the next piece may complete it.
    }
  }
  return null;
}

/** Whether the run's folder says what the tokens of this row are. @param {Row} row @returns {boolean} */
export function hasPieces(row) {
  return row.tokens.some((id, place) => row.pieces[place] && row.pieces[place].text !== `⟨${id}⟩`);
}

/** The turn, from 1, in which a token was sampled. @param {Row} row @param {number} index @returns {number} */
export function turnOf(row, index) {
  let end = 0;
  const lengths = row.turn_lengths ?? [];
  for (let turn = 0; turn < lengths.length; turn++) {
    end += lengths[turn];
    if (index < end) return turn + 1;
  }
  return Math.max(1, lengths.length);
}

const VALUES = {
  advantage: (row, index) => row.token_advantages?.[index] ?? row.advantage ?? null,
  logprob: (row, index) => row.logprobs?.[index] ?? null,
  entropy: (row, index) => row.entropies?.[index] ?? null,
  none: () => null,
};

/**
 * The mapping from values to colours; the same for all rows shown side by side.
 * @param {string} mode one of MODES
 * @param {Row[]} rows
 * @returns {Scale}
 */
export function makeScale(mode, rows) {
  const valueOf = VALUES[mode] ?? VALUES.none;
  const scale = { mode, valueOf, classOf: () => "", legend: [], missing: null };
  if (mode === "advantage") return { ...scale, ...advantageScale(valueOf, rows) };
  if (mode === "logprob")
    return { ...scale, ...stepScale("neg", PROBABILITIES, (limit) => `p < ${limit}`, logprobLevel) };
  if (mode !== "entropy") return scale;
  if (!rows.some((row) => row.entropies?.length)) {
    return { ...scale, missing: "These rollouts have no entropies: the sampler was not asked for them" };
  }
  return { ...scale, ...stepScale("pos", ENTROPIES, (limit) => `≥ ${limit} nat`, entropyLevel) };
}

function advantageScale(valueOf, rows) {
  let limit = 0;
  for (const row of rows) {
    const last = row.token_advantages ? row.tokens.length : Math.min(1, row.tokens.length);
    for (let index = 0; index < last; index++) limit = Math.max(limit, Math.abs(valueOf(row, index) ?? 0));
  }
  if (!limit) return { missing: "Every advantage here is 0: this group teaches nothing" };
  const classOf = (value) => {
    const level = Math.ceil((5 * Math.abs(value ?? 0)) / limit - 1e-9);
    return level ? `${value < 0 ? "neg" : "pos"}-${Math.min(5, level)}` : "";
  };
  const shown = (value) => (value < 0 ? "−" : "+") + Math.abs(value).toPrecision(2);
  const legend = [-5, -3, -1, 1, 3, 5].map((level) => ({
    name: `${level < 0 ? "neg" : "pos"}-${Math.abs(level)}`,
    label: shown((level * limit) / 5),
  }));
  return { classOf, legend };
}

function stepScale(sign, limits, label, levelOf) {
  const classOf = (value) => {
    const level = value === null ? 0 : levelOf(value);
    return level ? `${sign}-${level}` : "";
  };
  return { classOf, legend: limits.map((limit, place) => ({ name: `${sign}-${place + 1}`, label: label(limit) })) };
}

const logprobLevel = (logprob) => PROBABILITIES.filter((limit) => Math.exp(logprob) < limit).length;
const entropyLevel = (entropy) => ENTROPIES.filter((limit) => entropy >= limit).length;

/**
 * The facts about a span as pairs of name and value; several values for a span of several tokens.
 * @param {Row} row @param {Span} span @returns {[string, string][]}
 */
export function describe(row, span) {
  const each = (format) => {
    const values = [];
    for (let index = span.start; index < span.end; index++) values.push(format(index));
    return [...new Set(values)].join("  ");
  };
  const number = (value, digits) =>
    value === null || value === undefined ? "—" : (value < 0 ? "−" : "") + Math.abs(value).toFixed(digits);
  const signed = (value) => (value > 0 ? "+" : "") + number(value, 3);
  const probability = (logprob) => (logprob === null ? "—" : `${(100 * Math.exp(logprob)).toPrecision(3)} %`);
  const place = span.end - span.start > 1 ? `${span.start + 1}–${span.end}` : `${span.start + 1}`;
  /** @type {[string, string][]} */
  const pairs = [
    ["token", `${place} of ${row.tokens.length}`],
    ["id", each((index) => String(row.tokens[index]))],
    ["piece", span.text],
    ["logprob", each((index) => number(VALUES.logprob(row, index), 4))],
    ["probability", each((index) => probability(VALUES.logprob(row, index)))],
    ["advantage", each((index) => signed(VALUES.advantage(row, index)))],
  ];
  if (row.entropies?.length) pairs.push(["entropy", each((index) => `${number(VALUES.entropy(row, index), 3)} nat`)]);
  if ((row.turn_lengths?.length ?? 1) > 1) pairs.push(["turn", String(turnOf(row, span.start))]);
  return pairs;
}

/** The tokens that a block begins with where `blocks` stand side by side. @param {number} blocks */
export const firstTokens = (blocks) => Math.max(LEAST_TOKENS, Math.min(FIRST_TOKENS, Math.floor(FIRST_TOKENS_TOGETHER / Math.max(1, blocks))));

/**
 * The spans of some tokens of one rollout: the first part at once, more when scrolled to, and never more than a window of
 * `MORE_TOKENS`, because a browser is slow with tens of thousands of elements.
 */
export class TokenBlock {
  /** @param {Row} row @param {Span[]} spans @param {number} [first] how many are shown at once */
  constructor(row, spans, first = FIRST_TOKENS) {
    this.row = row;
    this.spans = spans;
    this.first = first;
    /** The spans from `from` to before `shown` are in the page. */
    this.from = 0;
    this.shown = 0;
    this.scale = makeScale("none", []);
    this.element = document.createElement("div");
    this.element.className = "tokens";
    this.element.tabIndex = 0;
    this.element.setAttribute("role", "group");
    this.element.setAttribute("aria-label", `${spans.length} token${spans.length === 1 ? "" : "s"}; arrow keys go from one to the next`);
    this.more = document.createElement("button");
    this.more.className = "button more";
    this.more.type = "button";
    this.more.addEventListener("click", () => this.extend(MORE_TOKENS));
    this.before = document.createElement("button");
    this.before.className = "button more";
    this.before.type = "button";
    this.before.addEventListener("click", () => this.#show(Math.max(0, this.from - MORE_TOKENS)));
    this.extend(first);
  }

  /** Shows `count` more spans; where the window is full, the next window. @param {number} count */
  extend(count) {
    if (this.shown - this.from >= MORE_TOKENS) return this.#show(this.shown);
    const end = Math.min(this.spans.length, this.shown + count, this.from + MORE_TOKENS);
    const fragment = document.createDocumentFragment();
    for (; this.shown < end; this.shown++) fragment.append(this.#make(this.shown));
    this.more.remove();
    this.element.append(fragment);
    if (end === this.spans.length) return;
    this.more.textContent = `show more: ${(this.spans.length - end).toLocaleString("en")} tokens to go`;
    this.element.append(this.more);
    this.#watch();
  }

  /** Shows the window that begins at a span. @param {number} from */
  #show(from) {
    this.from = this.shown = from;
    this.element.replaceChildren();
    if (from) {
      this.before.textContent = `show the ${Math.min(from, MORE_TOKENS).toLocaleString("en")} tokens before`;
      this.element.append(this.before);
    }
    this.extend(MORE_TOKENS);
    this.element.scrollTop = 0;
  }

  /** Colours every span that is shown; later ones get the same scale. @param {Scale} scale */
  colour(scale) {
    this.scale = scale;
    for (const element of this.element.children) if (element.hasAttribute("data-place")) this.#paint(element);
  }

  /** The span under an element of this block. @param {Element} element @returns {Span|null} */
  spanAt(element) {
    const place = element.closest(".tok")?.getAttribute("data-place");
    return place === null || place === undefined ? null : this.spans[Number(place)];
  }

  #make(place) {
    const span = this.spans[place];
    const element = document.createElement("span");
    element.setAttribute("data-place", String(place));
    appendVisible(element, span.text);
    this.#paint(element);
    return element;
  }

  #paint(element) {
    const span = this.spans[Number(element.getAttribute("data-place"))];
    let strongest = null;
    for (let index = span.start; index < span.end; index++) {
      const value = this.scale.valueOf(this.row, index);
      if (value !== null && (strongest === null || Math.abs(value) > Math.abs(strongest))) strongest = value;
    }
    const colour = this.scale.classOf(strongest);
    element.className = `tok${span.special ? " tok--special" : ""}${colour ? ` ${colour}` : ""}`;
  }

  #watch() {
    this.watcher?.disconnect();
    this.watcher = new IntersectionObserver((entries) => {
      if (entries.some((entry) => entry.isIntersecting)) this.extend(MORE_TOKENS);
    });
    const isFull = this.shown - this.from >= MORE_TOKENS;
    if (this.shown > this.first && !isFull) this.watcher.observe(this.more);
  }
}
