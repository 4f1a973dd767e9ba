// The table of runs, a page at a time: the server sorts and filters, rows are changed in place, and ticks stay from page to
// page. Knows the cells of runs.html by their `data-cell`.

import {
  age, afterPause, compact, counted, el, find, findAll, fixed, getJson, listen, NONE, percent, query, searchKey,
  isRunning, pageData, postJson, setQuery, shortcut, showError, showRunning, showState, standing, stepsText,
  walkRows,
} from "./common.js";
import { beginStart } from "./launches.js";

/**
 * @typedef {{name: string, state: string, task: string, base_model: string, step: number, steps: number,
 *   reward: number | null, best_reward: number | null, success: number | null, tokens_per_s: number | null,
 *   heldout: {step: number, mean: number, low: number, high: number} | null, findings: Record<string, number>,
 *   began_at: number | null, updated_at: number | null, error: string | null}} Summary
 */

const SEVERITIES = ["error", "warning", "info"];
const READING_MS = 700;
const DESCENDS_FIRST = new Set(["step", "reward", "best", "heldout", "success", "rate", "findings"]);
const LIMIT = Number(pageData().limit);

/** The runs of this page, in order. @type {Map<string, {row: HTMLElement, run: Summary}>} */
const known = new Map();
/** The ticked runs, on this page and on others. @type {Set<string>} */
const ticked = new Set();
const body = /** @type {HTMLElement} */ (find("#rows"));
const filterBox = /** @type {HTMLInputElement} */ (find("#filter"));
const stateBox = /** @type {HTMLSelectElement} */ (find("#state"));
let sort = query().get("sort") || "age";
let offset = Number(query().get("offset")) || 0;
/** The number of the last request: an older answer is not shown over a newer one. */
let asked = 0;

/** What this page shows, as the API takes it. */
const wanted = () => ({ q: filterBox.value.trim(), state: stateBox.value, sort: sort === "age" ? "" : sort, offset: offset || "" });

/**
 * Shows a page of the list: changes rows in place, adds new ones, removes others.
 * @param {{runs: Summary[], curves: Record<string, number[]>, found: number, total: number, offset: number, is_whole: boolean}} answer
 */
function take({ runs, curves, found, total, offset: first, is_whole: isWhole }) {
  const names = new Set(runs.map((run) => run.name));
  for (const [name, { row }] of known) {
    if (!names.has(name)) {
      row.remove();
      known.delete(name);
    }
  }
  let place = body.firstElementChild;
  for (const run of runs) {
    const entry = known.get(run.name) ?? { row: rowOf(run.name), run };
    entry.run = run;
    known.delete(run.name); // so that the order is that of the page
    known.set(run.name, entry);
    fill(entry.row, run);
    drawSpark(entry.row, curves[run.name] ?? []);
    if (entry.row === place) place = place.nextElementSibling;
    else body.insertBefore(entry.row, place);
  }
  showRunning(runs.some(isRunning));
  find("#count").textContent = isWhole ? (found === total ? counted(total, "run") : `${found.toLocaleString("en-US")} of ${counted(total, "run")}`)
    : `reading runs: ${found.toLocaleString("en-US")} of ${total.toLocaleString("en-US")} so far`;
  find("#empty").hidden = runs.length > 0 || !isWhole;
  if (total && !found) find("#empty").textContent = "No run fits this filter.";
  showPager(first, runs.length, found);
  showTicked();
}

function showPager(first, count, found) {
  const isLast = first + LIMIT >= found;
  find("#pager").hidden = first === 0 && isLast;
  find("#page-place").textContent = `${count ? first + 1 : 0}–${first + count} of ${found}`;
  for (const [id, to, isEnd] of [["#page-before", Math.max(0, first - LIMIT), first === 0], ["#page-after", first + LIMIT, isLast]]) {
    const link = find(id);
    link.dataset.offset = to;
    link.setAttribute("aria-disabled", String(isEnd));
    link.tabIndex = isEnd ? -1 : 0;
  }
}

/** Another part of the list, from its beginning unless a place is given. */
function ask(to = 0) {
  offset = to;
  showClear();
  rememberQuery();
  return refresh();
}

const showClear = () => (find("#clear").hidden = !filterBox.value.trim() && !stateBox.value);

function clearFilter() {
  filterBox.value = stateBox.value = "";
  return ask();
}

function rowOf(name) {
  const there = findAll("tr[data-run]", body).find((row) => row.dataset.run === name);
  if (there) return prepare(there);
  const row = /** @type {HTMLTemplateElement} */ (find("#row")).content.firstElementChild?.cloneNode(true);
  const fresh = /** @type {HTMLElement} */ (row);
  fresh.dataset.run = name;
  find("[data-cell=name]", fresh).href = `/runs/${encodeURIComponent(name)}`;
  find("[data-cell=name] bdi", fresh).textContent = name;
  find("[data-cell=findings]", fresh).href = `/runs/${encodeURIComponent(name)}/diagnosis`;
  find("input", fresh).setAttribute("aria-label", `Tick ${name} to compare`);
  return prepare(fresh);
}

function prepare(row) {
  find("input[type=checkbox]", row).addEventListener("change", (event) => {
    if (event.target.checked) ticked.add(row.dataset.run);
    else ticked.delete(row.dataset.run);
    showTicked();
  });
  return row;
}

function fill(row, run) {
  const cell = (name) => find(`[data-cell=${name}]`, row);
  showState(cell("state"), run);
  cell("labels").replaceChildren(run.title ? el("bdi", { class: "muted" }, run.title) : "",
    ...run.tags.flatMap((tag) => [" ", el("span", { class: "tag" }, el("bdi", {}, tag))]));
  cell("task").textContent = run.task || NONE;
  [cell("task").title, cell("model").title] = [run.task ?? "", run.base_model ?? ""];
  cell("model").textContent = run.base_model || NONE;
  cell("progress").max = run.steps || 1;
  cell("progress").value = run.step;
  cell("step").textContent = stepsText(run);
  cell("reward").textContent = fixed(run.reward);
  cell("best").textContent = fixed(run.best_reward);
  cell("heldout").textContent = fixed(run.heldout?.mean);
  cell("interval").textContent = standing(run.heldout);
  cell("success").textContent = percent(run.success);
  cell("rate").textContent = compact(run.tokens_per_s);
  cell("age").textContent = age(run.began_at);
  for (const name of ["task", "model", "reward", "best", "heldout", "success", "rate"]) {
    cell(name).closest("td").toggleAttribute("data-none", cell(name).textContent === NONE);
  }
  const found = SEVERITIES.some((severity) => run.findings[severity]);
  cell("findings").title = `Diagnosis of ${run.name}`;
  cell("findings").replaceChildren(found ? "" : el("span", { class: "muted" }, "none"), ...SEVERITIES.filter((severity) => run.findings[severity]).map((severity) =>
    el("span", { class: `tag tag--${severity}`, title: `${run.findings[severity]} of severity ${severity}` }, run.findings[severity])).flatMap((tag) => [tag, " "]));
}

function sortBy(key) {
  const first = DESCENDS_FIRST.has(key) ? `-${key}` : key;
  const other = first.startsWith("-") ? key : `-${key}`;
  sort = sort === first ? other : first;
  showSort();
  ask();
}

function showSort() {
  for (const head of findAll("th[data-key]")) {
    const here = head.dataset.key === sort.replace(/^-/, "");
    if (here) head.setAttribute("aria-sort", sort.startsWith("-") ? "descending" : "ascending");
    else head.removeAttribute("aria-sort");
  }
}

function showTicked() {
  for (const [name, { row }] of known) {
    row.setAttribute("aria-selected", String(ticked.has(name)));
    find("input", row).checked = ticked.has(name);
  }
  find("#compare").disabled = ticked.size < 2;
  find("#compare").textContent = ticked.size > 1 ? `Compare ${ticked.size}` : "Compare";
  find("#compare").title = ticked.size > 1 ? "" : "Tick two or more runs";
  find("#untick").hidden = ticked.size === 0;
}

function openCompare() {
  if (ticked.size > 1) location.assign(`/compare?${new URLSearchParams([...ticked].map((name) => ["run", name]))}`);
}

/** Draws the rewards of a run as a line. @param {HTMLElement} row @param {number[]} values */
function drawSpark(row, values) {
  const place = find("[data-cell=spark]", row);
  if (values.length < 2) return place.replaceChildren();
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const span = high - low || 1;
  const points = values.map((value, i) => `${((94 * i) / (values.length - 1) + 1).toFixed(1)},${(20 - (18 * (value - low)) / span).toFixed(1)}`).join(" ");
  if (place.firstChild?.getAttribute("points") === points) return;
  const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  line.setAttribute("points", points);
  place.replaceChildren(line);
}

async function refresh() {
  const own = ++asked;
  try {
    const answer = await getJson("runs", { query: wanted() });
    if (own !== asked) return;
    take(answer);
    if (!answer.is_whole) setTimeout(() => own === asked && refresh(), READING_MS);
  } catch (error) {
    showError(error);
  }
}

const rememberQuery = afterPause(() => setQuery(wanted()));
const askSoon = afterPause(() => ask(), 120);

filterBox.value = query().get("q") ?? "";
stateBox.value = query().get("state") ?? "";
filterBox.addEventListener("input", askSoon);
stateBox.addEventListener("change", () => ask());
find("#clear").addEventListener("click", () => clearFilter().then(() => filterBox.focus()));
for (const head of findAll("th[data-key]")) head.addEventListener("click", () => sortBy(head.dataset.key));
for (const link of findAll("#pager a")) {
  link.addEventListener("click", (event) => {
    event.preventDefault();
    if (link.getAttribute("aria-disabled") !== "true") ask(Number(link.dataset.offset)).then(() => scrollTo(0, 0));
  });
}
find("#compare").addEventListener("click", openCompare);
find("#untick").addEventListener("click", () => {
  ticked.clear();
  showTicked();
});
searchKey(filterBox);
walkRows(() => findAll("tr[data-run]", body));
shortcut("c", "Compare the ticked runs", openCompare);
shortcut("Escape", "Clear the filter", clearFilter);
shortcut("]", "Next page", () => find("#page-after").click());
shortcut("[", "Page before", () => find("#page-before").click());
/** A run that was deleted a moment ago can be brought back. */
function offerUndo() {
  const entry = query().get("deleted");
  if (!entry) return;
  setQuery({ deleted: "" });
  const notice = find("#undo");
  const undo = async () => {
    try {
      await postJson(`deleted/${encodeURIComponent(entry)}/restore`, {});
      notice.hidden = true;
      await refresh();
    } catch (error) {
      showError(error);
    }
  };
  notice.replaceChildren(`${entry.replace(/^\d+-/, "")} was deleted. `, el("button", { type: "button", class: "button", onclick: undo }, "Undo"));
  notice.hidden = false;
  find("button", notice).focus(); // the next key can bring it back
}

showSort();
showClear();
offerUndo();
beginStart();
await refresh();
listen("runs/events", { runs: refresh }, { opened: refresh });
setInterval(() => known.forEach(({ row, run }) => (find("[data-cell=age]", row).textContent = age(run.began_at))), 15000);
