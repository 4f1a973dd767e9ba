// The table of runs: sorts, filters and compares. Events from the server change single rows, so that the reader's order and
// ticks stay. Knows the cells of runs.html by their `data-cell`.

import {
  age, afterPause, compact, el, find, findAll, fixed, getJson, listen, NONE, percent, query, runPath, searchKey,
  isRunning, setQuery, shortcut, showError, showRunning, showState, walkRows,
} from "./common.js";

/**
 * @typedef {{name: string, state: string, task: string, base_model: string, step: number, steps: number,
 *   reward: number | null, best_reward: number | null, success: number | null, tokens_per_s: number | null,
 *   heldout: {mean: number, low: number, high: number} | null, findings: Record<string, number>,
 *   began_at: number | null, updated_at: number | null, error: string | null}} Summary
 */

const SEVERITIES = ["error", "warning", "info"];
const SPARK_POINTS = 64;

/** What a column is sorted by; text compares as text. @type {Record<string, (run: Summary) => string | number | null>} */
const SORT_BY = {
  name: (run) => run.name,
  state: (run) => run.state,
  task: (run) => run.task,
  model: (run) => run.base_model,
  step: (run) => run.step,
  reward: (run) => run.reward,
  best: (run) => run.best_reward,
  heldout: (run) => run.heldout?.mean ?? null,
  success: (run) => run.success,
  rate: (run) => run.tokens_per_s,
  findings: (run) => SEVERITIES.reduce((sum, severity) => sum * 1000 + (run.findings[severity] ?? 0), 0),
  age: (run) => (run.began_at === null ? null : -run.began_at),
};
const DESCENDS_FIRST = new Set(["step", "reward", "best", "heldout", "success", "rate", "findings"]);

/** @type {Map<string, {row: HTMLElement, run: Summary, drawn: number}>} */
const known = new Map();
const body = /** @type {HTMLElement} */ (find("#rows"));
const filterBox = /** @type {HTMLInputElement} */ (find("#filter"));
const stateBox = /** @type {HTMLSelectElement} */ (find("#state"));
let sort = query().get("sort") ?? "age";

/** Shows a new list from the server: changes rows in place, adds new ones, removes missing ones. */
function take(/** @type {Summary[]} */ runs) {
  const names = new Set(runs.map((run) => run.name));
  for (const [name, { row }] of known) {
    if (!names.has(name)) {
      row.remove();
      known.delete(name);
    }
  }
  for (const run of runs) {
    const entry = known.get(run.name) ?? { row: rowOf(run.name), run, drawn: -1 };
    entry.run = run;
    known.set(run.name, entry);
    fill(entry.row, run);
  }
  showRunning(runs.some(isRunning));
  arrange();
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
  find("input[type=checkbox]", row).addEventListener("change", showTicked);
  seen.observe(row);
  return row;
}

function fill(row, run) {
  const cell = (name) => find(`[data-cell=${name}]`, row);
  showState(cell("state"), run);
  cell("task").textContent = run.task || NONE;
  cell("model").textContent = run.base_model || NONE;
  cell("progress").max = run.steps || 1;
  cell("progress").value = run.step;
  cell("step").textContent = `${run.step} / ${run.steps || NONE}`;
  cell("reward").textContent = fixed(run.reward);
  cell("best").textContent = fixed(run.best_reward);
  cell("heldout").textContent = fixed(run.heldout?.mean);
  cell("interval").textContent = run.heldout ? `[${fixed(run.heldout.low)}, ${fixed(run.heldout.high)}]` : "";
  cell("success").textContent = percent(run.success);
  cell("rate").textContent = compact(run.tokens_per_s);
  cell("age").textContent = age(run.began_at);
  cell("findings").replaceChildren(...SEVERITIES.filter((severity) => run.findings[severity]).map((severity) =>
    el("span", { class: `tag tag--${severity}`, title: `${run.findings[severity]} of severity ${severity}` }, run.findings[severity])).flatMap((tag) => [tag, " "]));
}

/** Sorts and filters the rows; a row that keeps its place is not moved. */
function arrange() {
  const entries = [...known.values()].sort((a, b) => compare(a.run, b.run));
  let shown = 0;
  let place = body.firstElementChild;
  for (const { row, run } of entries) {
    row.hidden = !fits(run);
    shown += Number(!row.hidden);
    if (row === place) place = place.nextElementSibling;
    else body.insertBefore(row, place);
  }
  find("#count").textContent = shown === known.size ? `${shown} runs` : `${shown} of ${known.size} runs`;
  find("#empty").hidden = shown > 0;
  if (known.size && !shown) find("#empty").textContent = "No run fits this filter.";
  showTicked();
}

function compare(a, b) {
  const key = sort.replace(/^-/, "");
  const [x, y] = [SORT_BY[key]?.(a) ?? null, SORT_BY[key]?.(b) ?? null];
  if (x === null || y === null) return Number(x === null) - Number(y === null) || a.name.localeCompare(b.name);
  const order = typeof x === "string" ? x.localeCompare(String(y), "en", { numeric: true }) : x - Number(y);
  return (sort.startsWith("-") ? -order : order) || a.name.localeCompare(b.name);
}

function fits(run) {
  const words = filterBox.value.toLowerCase().split(/\s+/).filter(Boolean);
  const text = `${run.name} ${run.task} ${run.base_model} ${run.state}`.toLowerCase();
  return (!stateBox.value || run.state === stateBox.value) && words.every((word) => text.includes(word));
}

function sortBy(key) {
  const first = DESCENDS_FIRST.has(key) ? `-${key}` : key;
  const other = first.startsWith("-") ? key : `-${key}`;
  sort = sort === first ? other : first;
  setQuery({ sort: sort === "age" ? "" : sort });
  showSort();
  arrange();
}

function showSort() {
  for (const head of findAll("th[data-key]")) {
    const here = head.dataset.key === sort.replace(/^-/, "");
    if (here) head.setAttribute("aria-sort", sort.startsWith("-") ? "descending" : "ascending");
    else head.removeAttribute("aria-sort");
  }
}

const ticked = () => [...known.values()].filter(({ row }) => find("input", row).checked).map(({ run }) => run.name);

function showTicked() {
  for (const { row } of known.values()) row.setAttribute("aria-selected", String(find("input", row).checked));
  const names = ticked();
  find("#compare").disabled = names.length < 2;
  find("#compare").textContent = names.length > 1 ? `Compare ${names.length}` : "Compare";
  find("#compare").title = names.length > 1 ? "" : "Tick two or more runs";
  find("#untick").hidden = names.length === 0;
}

function openCompare() {
  const names = ticked();
  if (names.length > 1) location.assign(`/compare?${new URLSearchParams(names.map((name) => ["run", name]))}`);
}

/* Sparklines: asked for when a row is seen, and again when its run has gone on. */

/** @type {HTMLElement[]} */
const waiting = [];
let drawing = 0;

const seen = new IntersectionObserver((changes) => {
  for (const { target, isIntersecting } of changes) if (isIntersecting) waiting.push(/** @type {HTMLElement} */ (target));
  drawNext();
});

async function drawNext() {
  const row = waiting.shift();
  if (!row || drawing >= 2) return void (row && waiting.unshift(row));
  const entry = known.get(row.dataset.run ?? "");
  if (entry && entry.drawn !== entry.run.step) {
    drawing += 1;
    entry.drawn = entry.run.step;
    await drawSpark(entry).catch(() => undefined); // a run that is gone has no line
    drawing -= 1;
  }
  drawNext();
}

async function drawSpark({ row, run }) {
  const { columns } = await getJson(runPath(run.name, "columns"), { query: { names: "reward/mean" } });
  const values = thinned((columns["reward/mean"] ?? []).filter((value) => value !== null));
  if (values.length < 2) return;
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const span = high - low || 1;
  const points = values.map((value, i) => `${((94 * i) / (values.length - 1) + 1).toFixed(1)},${(20 - (18 * (value - low)) / span).toFixed(1)}`);
  const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  line.setAttribute("points", points.join(" "));
  find("[data-cell=spark]", row).replaceChildren(line);
}

/** Means of equal stretches: a line of a hundred pixels shows no more. @param {number[]} values */
function thinned(values) {
  if (values.length <= SPARK_POINTS) return values;
  const width = values.length / SPARK_POINTS;
  return Array.from({ length: SPARK_POINTS }, (_, i) => {
    const part = values.slice(Math.floor(i * width), Math.floor((i + 1) * width));
    return part.reduce((sum, value) => sum + value, 0) / part.length;
  });
}

function redrawChanged() {
  for (const { row, run, drawn } of known.values()) {
    if (drawn >= 0 && drawn !== run.step && !waiting.includes(row)) waiting.push(row);
  }
  drawNext();
}

const refresh = () => getJson("runs").then(({ runs }) => {
  take(runs);
  redrawChanged();
}).catch(showError);

filterBox.value = query().get("q") ?? "";
stateBox.value = query().get("state") ?? "";
filterBox.addEventListener("input", () => {
  arrange();
  rememberFilter();
});
stateBox.addEventListener("change", () => {
  arrange();
  rememberFilter();
});
const rememberFilter = afterPause(() => setQuery({ q: filterBox.value.trim(), state: stateBox.value }));
for (const head of findAll("th[data-key]")) head.addEventListener("click", () => sortBy(head.dataset.key));
find("#compare").addEventListener("click", openCompare);
find("#untick").addEventListener("click", () => {
  for (const { row } of known.values()) find("input", row).checked = false;
  showTicked();
});
searchKey(filterBox);
walkRows(() => findAll("tr[data-run]", body).filter((row) => !row.hidden));
shortcut("c", "Compare the ticked runs", openCompare);
showSort();
await refresh();
listen("runs/events", { runs: ({ runs }) => {
  take(runs);
  redrawChanged();
} }, { opened: refresh });
setInterval(() => known.forEach(({ row, run }) => (find("[data-cell=age]", row).textContent = age(run.began_at))), 15000);
