// The page of rollouts: chooses a step, a group and a sample, filters over all steps, and follows one item through training.
// The URL is the state: every choice is in its query, and the page is drawn from it. Other modules draw cards, lists and
// tokens.

import {
  afterPause,
  apiUrl,
  counted,
  el,
  find,
  findAll,
  getJson,
  listen,
  pageData,
  query,
  runPath,
  setQuery,
  shortcut,
  showError,
} from "./common.js";
import { Card, foldEqual, zeroFacts } from "./rollout_card.js";
import { Finder } from "./rollout_finder.js";
import { button, columnTitle, copyButton, groupHead, itemHead, promptFold } from "./rollout_heads.js";
import { groupEntry, hasSignal, rangeOf, resultEntry, visitChart } from "./rollout_lists.js";
import { isFiltering, noFilter, partsOf, readState, writeState } from "./rollout_query.js";
import { TokenPointer } from "./token_pointer.js";
import { makeScale, MODES } from "./tokens.js";

const RUN = pageData().run ?? "";
const PAGE_SIZE = 50;
const LISTED_GROUPS = 100;
const NARROW_PX = 760;
const WIDEST_CHART_PX = 900;
const KEPT_ANSWERS = 40;
const GAP_PX = 10;
/** As `grid-auto-rows` of the samples. */
const ROW_PX = 4;
const UNREADABLE = "This run did not write down what its token ids say.";

/** @type {number[]} */
let steps = [];
let state = readState(query());
/** @type {{step: number|null, groups: any[], shown?: number}} */
let listed = { step: null, groups: [] };
/** @type {Card[]} */
let cards = [];
/** A key for what the stage shows: it is drawn again only if the key changes. */
let staged = "";
/** The first samples of folds that the reader has opened, as `step/group/row`. @type {Set<string>} */
const unfolded = new Set();
let resultsOf = "";
let marked = "";
/** The latest answers by what was asked; what a step wrote does not change. @type {Map<string, Promise<any>>} */
const answers = new Map();
const finder = new Finder(find("#finder"), goToFilter, findingCodes);
const pointer = new TokenPointer(find("#token-info"), find("#samples"), () => cards);

const ask = (rest, options) => getJson(runPath(RUN, rest), options);

/** Asks, or gives the answer of before. @param {string} rest @returns {Promise<any>} */
function askOnce(rest) {
  const known = answers.get(rest) ?? ask(rest);
  answers.delete(rest);
  answers.set(rest, known);
  known.catch(() => answers.delete(rest));
  if (answers.size > KEPT_ANSWERS) answers.delete(answers.keys().next().value);
  return known;
}

const groupsOf = async (step) => (await askOnce(`steps/${step}/groups`)).groups;
const groupOf = async (step, group) => withPieces(await askOnce(`steps/${step}/groups/${group}`));

/** Gives each token of the rows its piece; an answer has every piece once. @param {{rows: any[], pieces: Record<string, any>}} answer */
function withPieces(answer) {
  for (const row of answer.rows) row.pieces ??= (row.tokens ?? []).map((id) => answer.pieces[id]);
  return answer;
}

/** The address of a state. @param {Partial<import("./rollout_query.js").State>} changes */
function linkTo(changes) {
  const search = new URLSearchParams();
  for (const [name, value] of Object.entries(writeState({ ...state, ...changes }))) {
    for (const one of Array.isArray(value) ? value : [value])
      if (one !== null && one !== "") search.append(name, String(one));
  }
  return `?${search}`;
}

/** Changes the state, the address and what is shown. @param {Partial<import("./rollout_query.js").State>} changes */
async function go(changes, { push = true } = {}) {
  state = { ...state, ...changes };
  setQuery(writeState(state), { push });
  await show();
}

async function show() {
  try {
    settleStep();
    drawSteps();
    finder.draw(state.filter);
    await Promise.all([isFiltering(state.filter) ? showResults() : showGroups(), showStage()]);
    performance.mark("rollouts shown");
  } catch (error) {
    staged = resultsOf = ""; // so that asking again is not taken for having it
    showError(error);
  }
}

/** A step with rollouts: the requested one, else the nearest before it, else the latest. Says it if there is another. */
function settleStep() {
  const asked = state.follow ? Infinity : (state.step ?? Infinity);
  state.step = steps.findLast((step) => step <= asked) ?? steps[0] ?? null;
  const missing = find("#step-missing");
  missing.hidden = state.step === null || asked === Infinity || asked === state.step;
  missing.textContent = missing.hidden ? "" : `Step ${asked} has no rollouts. The run has those from ${steps[0]} to ${steps.at(-1)}; this is step ${state.step}.`;
}

function drawSteps() {
  const range = find("#step-range");
  range.max = String(Math.max(0, steps.length - 1));
  range.value = String(steps.indexOf(state.step ?? 0));
  range.setAttribute("aria-valuetext", `step ${state.step}`);
  const box = find("#step-number");
  if (document.activeElement !== box) box.value = state.step ?? "";
  find("#step-last").textContent = steps.length ? `of ${steps.at(-1)}` : "";
  find("#step-before").disabled = state.step === steps[0];
  find("#step-after").disabled = state.step === steps.at(-1);
  find("#follow").setAttribute("aria-pressed", String(state.follow));
}

/** A step's groups: a filter, which is about all steps, is left. @param {number|null} step */
const goToStep = (step) =>
  go({ step, group: null, row: null, follow: false, visits: null, picks: [], filter: noFilter() });
const goByStep = (by) => {
  const step = steps[steps.indexOf(state.step ?? 0) + by];
  if (step !== undefined) goToStep(step);
};

/* The list: the groups of the step, or what a filter finds. */

async function showGroups() {
  resultsOf = "";
  if (state.step !== listed.step) {
    const step = state.step;
    const groups = step === null ? [] : await groupsOf(step);
    if (step !== state.step) return;
    listed = { step, groups };
  }
  drawGroups();
}

function drawGroups() {
  const { groups } = listed;
  const withSignal = groups.filter((group) => hasSignal(group.rewards));
  find("#list-title").textContent = counted(groups.length, "group");
  const choice = (label, signal) =>
    button(label, () => go({ signal }, { push: false }), { "aria-pressed": String(state.signal === signal) });
  find("#signal-choice").replaceChildren(choice("all", false), choice(`signal ${withSignal.length}`, true));
  find("#export").href = apiUrl(runPath(RUN, "rollouts.jsonl"), { step: state.step });
  find("#export").hidden = false;
  const range = rangeOf(groups);
  const all = state.signal ? withSignal : groups;
  const upTo = Math.max(LISTED_GROUPS, listed.shown ?? 0, all.findIndex((group) => group.group === state.group) + 1);
  const entries = all.slice(0, upTo).map((group) =>
    groupEntry(group, range, linkTo({ group: group.group, row: null, visits: null, picks: [] })),
  );
  const focused = findAll("#entries .entry").indexOf(document.activeElement);
  find("#entries").replaceChildren(...entries);
  if (focused >= 0) find(".entry", entries[focused] ?? document.createElement("li"))?.focus({ preventScroll: true });
  const why = groups.length ? "No group of this step carries a signal." : `Nothing was rolled out${pageData().state === "running" ? " yet" : ""}.`;
  if (!entries.length) find("#entries").append(el("li", { class: "empty" }, why));
  if (upTo < all.length) {
    const more = button(`more: ${counted(all.length - upTo, "group")} to go`, () => {
      listed.shown = upTo + LISTED_GROUPS;
      drawGroups();
    });
    find("#entries").append(el("li", { class: "entries-more" }, more));
  }
  markEntry();
}

async function showResults() {
  const key = JSON.stringify(state.filter);
  if (key === resultsOf) return markEntry();
  resultsOf = key;
  find("#entries").replaceChildren(el("li", { class: "empty" }, "Searching …"));
  find("#signal-choice").replaceChildren();
  find("#export").href = apiUrl(runPath(RUN, "rollouts.jsonl"), state.filter);
  find("#export").hidden = false;
  await addResults(0, key);
}

/** Adds the next results. A search that stopped at its limit continues until there is a whole page. */
async function addResults(offset, key) {
  const page = await ask("rollouts", { query: { ...state.filter, offset, limit: PAGE_SIZE } });
  if (key !== resultsOf) return;
  const list = find("#entries");
  if (offset === 0) list.replaceChildren();
  find(".entries-more", list)?.remove();
  const total = page.total ?? null;
  find("#list-title").textContent = total === null ? "Found" : `${total.toLocaleString("en-US")} found`;
  const isFirst = list.childElementCount === 0;
  for (const row of page.rows) {
    const { step, group, row: place } = row;
    const link = linkTo({ step, group, row: place, follow: false, visits: null, picks: [] });
    list.append(resultEntry(row, state.filter.text, link));
  }
  const isLeft = page.next_offset !== null;
  const goesOn = isLeft && !page.is_complete && list.childElementCount < PAGE_SIZE;
  if (goesOn) list.append(el("li", { class: "entries-more muted" }, "searching on …"));
  else if (isLeft) {
    const more = button("more", () => addResults(page.next_offset, key).catch(showError));
    list.append(el("li", { class: "entries-more" }, more));
  } else if (!list.childElementCount) list.append(el("li", { class: "empty" }, "No rollout fits this filter."));
  const first = page.rows[0];
  if (isFirst && first && state.row === null && state.visits === null) {
    await go({ step: first.step, group: first.group, row: first.row }, { push: false });
  }
  markEntry();
  if (goesOn) await addResults(page.next_offset, key);
}

function markEntry() {
  for (const entry of findAll("#entries .entry")) {
    const { group, step, row } = entry.dataset;
    const isCurrent =
      group !== undefined ? Number(group) === state.group : Number(step) === state.step && Number(row) === state.row;
    entry.classList.toggle("is-current", isCurrent && state.visits === null);
    if (isCurrent) scrollWithin(find("#entries"), entry);
  }
}

/** Scrolls a list, and not the page, to one of its entries. @param {HTMLElement} list @param {HTMLElement} entry */
function scrollWithin(list, entry) {
  const { top, bottom } = list.getBoundingClientRect();
  const own = entry.getBoundingClientRect();
  if (own.top < top) list.scrollTop -= top - own.top;
  else if (own.bottom > bottom) list.scrollTop += own.bottom - bottom;
}

/* The stage: the samples of a group, or those of one item at several steps. */

async function showStage() {
  if (state.visits !== null) return showVisits(state.visits);
  find(".colours").hidden = state.step === null; // without samples there is nothing to colour
  find("#stage-empty").hidden = state.step !== null;
  if (state.step === null) return;
  if (state.group === null && isFiltering(state.filter)) return;
  const step = state.step;
  const number = state.group ?? (await firstGroup(step));
  if (step !== state.step) return;
  const key = `${step}/${number}`;
  if (key !== staged) {
    staged = key;
    const group = await groupOf(step, number);
    if (key !== staged) return;
    drawGroup(group);
  }
  if (state.group === null) {
    state.group = number;
    setQuery(writeState(state));
  }
  markEntry();
  drawColours();
  markSample();
}

/** The first group whose rewards differ, which is worth more looks than the others. @param {number} step */
async function firstGroup(step) {
  const groups = await groupsOf(step);
  return (groups.find((group) => hasSignal(group.rewards)) ?? groups[0])?.group ?? 0;
}

function drawGroup(group) {
  const follow = () => go({ visits: String(group.item), picks: [] });
  const through = button("through training", follow, { id: "through", title: "This prompt at other steps (t)" });
  const isDrawn = group.item !== null && group.item !== undefined;
  find("#stage-head").replaceChildren(...groupHead(group, [...(isDrawn ? [through] : []), copyButton(exactAddress)]));
  drawCards([{ rows: group.rows, title: null }]);
  if (innerWidth > NARROW_PX) scrollTo(0, 0);
}

const exactAddress = () => new URL(linkTo({ follow: false }), location.href).href;

/** Lets each card span as many rows of the grid as it is high, so that low cards lie below each other beside a high one. */
const heights = new ResizeObserver((changes) => {
  for (const { target, borderBoxSize: [{ blockSize }] } of changes)
    /** @type {HTMLElement} */ (target).style.gridRowEnd = `span ${Math.ceil((blockSize + GAP_PX) / ROW_PX)}`;
});

/** Draws columns of samples side by side. @param {{rows: any[], title: Element|null}[]} columns */
function drawCards(columns) {
  cards = [];
  pointer.hide();
  const rows = columns.flatMap((column) => column.rows);
  const partLimit = Math.max(0, ...rows.flatMap((row) => Object.values(row.parts ?? {}).map(Math.abs)));
  const zeros = zeroFacts(rows);
  const boxes = columns.map(({ rows: own, title }) => {
    const isTrained = own.some((row) => row.used);
    const box = el("div", { class: title ? "column" : "samples-grid" }, title);
    for (const equal of foldEqual(own)) {
      const [first] = equal;
      const key = `${first.step}/${first.group}/${first.row}`;
      const isNamed = equal.some((row) => row !== first && state.visits === null && row.row === state.row);
      const shown = unfolded.has(key) || isNamed ? equal : [first];
      const unfold = () => {
        unfolded.add(key);
        drawCards(columns);
        drawColours();
        find(`.sample[data-row="${equal[1].row}"] a`)?.focus();
      };
      for (const row of shown) {
        const link = linkTo({ step: row.step, group: row.group, row: row.row, visits: null, picks: [] });
        const loadWhole = () => ask(`rollouts/${row.step}/${row.row}`).then(({ pieces, ...whole }) => {
          Object.assign(row, whole);
          delete row.pieces;
          withPieces({ rows: [row], pieces });
          drawCards(columns);
          drawColours();
        }).catch(showError);
        const card = new Card(row, { place: own.indexOf(row) + 1, partLimit, link, isLeftOut: isTrained && !row.used,
          count: shown.length === 1 ? equal.length : 1, unfold, zeros, blocks: rows.length, loadWhole });
        cards.push(card);
        box.append(card.element);
      }
    }
    return box;
  });
  const grid = find("#samples");
  grid.className = `samples${columns[0]?.title ? " samples--columns" : ""}`;
  grid.replaceChildren(...boxes);
  heights.disconnect();
  if (!columns[0]?.title) for (const card of cards) heights.observe(card.element, { box: "border-box" });
}

function drawColours() {
  const mode = MODES.includes(state.colour) ? state.colour : "advantage";
  for (const choice of findAll("#colours button"))
    choice.setAttribute("aria-pressed", String(choice.dataset.colour === mode));
  const scale = makeScale(
    mode,
    cards.map((card) => card.row).filter((row) => row.tokens),
  );
  for (const card of cards) card.colour(scale);
  const keys = scale.legend.map(({ name, label }) => el("span", { class: `legend-key ${name}` }, label));
  const notes = [scale.missing, cards.length && !cards.some((card) => card.isReadable) && UNREADABLE].filter(Boolean);
  find("#legend").replaceChildren(...keys, ...notes.map((note) => el("span", { class: "muted" }, note)));
}

function markSample() {
  const isMoving = marked !== `${staged}/${state.row}`;
  marked = `${staged}/${state.row}`;
  for (const card of cards) {
    const isCurrent = state.visits === null && card.row.row === state.row;
    card.element.classList.toggle("is-current", isCurrent);
    if (isCurrent && isMoving) card.element.scrollIntoView({ block: "nearest" });
  }
}

/** The next or previous sample: of the results where there are some, else of the group. @param {number} by */
function walk(by) {
  if (isFiltering(state.filter) && state.visits === null) {
    const entries = findAll("#entries .entry");
    const at = entries.findIndex((entry) => entry.classList.contains("is-current"));
    entries[Math.max(0, at + by)]?.click();
    return;
  }
  const rows = cards.map((card) => card.row.row);
  const at = rows.indexOf(state.row);
  const next = rows[Math.max(0, Math.min(rows.length - 1, at < 0 ? 0 : at + by))];
  if (next !== undefined) go({ row: next }, { push: false });
}

function walkGroups(by) {
  const links = findAll("#entries .entry");
  const at = links.findIndex((entry) => entry.classList.contains("is-current"));
  links[Math.max(0, Math.min(links.length - 1, at + by))]?.click();
}

/* One item through training. */

async function showVisits(item) {
  const key = `item ${item} ${state.picks.join()}`;
  if (key === staged) return drawColours();
  staged = key;
  const { visits } = await ask(`items/${encodeURIComponent(item)}`);
  const known = new Set(visits.map((visit) => visit.step));
  const asked = state.picks.filter((step) => known.has(step));
  const picked = asked.length
    ? asked
    : [0, Math.floor((visits.length - 1) / 2), visits.length - 1].map((place) => visits[place]?.step);
  const shown = visits.filter((visit) => picked.includes(visit.step));
  const groups = await Promise.all(shown.map((visit) => groupOf(visit.step, visit.group)));
  if (key !== staged) return;
  const picks = new Set(shown.map((visit) => visit.step));
  const toggle = (step) => {
    const left = picks.has(step) ? [...picks].filter((other) => other !== step) : [...picks, step];
    if (left.length) go({ picks: left.sort((one, other) => one - other) });
  };
  const back = button("back to the group", () => go({ visits: null, picks: [] }));
  const width = Math.min(WIDEST_CHART_PX, find("#stage").clientWidth - 24);
  find("#stage-head").replaceChildren(
    itemHead(item, visits.length, [back, copyButton(exactAddress)]),
    visits.length ? visitChart(visits, picks, toggle, width) : "",
    groups.length ? promptFold(groups[0].prompt, item) : "",
  );
  const linkOf = ({ step, group }) => linkTo({ step, group, row: null, visits: null, picks: [] });
  drawCards(groups.map((group) => ({ rows: group.rows, title: columnTitle(group, linkOf(group)) })));
  drawColours();
}

/** @param {import("./rollout_query.js").Filter} filter */
function goToFilter(filter) {
  go({ filter, row: null, group: null, visits: null, picks: [] });
}

async function findingCodes() {
  const { findings } = await ask("findings");
  return findings.map((finding) => finding.code);
}

/* What a person does. */

function bind() {
  finder.more.open = partsOf(state.filter).length > 0 && innerWidth > NARROW_PX;
  const slide = afterPause((place) => goToStep(steps[place]), 80);
  find("#step-range").addEventListener("input", (event) => {
    find("#step-number").value = String(steps[Number(event.target.value)]);
    slide(Number(event.target.value));
  });
  find("#step-number").addEventListener("change", (event) => {
    event.target.blur(); // the keys are the page's again, and the step that is shown may stand there
    goToStep(Number(event.target.value) || null);
  });
  find("#step-before").addEventListener("click", () => goByStep(-1));
  find("#step-after").addEventListener("click", () => goByStep(1));
  find("#follow").addEventListener("click", () =>
    go({ follow: !state.follow, group: null, row: null, visits: null, picks: [] }),
  );
  find("#colours").addEventListener("click", (event) => {
    const mode = event.target.dataset.colour;
    if (mode) go({ colour: mode }, { push: false });
  });
  document.addEventListener("click", followInPage);
  addEventListener("popstate", () => {
    state = readState(query());
    show();
  });
  bindKeys();
}

/** Links to this page change its state without loading it again. @param {MouseEvent} event */
async function followInPage(event) {
  if (event.defaultPrevented || event.button || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey)
    return;
  const link = event.target instanceof Element ? event.target.closest("a[href^='?']") : null;
  if (!link) return;
  event.preventDefault();
  const { colour, signal } = state; // chosen since the link was drawn, maybe
  await go({ ...readState(new URLSearchParams(link.getAttribute("href") ?? "")), colour, signal });
  if (innerWidth <= NARROW_PX) find("#stage").scrollIntoView();
}

function bindKeys() {
  shortcut("j", "Next sample", () => walk(1));
  shortcut("k", "Previous sample", () => walk(-1));
  shortcut("J", "Next group", () => walkGroups(1));
  shortcut("K", "Previous group", () => walkGroups(-1));
  shortcut("]", "Next step", () => goByStep(1));
  shortcut("[", "Previous step", () => goByStep(-1));
  shortcut("f", "Follow the latest step", () => find("#follow").click());
  shortcut("t", "This prompt through training", () => find("#through")?.click());
  shortcut("c", "Copy the link", () => find("#copy-link")?.click());
  MODES.forEach((mode, place) =>
    shortcut(String(place + 1), mode === "none" ? "No colours" : `Colour by ${mode}`, () =>
      go({ colour: mode }, { push: false }),
    ),
  );
}

/** A new step of a running run. @param {number} step */
async function onStep(step) {
  if (!steps.includes(step)) steps.push(step);
  if (state.follow && state.visits === null) await go({ group: null, row: null }, { push: false });
  else drawSteps();
}

/** Requests all that the URL names at once instead of one after another. */
function askAhead() {
  const { step, group, follow, filter } = state;
  if (step === null || follow || !find("#step-missing").hidden) return;
  if (!isFiltering(filter)) groupsOf(step).catch(() => null); // the page asks again, and says what is wrong
  if (group !== null) groupOf(step, group).catch(() => null);
}

async function start() {
  bind();
  try {
    askAhead();
    steps = (await ask("steps")).steps;
    await show();
  } catch (error) {
    showError(error);
  }
  const handlers = { step: ({ metrics }) => onStep(Number(metrics.step)) };
  listen(runPath(RUN, "events"), handlers, { since: String(steps.at(-1) ?? 0) });
}

start();
