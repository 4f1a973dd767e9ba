// What all pages share: API requests, numbers as text, building elements, state in the URL, server-sent events, keyboard
// shortcuts, theme. Text from a run only becomes text nodes. Knows no page and no chart.

const API = "/dashboard/v1/";

/** An error from the API: a sentence with its remedy, and if known the field. */
export class ApiError extends Error {
  /**
   * @param {number} status HTTP status, 0 where no answer came
   * @param {{error?: string, field?: string}} body
   */
  constructor(status, body) {
    super(body.error ?? `The server answered ${status}`); // the server's sentence ends with the remedy
    this.status = status;
    this.field = body.field;
  }
}

/**
 * The address of an API path with a query; empty values are left out, arrays are repeated.
 * @param {string} path below `/dashboard/v1/`, parts already encoded
 * @param {Record<string, unknown>} [query]
 */
export function apiUrl(path, query = {}) {
  const search = searchOf(query).toString();
  return API + path + (search ? `?${search}` : "");
}

/** @param {string} run @param {string} [rest] */
export const runPath = (run, rest = "") => `runs/${encodeURIComponent(run)}${rest && `/${rest}`}`;

/**
 * @param {string} path
 * @param {{query?: Record<string, unknown>, signal?: AbortSignal}} [options]
 * @returns {Promise<any>}
 * @throws {ApiError}
 */
export const getJson = (path, { query = {}, signal } = {}) => ask(apiUrl(path, query), { signal });

/**
 * @param {string} path
 * @param {unknown} body
 * @returns {Promise<any>}
 * @throws {ApiError}
 */
export const postJson = (path, body) =>
  ask(apiUrl(path), { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });

async function ask(url, options) {
  // The head of the page has asked for its first data already.
  const asked = options.method ? undefined : window.asked?.get(url);
  window.asked?.delete(url);
  let answer;
  try {
    answer = await (asked ?? fetch(url, { ...options, headers: { accept: "application/json", ...options.headers } }));
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") throw error;
    throw new ApiError(0, { error: "The server does not answer. Is it still running?" });
  }
  if (answer.status === 401) location.assign(`/login?next=${encodeURIComponent(location.pathname + location.search)}`);
  const body = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new ApiError(answer.status, body);
  return body;
}

/**
 * Listens to server-sent events while the page is visible; the header shows whether it is connected. A hidden tab
 * disconnects, because a browser allows six connections to one server for all its tabs.
 * @param {string} path
 * @param {Record<string, (data: any) => void>} handlers by event name; the data is parsed JSON
 * @param {{since?: string, opened?: () => void}} [options] `since` is the place to go on from, and moves with each event
 *   that has an id; `opened` is called at each connection but the first, for streams that have no places
 * @returns {() => void} stops listening
 */
export function listen(path, handlers, { since = "", opened } = {}) {
  let place = since;
  /** @type {EventSource | null} */
  let source = null;
  let timer = 0;
  let wait_ms = 1000;
  let times = 0;
  const close = () => {
    clearTimeout(timer);
    source?.close();
    source = null;
  };
  const open = () => {
    close();
    source = new EventSource(apiUrl(path, { since: place }));
    source.onopen = () => {
      wait_ms = 1000;
      isConnected = true;
      showLive();
      if (times++) opened?.();
    };
    source.onerror = () => {
      close();
      isConnected = false;
      showLive();
      timer = window.setTimeout(open, wait_ms);
      wait_ms = Math.min(wait_ms * 2, 15000);
    };
    for (const [name, handle] of Object.entries(handlers)) {
      source.addEventListener(name, (event) => {
        place = event.lastEventId || place;
        const data = JSON.parse(event.data);
        if (name === "summary") showRunning(isRunning(data));
        handle(data);
      });
    }
  };
  const look = () => (document.hidden ? close() : open());
  if (!document.hidden) open();
  document.addEventListener("visibilitychange", look);
  addEventListener("pagehide", close);
  return () => {
    document.removeEventListener("visibilitychange", look);
    close();
  };
}

/** Whether the stream of events is open; null before the first answer. @type {boolean | null} */
let isConnected = null;
/** Whether anything on this page still runs: a run that is over is not live, however well it is watched. */
let hasRunning = document.getElementById("main")?.dataset.state === "running";

/** @param {boolean} whether something on this page still runs */
export function showRunning(whether) {
  hasRunning = whether;
  showLive();
}

function showLive() {
  const live = document.getElementById("live");
  if (!live || isConnected === null) return;
  live.hidden = isConnected && !hasRunning;
  const text = isConnected ? "live" : "connection lost, retrying";
  live.dataset.state = isConnected ? "live" : "lost";
  if (live.textContent !== text) live.textContent = text;
}

/* States of runs. */

const STATE_TAGS = { running: "tag--running", finished: "tag--good", failed: "tag--error", died: "tag--warning" };

/** @param {{state: string, is_stale?: boolean}} run */
export const isRunning = (run) => run.state === "running" && !run.is_stale;

/** @param {{state: string, is_stale?: boolean}} run */
export const stateText = (run) => (run.is_stale ? "stale" : run.state);

/** Writes a run's state into its tag. @param {HTMLElement} tag @param {{state: string, is_stale?: boolean, notice?: string}} run */
export function showState(tag, run) {
  tag.textContent = stateText(run);
  tag.className = `tag ${run.is_stale ? "tag--warning" : (STATE_TAGS[run.state] ?? "")}`;
  tag.title = run.notice ?? "";
}

/**
 * An element: properties are attributes, `on…` listeners, `class`, `dataset`; text children become text nodes.
 * @param {string} tag
 * @param {Record<string, any>} [properties] false, null and undefined are left out
 * @param {...(Node | string | number | null | undefined | false)} children
 */
export function el(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "dataset") Object.assign(element.dataset, value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children) {
    if (child !== null && child !== undefined && child !== false) element.append(child instanceof Node ? child : String(child));
  }
  return element;
}

/** @param {string} selector @param {ParentNode} [inside] @returns {any} */
export const find = (selector, inside = document) => inside.querySelector(selector);

/** @param {string} selector @param {ParentNode} [inside] @returns {any[]} */
export const findAll = (selector, inside = document) => [...inside.querySelectorAll(selector)];

/** The `data-…` attributes of `main`: data from the server for the page's script. */
export const pageData = () => /** @type {HTMLElement} */ (document.getElementById("main")).dataset;

/** Shows an error above the content until it is closed. @param {unknown} error */
export function showError(error) {
  if (error instanceof DOMException && error.name === "AbortError") return;
  const notice = /** @type {HTMLElement} */ (document.getElementById("notice"));
  const close = el("button", { type: "button", class: "button", onclick: () => (notice.hidden = true) }, "Close");
  notice.replaceChildren(error instanceof Error ? error.message : String(error), close);
  notice.hidden = false;
}

/* Numbers as text. Nothing there is shown as an en dash. */
export const NONE = "–";

/** Four significant digits, and an exponent only where a person would write one. @param {number | null | undefined} value */
export function number(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e7 || size < 1e-3)) return signed(Number(value.toPrecision(3)).toExponential().replace("e+", "e"));
  return signed((size >= 1000 ? Math.round(value) : Number(value.toPrecision(4))).toLocaleString("en-US", { maximumFractionDigits: 6 }));
}

/** A fixed number of decimals. @param {number | null | undefined} value @param {number} [digits] */
export const fixed = (value, digits = 3) =>
  value === null || value === undefined || !Number.isFinite(value) ? NONE : signed(value.toFixed(digits));

/** The interval of a run's latest held-out evaluation; it says so where that was before training.
 * @param {{step?: number, low: number, high: number} | null | undefined} heldout */
export const standing = (heldout) =>
  heldout ? `[${fixed(heldout.low)}, ${fixed(heldout.high)}]${heldout.step === 0 ? " at step 0" : ""}` : "";

/** A share as per cent. @param {number | null | undefined} value 0 to 1 @param {number} [digits] */
export const percent = (value, digits = 1) =>
  value === null || value === undefined || !Number.isFinite(value) ? NONE : signed((100 * value).toFixed(digits)) + " %";

/** 980, 12.3k, 4.6M. @param {number | null | undefined} value */
export function compact(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  for (const [unit, letter] of /** @type {[number, string][]} */ ([[1e9, "G"], [1e6, "M"], [1e3, "k"]])) {
    if (Math.abs(value) >= unit) return (value / unit).toFixed(Math.abs(value) >= 100 * unit ? 0 : 1) + letter;
  }
  return value.toFixed(Math.abs(value) < 10 && !Number.isInteger(value) ? 1 : 0);
}

/** "1 run", "2 runs", "10,000 runs". @param {number} count @param {string} noun */
export const counted = (count, noun) => `${count.toLocaleString("en-US")} ${noun}${count === 1 ? "" : "s"}`;

/** Steps done of those planned. @param {{step: number, steps: number, state: string}} run */
export const stepsText = ({ step, steps, state }) =>
  `${step.toLocaleString("en-US")} / ${steps || (!step && state !== "unreadable") ? steps.toLocaleString("en-US") : NONE}`;

/** 45 s, 3 min 20 s, 5 h 10 min, 2 d 3 h. @param {number | null | undefined} seconds */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds) || seconds < 0) return NONE;
  const total = Math.round(seconds);
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (total < 60) return `${total} s`;
  if (total < 3600) return `${Math.floor(total / 60)} min${total % 60 ? ` ${total % 60} s` : ""}`;
  if (total < 86400) return `${Math.floor(total / 3600)} h ${Math.floor((total % 3600) / 60)} min`;
  return `${Math.floor(total / 86400)} d ${Math.floor((total % 86400) / 3600)} h`;
}

/** How long ago, in its largest unit. @param {number | null | undefined} unix_s */
export function age(unix_s) {
  if (!unix_s) return NONE;
  const seconds = Math.max(0, Date.now() / 1000 - unix_s);
  if (seconds < 60) return `${Math.floor(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h`;
  return `${Math.floor(seconds / 86400)} d`;
}

const signed = (text) => text.replaceAll("-", "−");

/* The address bar is the state: what a person chose is in the query, so that a link shows the same. */

/** @param {Record<string, unknown>} values */
function searchOf(values) {
  const search = new URLSearchParams();
  for (const [name, value] of Object.entries(values)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== null && one !== undefined && one !== "" && one !== false) search.append(name, String(one));
    }
  }
  return search;
}

/** The query of this page's URL; `query().get("step")`, `query().getAll("flag")`. */
export const query = () => new URLSearchParams(location.search);

/**
 * Changes parts of this page's query; empty values drop their name.
 * @param {Record<string, unknown>} changes
 * @param {{push?: boolean}} [options] push: a new entry in the history, where "back" should undo it
 */
export function setQuery(changes, { push = false } = {}) {
  const search = query();
  for (const name of Object.keys(changes)) search.delete(name);
  for (const [name, value] of searchOf(changes)) search.append(name, value);
  const text = search.toString();
  history[push ? "pushState" : "replaceState"](null, "", location.pathname + (text ? `?${text}` : "") + location.hash);
}

/** Runs `work` once in the next frame, however often it is asked for. @template {() => void} F @param {F} work */
export function oncePerFrame(work) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      work();
    });
  };
}

/** Runs `work` when nothing was asked for `wait_ms`. @param {(...values: any[]) => void} work @param {number} [wait_ms] */
export function afterPause(work, wait_ms = 200) {
  let timer = 0;
  return (...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => work(...values), wait_ms);
  };
}

/* Keys. */

/** @type {Map<string, {label: string, does: string, act: (event: KeyboardEvent) => void}>} */
const shortcuts = new Map();

/**
 * @param {string} key as in `KeyboardEvent.key`
 * @param {string} does what the help says
 * @param {(event: KeyboardEvent) => void} act
 */
export const shortcut = (key, does, act) => shortcuts.set(key, { label: KEY_LABELS[key] ?? key, does, act });

const KEY_LABELS = { ArrowLeft: "←", ArrowRight: "→", ArrowUp: "↑", ArrowDown: "↓", " ": "space" };

/**
 * `j` and `k` go through rows, Enter follows the current row's first link, `x` ticks its box.
 * @param {() => HTMLElement[]} rows those on the page now, in order
 * @param {(row: HTMLElement) => void} [chosen] instead of following the link at Enter
 */
export function walkRows(rows, chosen) {
  const go = (by) => {
    const all = rows();
    const current = all.findIndex((row) => row.classList.contains("is-current"));
    const next = all[Math.max(0, Math.min(all.length - 1, current < 0 ? 0 : current + by))];
    if (!next) return;
    all[current]?.classList.remove("is-current");
    next.classList.add("is-current");
    next.scrollIntoView({ block: "nearest" });
  };
  const current = () => rows().find((row) => row.classList.contains("is-current"));
  shortcut("j", "Next row", () => go(1));
  shortcut("k", "Previous row", () => go(-1));
  shortcut("Enter", "Open the row", () => {
    const row = current();
    if (row) chosen ? chosen(row) : find("a[href]", row)?.click();
  });
  if (rows().some((row) => find("input[type=checkbox]", row))) {
    shortcut("x", "Tick the row", () => find("input[type=checkbox]", current() ?? document.createElement("div"))?.click());
  }
}

/** `/` puts the cursor into the search box, Escape leaves it. @param {HTMLInputElement | null} box */
export function searchKey(box) {
  if (!box) return;
  shortcut("/", "Search", () => {
    box.focus();
    box.select();
  });
  box.addEventListener("keydown", (event) => event.key === "Escape" && box.blur());
}

const isTyping = (target) =>
  target instanceof HTMLElement && (target.isContentEditable || /^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName)) &&
  !(target instanceof HTMLInputElement && /^(checkbox|radio|range|button)$/.test(target.type));

function pressed(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented || isTyping(event.target)) return;
  const onControl = event.target instanceof HTMLElement && event.target.closest("a, button, summary, input, [role=button]");
  if (onControl && (event.key === "Enter" || event.key === " ")) return;
  const found = shortcuts.get(event.key);
  if (!found || document.querySelector("dialog[open]")) return;
  event.preventDefault();
  found.act(event);
}

function showHelp() {
  const keys = /** @type {HTMLElement} */ (document.getElementById("help-keys"));
  keys.replaceChildren();
  for (const { label, does } of shortcuts.values()) keys.append(el("dt", {}, el("kbd", {}, label)), el("dd", {}, does));
  /** @type {HTMLDialogElement} */ (document.getElementById("help")).showModal();
}

/* Theme. */

const THEMES = ["auto", "light", "dark"];
/** @type {(() => void)[]} */
const themeListeners = [];

/** @param {() => void} heard called when light and dark have changed */
export const onTheme = (heard) => themeListeners.push(heard);

const theme = () => document.documentElement.dataset.theme ?? "auto";

function nextTheme() {
  const next = THEMES[(THEMES.indexOf(theme()) + 1) % THEMES.length];
  if (next === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = next;
  try {
    localStorage.setItem("mint-theme", next);
  } catch {
    // Storage may be forbidden; then the choice holds for this page only.
  }
  nameTheme();
  for (const heard of themeListeners) heard();
}

function nameTheme() {
  const button = document.getElementById("theme-button");
  button?.setAttribute("aria-label", `Theme: ${theme()}`);
  button?.setAttribute("title", `Theme: ${theme()}`);
}

/** A CSS variable as the colour that a canvas understands. @param {string} name such as `--line-1` */
export function colorOf(name) {
  const probe = el("span");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const color = getComputedStyle(probe).color;
  probe.remove();
  return color;
}

document.addEventListener("keydown", pressed);
document.getElementById("theme-button")?.addEventListener("click", nextTheme);
document.getElementById("help-button")?.addEventListener("click", showHelp);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => themeListeners.forEach((heard) => heard()));
shortcut("?", "This help", showHelp);
nameTheme();
