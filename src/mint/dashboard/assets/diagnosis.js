// The page of a run's diagnosis: each finding with charts and the first samples that show it, and what became of the
// tokens. The API says which metrics and rollouts belong to a finding.

import { Board } from "./charts.js";
import {
  afterPause, compact, counted, el, find, findAll, getJson, listen, number, pageData, percent, runPath, showError, walkRows,
} from "./common.js";
import { CHARTS, chartInWords, metric } from "./run_charts.js";
import { RunData } from "./run_data.js";
import { appendVisible } from "./tokens.js";

/**
 * @typedef {{code: string, severity: string, step: number, evidence: string, remedy: string, means: string,
 *   numbers: Record<string, number | null>, plot: string[], query: Record<string, string | string[]>, address: string,
 *   has_samples: boolean}} Finding
 */

const SAMPLES = 3;
const CANDIDATES = 40;
const CHARTS_SHOWN = 3;
const AGAIN_MS = 2000;
const TEXT_SHOWN = 300;
/** Steps that a chart gets; of a longer run every nth. */
const POINTS = Number(pageData().points);
const RANK = ["error", "warning", "info"];
/** Metrics that share a scale. */
const ONE_SCALE = /^(groups|mismatch)\//;
const STAGES = ["generated", "graded", "informative", "trained", "gradient"];

const run = pageData().run ?? "";
const place = find("#findings");
const board = new Board({ onPoint: (_run, step) => location.assign(`${rolloutsPage}?step=${step}`) });
const rolloutsPage = `/runs/${encodeURIComponent(run)}/rollouts`;
/** @type {RunData} */
let data;
/** The charts of each finding, so that they can go with it. @type {Map<string, any[]>} */
const charts = new Map();

/* findings */

async function load() {
  const { findings, is_whole: isWhole } = await getJson(runPath(run, "findings"));
  show(findings.toSorted((a, b) => RANK.indexOf(a.severity) - RANK.indexOf(b.severity) || a.step - b.step), isWhole);
  if (!isWhole) setTimeout(reload, AGAIN_MS);
}

/** @param {Finding[]} findings the worst first @param {boolean} isWhole whether the whole log was read */
function show(findings, isWhole) {
  const codes = findings.map(({ code }) => code);
  for (const card of findAll(".finding", place)) if (!codes.includes(card.dataset.code)) forget(card);
  for (const finding of findings) {
    const known = findAll(".finding", place).find((card) => card.dataset.code === finding.code);
    const isSame = known?.dataset.seen === seenOf(finding);
    const card = isSame ? known : cardOf(finding);
    if (known && !isSame) forget(known);
    place.append(card);
    if (!card.dataset.isWhole) complete(card, finding);
  }
  showVerdict(findings, isWhole);
  if (!isWhole) find("#verdict").append(el("span", { class: "muted" }, "reading the whole log …"));
}

const seenOf = ({ severity, step }) => `${severity} ${Math.trunc(step)}`;

function forget(card) {
  for (const chart of charts.get(card.dataset.code) ?? []) board.remove(chart);
  charts.delete(card.dataset.code);
  card.remove();
}

/** A finding as the server writes it, too. @param {Finding} finding */
function cardOf(finding) {
  const { code, severity, step, means } = finding;
  return el(
    "article",
    { class: `panel finding finding--${severity}`, id: code, dataset: { code, seen: seenOf(finding) }, tabindex: "-1" },
    el(
      "header",
      { class: "finding-head" },
      el("span", { class: `tag tag--${severity}` }, severity),
      el("h2", { class: "mono" }, el("bdi", {}, code)),
      el("span", { class: "muted" }, step ? `step ${Math.trunc(step)}` : "before the first step"),
    ),
    means && el("p", { class: "muted" }, `${means[0].toUpperCase()}${means.slice(1)}.`),
    el("dl", { class: "finding-facts" }, el("dt", {}, "Evidence"), el("dd", {}, finding.evidence),
      el("dt", {}, "Remedy"), el("dd", {}, finding.remedy)),
    finding.has_samples && el("p", { class: "finding-link" }, el("a", { href: linkOf(finding) }, "Show these samples")),
  );
}

/** @param {Finding} finding */
const linkOf = ({ address }) => `${rolloutsPage}?${address}`;

/** Adds to a card what needs more than the finding itself. @param {HTMLElement} card @param {Finding} finding */
function complete(card, finding) {
  card.dataset.isWhole = "yes";
  const numbers = Object.entries(finding.numbers ?? {});
  if (numbers.length) {
    find(".finding-facts", card).append(
      el("dt", {}, "Numbers"),
      el("dd", { class: "finding-numbers" }, ...numbers.map(([name, value]) =>
        el("span", {}, el("span", { class: "muted" }, `${name.replaceAll("_", " ")} `), el("b", {}, number(value))))),
    );
  }
  const link = find(".finding-link", card);
  const plots = el("div", { class: "finding-charts charts" });
  card.insertBefore(plots, link);
  plot(plots, finding);
  if (!finding.has_samples) return;
  const samples = el("div", { class: "finding-samples", "aria-label": "The first samples that show it" });
  card.insertBefore(samples, link);
  showSamples(samples, finding).catch(showError);
}

/** @param {HTMLElement} host @param {Finding} finding */
function plot(host, finding) {
  const names = finding.plot.filter((name) => data.column(name).some((value) => value !== null)).slice(0, CHARTS_SHOWN);
  const together = names.length > 1 && names.every((name) => ONE_SCALE.test(name));
  const specs = together
    ? [{ id: `finding:${finding.code}`, title: names[0].split("/")[0], series: () => names.map((name) => metric(name, name.split("/").at(-1))) }]
    : names.map(chartInWords);
  const marks = finding.step ? [{ step: finding.step, severity: finding.severity }] : [];
  charts.set(finding.code, specs.map((spec) => board.add(host, spec, { marks })));
  board.changed();
}

/** @param {HTMLElement} host @param {Finding} finding */
async function showSamples(host, finding) {
  const { flags = [], ...query } = finding.query;
  const { rows, total } = await getJson(runPath(run, "rollouts"), { query: { ...query, flag: flags, limit: CANDIDATES } });
  const link = find(".finding-link a", host.parentElement ?? host);
  if (!rows.length) {
    host.replaceChildren(el("p", { class: "muted" }, "The run folder has no rollouts of these steps that show it."));
    link.textContent = "Look through the rollouts";
    link.href = rolloutsPage;
    return;
  }
  host.replaceChildren(...ofSeveralPrompts(rows).map(sampleOf));
  const count = total ?? rows.length;
  link.textContent = count > SAMPLES ? `Show all ${count.toLocaleString("en-US")} samples` : "Show these samples";
}

/** The first samples of the first groups: one prompt says less than several. @param {any[]} rows */
function ofSeveralPrompts(rows) {
  const firsts = new Map(rows.toReversed().map((row) => [`${row.step} ${row.group}`, row]));
  const chosen = rows.filter((row) => firsts.get(`${row.step} ${row.group}`) === row).slice(0, SAMPLES);
  const others = rows.filter((row) => !chosen.includes(row)).slice(0, SAMPLES - chosen.length);
  return [...chosen, ...others];
}

/** A rollout, cut short, as a link to the whole of it. @param {any} row */
function sampleOf(row) {
  const box = el(
    "a",
    { class: "shown", href: `${rolloutsPage}?step=${row.step}&group=${row.group}&row=${row.row}` },
    el(
      "span",
      { class: "shown-head small" },
      el("b", { class: "num" }, row.reward === null ? "no reward" : `reward ${number(row.reward)}`),
      el("span", { class: "muted" }, `step ${row.step} · group ${row.group} · ${counted(row.length, "token")}`),
      ...["truncated", "error", "timed_out", "unsupported", "duplicate"].filter((flag) => row.flags.includes(flag))
        .map((flag) => el("span", { class: "tag" }, flag === "error" ? "not graded" : flag.replace("_", " "))),
    ),
  );
  const prompt = el("span", { class: "shown-text shown-text--prompt mono" });
  appendVisible(prompt, tail(row.prompt ?? ""));
  const text = el("span", { class: "shown-text mono" });
  appendVisible(text, head(row.text ?? ""));
  box.append(prompt, text);
  return box;
}

const characters = (text) => Array.from(text);
const head = (text) => (text.length > TEXT_SHOWN ? `${characters(text).slice(0, TEXT_SHOWN).join("")} …` : text);
const tail = (text) => (text.length > 120 ? `… ${characters(text).slice(-120).join("")}` : text);

/** @param {Finding[]} findings @param {boolean} isWhole */
function showVerdict(findings, isWhole) {
  const verdict = find("#verdict");
  if (!findings.length) {
    const until = isWhole && pageData().state !== "running" ? "" : " so far";
    verdict.replaceChildren(el("b", {}, "No findings"), " ", el("span", { class: "muted" },
      `in ${counted(data.steps.at(-1) ?? 0, "step")}${until}. Every step was checked for the findings listed under “What is checked”.`));
    return;
  }
  verdict.replaceChildren(
    el("b", {}, counted(findings.length, "finding")),
    el("span", { class: "verdict-codes" }, ...findings.map(({ code, severity }) =>
      el("a", { class: `tag tag--${severity}`, href: `#${code}` }, el("bdi", {}, code)))),
  );
}

/* where the tokens went */

/** The last step that the sums on the page count; the server has summed the steps before the page was opened. */
let countedStep = Number(document.querySelector("#ledger")?.getAttribute("data-step") ?? Infinity);

/** Adds the tokens of a new step to the sums. @param {Record<string, number>} metrics */
function countTokens(metrics) {
  if (metrics.step <= countedStep) return;
  countedStep = metrics.step;
  const bars = STAGES.map((stage) => find(`#ledger [data-stage=${stage}] progress`));
  const sums = bars.map((bar, i) => (bar ? bar.value : 0) + (metrics[`ledger/${STAGES[i]}`] ?? 0));
  bars.forEach((bar, i) => {
    if (!bar) return;
    bar.max = sums[0] || 1;
    bar.value = sums[i];
    const row = bar.closest("[data-stage]");
    find("[data-cell=tokens]", row).textContent = compact(sums[i]);
    find("[data-cell=share]", row).textContent = percent(sums[0] ? sums[i] / sums[0] : null);
  });
}

/* begin */

const reload = afterPause(() => load().catch(showError), 150);

async function begin() {
  const answer = await getJson(runPath(run, "columns"), { query: { points: POINTS } });
  data = new RunData(run, answer);
  if (data.column("ledger/generated").length > 1) board.add(find("#ledger-chart"), /** @type {any} */ (CHARTS.find(({ id }) => id === "ledger")));
  board.setRuns([data]);
  await load();
  const target = location.hash.slice(1);
  if (target) document.getElementById(target)?.scrollIntoView();
  if (data.summary.state !== "running") return;
  listen(runPath(run, "events"), {
    step: ({ metrics }) => {
      data.append(metrics);
      board.changed();
      countTokens(metrics);
    },
    finding: reload,
    summary: (summary) => {
      pageData().state = summary.state;
      reload();
    },
    reset: () => location.reload(),
  }, { since: Number.isFinite(countedStep) ? data.cursor.replace(/^\d+/, String(countedStep)) : data.cursor });
}

walkRows(() => findAll(".finding", place), (card) => find(".finding-link a", card)?.click());
begin().catch(showError);
