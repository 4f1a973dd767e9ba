// The page of a run, and of several compared runs: main numbers, charts, and the reader's settings, which are in the URL.
// Knows the cells of run.html by their `data-cell`; charts.js draws.

import {
  age, afterPause, compact, duration, el, find, findAll, fixed, getJson, listen, NONE, number, pageData, percent, query, runPath,
  searchKey, setQuery, shortcut, showError, showState, standing, stateText, stepsText,
} from "./common.js";
import { DASHES, swatch } from "./chart_paint.js";
import { Board } from "./charts.js";
import { RunData } from "./run_data.js";
import { beginLabels } from "./run_labels.js";
import { chartOf, CHARTS, taskCharts } from "./run_charts.js";

/** @typedef {import("./run_data.js").Axis} Axis */

const LIVE_RUNS = 4;
const LONGEST_SETTING = 60;
const OFFERED_RUNS = 20;
/** Steps that a chart gets at once; of a longer run every nth, and a zoom asks for those between. */
const POINTS = Number(pageData().points);
const single = pageData().run ?? null;
/** @type {string[]} */
let names = JSON.parse(pageData().runs ?? "[]");
/** @type {Map<string, RunData>} */
const loaded = new Map();
/** @type {Map<string, Record<string, unknown>>} */
const configs = new Map();
/** @type {Map<string, () => void>} */
const streams = new Map();
/** @type {Map<string, any>} */
const extra = new Map();
/** @type {{step: number, severity: string}[]} */
const marks = [];

const board = new Board({
  constants: find("#constants"),
  axis: query().get("axis") === "time" ? "time" : "step",
  smoothing: Math.min(0.98, Math.max(0, Number(query().get("smooth")) || 0)),
  zoom: zoomFrom(query().get("zoom")),
  onPoint: (run, step) => location.assign(rolloutsOf(run.name, step)),
  onHover: showReadout,
  onZoom: (zoom) => {
    setQuery({ zoom: zoom ? zoom.map((place) => Number(place.toPrecision(6))).join("~") : "" });
    find("#whole").hidden = !zoom;
    refine(zoom);
  },
});

const rolloutsOf = (name, step) => `/runs/${encodeURIComponent(name)}/rollouts?step=${step}`;

function zoomFrom(text) {
  const ends = (text ?? "").split("~").map(Number);
  return ends.length === 2 && ends[0] < ends[1] ? /** @type {[number, number]} */ (ends) : null;
}

/** Loads the steps between those that are there, for long runs of which only every nth is. */
const refine = afterPause((zoom) => {
  const thinned = board.runs.filter((run) => run.every > 1 || run.isPart);
  if (!thinned.length) return;
  Promise.all(thinned.map(async (run) => {
    const range = zoom ? { since: Math.max(0, run.stepAt(zoom[0], board.axis) - run.every), until: run.stepAt(zoom[1], board.axis) + run.every } : {};
    run.replace(await getJson(runPath(run.name, "columns"), { query: { ...range, points: POINTS } }), Boolean(zoom));
  })).then(() => board.changed()).catch(showError);
}, 150);

/* runs */

async function load(name) {
  if (loaded.has(name)) return;
  const [columns, { config }] = await Promise.all([getJson(runPath(name, "columns"), { query: { points: POINTS } }), single ? { config: {} } : getJson(runPath(name))]);
  loaded.set(name, new RunData(name, columns));
  configs.set(name, config);
}

/** Loads the missing runs and shows all; names a run that cannot be read, and shows the others. */
async function showRuns() {
  const results = await Promise.allSettled(names.map(load));
  results.forEach((result) => result.status === "rejected" && showError(result.reason));
  names = names.filter((name) => loaded.has(name));
  const runs = names.map((name) => /** @type {RunData} */ (loaded.get(name)));
  if (single) marks.push(...runs.flatMap((run) => run.findings.map(({ step, severity }) => ({ step, severity }))));
  if (!query().has("smooth")) board.smoothing = smoothingFor(Math.max(0, ...runs.map(({ steps }) => steps.length)));
  showSmoothing();
  showCharts(runs);
  board.setRuns(runs);
  runs.forEach((run) => showSummary(run));
  if (!single) showCompared(runs);
  follow();
  if (board.zoom) refine(board.zoom);
  find("#charts").setAttribute("aria-busy", "false");
}

/** Of many noisy steps the trend is what one looks for first. @param {number} steps */
const smoothingFor = (steps) => (steps > 300 ? 0.9 : steps > 60 ? 0.6 : 0);

/** Listens to the events of running runs; only to some, because a browser has few connections. */
function follow() {
  for (const [name, stop] of streams) {
    if (!names.includes(name)) {
      stop();
      streams.delete(name);
    }
  }
  for (const name of names) {
    const run = loaded.get(name);
    const mayGrow = single || run?.summary.state === "running";
    if (run && mayGrow && !streams.has(name) && streams.size < LIVE_RUNS) streams.set(name, listenTo(run));
  }
}

function listenTo(run) {
  return listen(runPath(run.name, "events"), {
    step: ({ metrics }) => {
      run.append(metrics);
      grown(run);
    },
    evaluation: (evaluation) => {
      run.evaluations.push(evaluation);
      grown(run);
    },
    finding: (finding) => {
      run.findings = [...run.findings.filter(({ code }) => code !== finding.code), finding];
      if (single) {
        marks.push(finding);
        showFindings(run);
      }
      board.changed();
    },
    summary: (summary) => {
      run.summary = summary;
      grown(run);
    },
    // The log was cut back to a checkpoint, so the data of this page is out of date.
    reset: () => getJson(runPath(run.name, "columns"), { query: { points: POINTS } }).then((answer) => {
      loaded.set(run.name, Object.assign(run, new RunData(run.name, answer)));
      grown(run);
    }).catch(showError),
  }, { since: run.cursor });
}

function grown(run) {
  showCharts(board.runs);
  board.changed();
  showSummary(run);
  if (!single) showCompared(board.runs);
}

/* headline */

function showSummary(run) {
  if (!single) return;
  const { summary } = run;
  const heldout = summary.heldout;
  const texts = {
    step: stepsText(summary),
    success: percent(summary.success),
    reward: fixed(summary.reward),
    best: fixed(summary.best_reward),
    heldout: fixed(heldout?.mean),
    interval: standing(heldout),
    gain: gainOf(heldout, run.evaluations),
    rate: compact(summary.tokens_per_s),
  };
  for (const [name, text] of Object.entries(texts)) find(`.headline [data-cell=${name}]`).textContent = text;
  find(".headline [data-cell=best]").parentElement.hidden = summary.best_reward === null;
  const progress = find(".headline [data-cell=progress]");
  [progress.max, progress.value] = [summary.steps || 1, summary.step];
  showState(find(".headline [data-cell=state]"), summary);
  const notice = find(".headline [data-cell=notice]");
  notice.textContent = summary.notice;
  notice.className = `headline-notice headline-notice--${summary.state}`;
  notice.hidden = !summary.notice;
  showClock(run);
}

/** The gain of an evaluation over the one before training. */
function gainOf(heldout, evaluations) {
  const before = evaluations.find(({ when, temperature, metric }) =>
    when === "before" && temperature === heldout?.temperature && metric === heldout?.metric);
  if (!heldout || !before || heldout.step === 0) return "";
  return `from ${fixed(before.mean)} (${heldout.mean >= before.mean ? "+" : ""}${fixed(heldout.mean - before.mean)})`;
}

function showClock({ summary, elapsed: places }) {
  const runs = summary.state === "running";
  // An older version did not log the start of a run; the times of its steps are known.
  const elapsed = (runs ? Date.now() / 1000 : summary.updated_at) - summary.began_at || places.at(-1);
  find(".headline [data-cell=elapsed]").textContent = duration(elapsed);
  find(".headline [data-cell=rest]").hidden = !runs;
  find("#stop-bar").hidden = !runs;
  const resume = find("#resume-bar");
  if (resume) resume.hidden = !["stopped", "failed", "died"].includes(summary.state) || !summary.steps;
  const left = runs && summary.step && elapsed ? (elapsed / summary.step) * (summary.steps - summary.step) : null;
  find(".headline [data-cell=eta]").textContent = duration(left);
}

function showFindings(run) {
  find("#findings").replaceChildren(...run.findings.map(({ code, severity, step, evidence, remedy }) => el("li", {},
    el("a", { href: `/runs/${encodeURIComponent(run.name)}/diagnosis#${encodeURIComponent(code)}`, title: remedy },
      el("span", { class: `tag tag--${severity}` }, code), " ", el("span", { class: "muted" }, `step ${step}`), " ", evidence))));
}

/* several runs */

/** A cell with the name of its column, which a telephone shows. */
const labelled = (label, kind, content) => el("td", { class: kind, dataset: { label } }, content);

function showCompared(runs) {
  const differing = differences(runs);
  find("#compared").replaceChildren(...runs.map(({ name, summary }, i) => el("tr", {},
    el("td", {}, swatch(i % DASHES.length, DASHES[i % DASHES.length])),
    el("th", { scope: "row" }, el("a", { class: "mono", href: `/runs/${encodeURIComponent(name)}` }, name)),
    labelled("State", "", stateText(summary)),
    labelled("Steps", "num", stepsText(summary)),
    labelled("Success", "num", percent(summary.success)),
    labelled("Reward", "num", fixed(summary.reward)),
    labelled("Best", "num", fixed(summary.best_reward)),
    labelled("Held-out", "num", el("span", {}, fixed(summary.heldout?.mean), " ",
      el("span", { class: "muted" }, standing(summary.heldout)))),
    labelled("Tokens/s", "num", compact(summary.tokens_per_s)),
    el("td", { class: "wrap small" }, el("div", {}, differenceList(differing, configs.get(name) ?? {}))),
    el("td", {}, el("button", { type: "button", class: "button button--plain", "aria-label": `Take ${name} out`, onclick: () => takeOut(name) }, "×")))));
}

/** The settings that differ between the runs, those inside of others by their path. A task is named as on the command line
 * where all runs have such a name; then its class and its range of rewards, which follow from it, say nothing more. */
function differences(runs) {
  const flat = runs.map(({ name }) => flatSettings(configs.get(name) ?? {}));
  const keys = new Set(flat.flatMap((settings) => [...settings.keys()]));
  const differing = [...keys].filter((key) => new Set(flat.map((settings) => settings.get(key))).size > 1);
  const isNamed = differing.includes("task_spec.task") && flat.every((settings) => settings.has("task_spec.task"));
  return isNamed ? differing.filter((key) => !["task", "reward_range"].includes(key)) : differing;
}

/** Names and values as a list; what is long is folded. @param {string[]} keys @param {Record<string, unknown>} config */
function differenceList(keys, config) {
  if (!keys.length) return "nothing";
  const settings = flatSettings(config);
  const items = keys.map((key) => el("div", {}, el("dt", {}, key.replace(/^task_spec\./, "")), el("dd", { class: "mono", title: settings.get(key) ?? "not set" },
    shortened(settings.get(key) ?? NONE))));
  return el("dl", { class: "differing" }, ...items);
}

const shortened = (text) => (text.length > LONGEST_SETTING ? `${Array.from(text).slice(0, LONGEST_SETTING).join("")}…` : text);

/** Settings by path, each value as text: `task_spec.seed` for what lies inside of another. @returns {Map<string, string>} */
function flatSettings(config, path = "", found = new Map()) {
  for (const [key, value] of Object.entries(config)) {
    const name = path + key;
    if (value !== null && typeof value === "object" && !Array.isArray(value)) flatSettings(value, `${name}.`, found);
    else found.set(name, settingText(value));
  }
  return found;
}

function settingText(value) {
  if (Array.isArray(value)) return value.map(settingText).join(", ") || "none";
  if (value === null || value === undefined) return "none";
  return typeof value === "boolean" ? (value ? "yes" : "no") : typeof value === "number" ? number(value) : String(value);
}

function takeOut(name) {
  names = names.filter((other) => other !== name);
  setQuery({ run: names });
  showRuns();
}

/** Offers the newest runs whose names, tasks or models have what is typed. */
async function offerRuns() {
  const { runs } = await getJson("runs", { query: { q: find("#add-run").value, limit: OFFERED_RUNS } });
  const others = runs.filter(({ name }) => !names.includes(name));
  find("#other-runs").replaceChildren(...others.map(({ name, task, began_at }) =>
    el("option", { value: name }, `${task || NONE} · ${age(began_at)} ago`)));
}

function addRun(name) {
  if (!findAll("#other-runs option").some(({ value }) => value === name)) return;
  find("#add-run").value = "";
  if (single) return location.assign(`/compare?${new URLSearchParams([["run", single], ["run", name]])}`);
  names.push(name);
  setQuery({ run: names });
  return showRuns().then(offerRuns);
}

const offerSoon = afterPause(() => offerRuns().catch(showError));

/* charts */

/** Adds missing charts: a run may report new metrics at any step. */
function showCharts(runs) {
  const there = new Set(board.charts.map(({ spec }) => spec.id));
  for (const spec of [...CHARTS, ...taskCharts(runs)]) if (!there.has(spec.id)) board.add(find("#charts"), spec, { marks });
  query().getAll("metric").forEach(addMetric);
  const names = [...new Set(runs.flatMap((run) => run.names))].sort();
  if (find("#metrics").childElementCount !== names.length) {
    find("#metrics").replaceChildren(...names.map((name) => el("option", { value: name })));
  }
  const isCharted = runs.some(({ steps, evaluations }) => steps.length || evaluations.length);
  find("#no-steps").hidden = isCharted;
  find(".toolbar--sticky").hidden = Boolean(single) && !isCharted; // it changes charts, and there are none
  find("#no-steps").textContent = runs.some(({ summary }) => summary.state === "running")
    ? "No step is done yet. The charts appear with the first step."
    : "There is nothing to chart: no step was done.";
}

function addMetric(name) {
  if (!name || extra.has(name)) return;
  const chart = board.add(find("#charts"), chartOf(name), { marks });
  chart.toggle.before(el("button", { type: "button", class: "button button--plain chart-toggle", "aria-label": `Remove the chart of ${name}`, title: "Remove",
    onclick: () => removeMetric(name) }, "×"));
  extra.set(name, chart);
  board.changed();
}

function removeMetric(name) {
  board.remove(extra.get(name));
  extra.delete(name);
  setQuery({ metric: [...extra.keys()] });
}

function chooseMetric() {
  const box = find("#metric");
  const name = box.value.trim();
  if (!board.runs.some((run) => run.names.includes(name))) return;
  box.value = "";
  addMetric(name);
  setQuery({ metric: [...extra.keys()] });
  extra.get(name).card.scrollIntoView({ block: "nearest" });
}

/* toolbar */

function showReadout(step) {
  if (step === null || step === undefined) return; // the last one stays, so that its link can be reached
  const readout = find("#readout");
  const run = board.runs[0];
  readout.hidden = false;
  readout.textContent = `step ${step} · ${duration(run.placeOf(step, "time"))} · rollouts →`;
  readout.href = rolloutsOf(run.name, step);
}

function setAxis(axis) {
  board.setAxis(axis);
  setQuery({ axis: axis === "time" ? "time" : "" });
  showAxis();
}

function showAxis() {
  for (const button of findAll("[data-axis]")) button.setAttribute("aria-pressed", String(button.dataset.axis === board.axis));
}

const rememberSmoothing = afterPause(() => setQuery({ smooth: board.smoothing }));

function setSmoothing(value) {
  board.setSmoothing(value);
  showSmoothing();
  rememberSmoothing();
}

function showSmoothing() {
  find("#smoothing").value = board.smoothing;
  find(".smoothing-value").textContent = board.smoothing ? board.smoothing.toFixed(2) : "0";
}

for (const button of findAll("[data-axis]")) button.addEventListener("click", () => setAxis(button.dataset.axis));
find("#smoothing").addEventListener("input", (event) => setSmoothing(Number(event.target.value)));
find("#whole").addEventListener("click", () => board.setZoom(null));
find("#whole").hidden = !board.zoom;
find("#metric").addEventListener("change", chooseMetric);
find("#metric").addEventListener("input", (event) => event.inputType === "insertReplacementText" && chooseMetric());
find("#add-run").addEventListener("change", (event) => addRun(event.target.value));
find("#add-run").addEventListener("input", (event) => (event.inputType === "insertReplacementText" ? addRun(event.target.value) : offerSoon()));
searchKey(find("#metric"));
shortcut("a", "Step or time axis", () => setAxis(board.axis === "step" ? "time" : "step"));
shortcut("s", "Smooth more", () => setSmoothing(Math.min(0.98, Number((board.smoothing + 0.1).toFixed(2)))));
shortcut("S", "Smooth less", () => setSmoothing(Math.max(0, Number((board.smoothing - 0.1).toFixed(2)))));
shortcut("0", "Show the whole run", () => board.setZoom(null));
shortcut("ArrowRight", "On a chart: next step", () => undefined);
shortcut("Enter", "On a chart: the rollouts of this step", () => undefined);
if (single) beginLabels(single);
showAxis();
await showRuns();
offerRuns().catch(showError);
setInterval(() => single && board.runs.forEach(showClock), 1000);
