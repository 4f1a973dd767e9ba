// The page of the service: polls the API every two seconds while it is visible. The small curves show values since the page
// was opened. Knows the numbers of the API by name.

import { compact, counted, duration, el, find, getJson, number, percent, showError } from "./common.js";

const EVERY_MS = 2000;
const MAX_VALUES = 150; // five minutes
const SVG = "http://www.w3.org/2000/svg";

/** @type {Map<string, (number | null)[]>} */
const past = new Map();
/** @type {{at: number, counts: Map<string, number>} | null} */
let before = null;
let isAsking = false;

const bytes = (value) => (value === null || value === undefined ? "–" : value < 2 ** 20 ? `${compact(value / 1024)} KiB`
  : value < 2 ** 30 ? `${(value / 2 ** 20).toFixed(1)} MiB` : `${(value / 2 ** 30).toFixed(2)} GiB`);

async function refresh() {
  if (isAsking || document.hidden) return;
  isAsking = true;
  try {
    show(await getJson("service"));
    find("#live").textContent = "every 2 s";
    find("#live").dataset.state = "live";
  } catch (error) {
    find("#live").textContent = "connection lost, retrying";
    find("#live").dataset.state = "lost";
    if (error.status) showError(error);
  } finally {
    find("#live").hidden = false;
    isAsking = false;
  }
}

function show(service) {
  const state = find("[data-cell=state]");
  const trains = service.is_working && !service.storage_problem;
  state.textContent = service.is_working ? service.storage_problem || "running" : "stopped";
  state.classList.toggle("tag--running", trains);
  state.classList.toggle("tag--error", !trains);
  write("up", duration(service.now_at - service.began_at));
  write("models", service.base_models.join(", "));
  write("loaded", Object.entries(service.implementations ?? {}).map(([name, own]) =>
    `${name} on ${own === "mint" ? "mint's decoder" : own}`).join(", ") || "–");
  write("journal", bytes(service.journal_bytes));
  write("pause", `${Math.round(1000 * service.worst_pause_s)} ms`);
  figure("sampled", service.tokens_per_s.sampled, compact);
  figure("trained", service.tokens_per_s.trained, compact);
  figure("rows", service.queue.sampled_rows);
  figure("waiting_samples", service.queue.samples);
  figure("waiting_training", service.queue.training);
  figure("open", service.futures.open);
  figure("waited_for", service.futures.waited_for);
  figure("resident", service.memory.resident_bytes, bytes);
  showTenants(service.tenants);
  showEngine(service);
  showRoutes(service.requests ?? [], service.now_at);
}

function write(cell, text) {
  const place = find(`[data-cell=${cell}]`);
  if (place.textContent !== text) place.textContent = text;
}

/** @param {string} key @param {number | null} value @param {(value: number | null) => string} [format] */
function figure(key, value, format = number) {
  const values = past.get(key) ?? [];
  past.set(key, values);
  values.push(value ?? null);
  if (values.length > MAX_VALUES) values.shift();
  write(key, format(value ?? null));
  draw(find(`[data-figure=${key}] .spark`), values, key === "resident");
}

/** A curve that starts at zero; that of memory starts at its minimum, which is far from zero. */
function draw(svg, values, isFloating) {
  const known = values.filter((value) => value !== null);
  if (known.length < 2) return;
  const low = isFloating ? Math.min(...known) : 0;
  const high = Math.max(...known, low + (isFloating ? 1 : 1e-9));
  const points = values.flatMap((value, i) => {
    const x = 96 * (1 - (values.length - 1 - i) / (MAX_VALUES - 1));
    return value === null ? [] : [`${x.toFixed(1)},${(21 - (20 * (value - low)) / (high - low)).toFixed(1)}`];
  });
  const line = document.createElementNS(SVG, "polyline");
  line.setAttribute("points", points.join(" "));
  svg.replaceChildren(line);
}

function showTenants(tenants) {
  const rows = tenants.map((row) => el("tr", {}, el("th", { scope: "row" }, el("bdi", {}, row.owner)),
    ...["sessions", "models", "waiting_training", "waiting_samples"].map((name) => el("td", { class: "num" }, number(row[name])))));
  const nobody = el("tr", {}, el("td", { colspan: 5, class: "muted" }, "Nobody has a session, and nothing waits."));
  find("#tenants tbody").replaceChildren(...(rows.length ? rows : [nobody]));
}

/** All counters of the engine since its start, in groups. */
function showEngine({ tokens, busy_s, sampling, kv_pages, cluster }) {
  const { ranks = [], replicas = [], external, ...processes } = cluster ?? {};
  const groups = [
    ["Tokens since the start", Object.entries(tokens).map(([name, value]) => [name, compact(value)])],
    ["Time in the engine", Object.entries(busy_s).sort(([, a], [, b]) => b - a).map(([name, value]) => [words(name), duration(value)])],
    ["Sampling", [...cacheShare(sampling), ...counters(sampling)]],
    ["Pages of the cache", counters(kv_pages)],
    ["Processes", [...counters(processes), ...ranks.map(rankRow), ...replicas.map(replicaRow)]],
    ["External samplers", external ? [...external.hosts.map(hostRow), ...gapRows(external.gap)] : []],
  ];
  find("#engine tbody").replaceChildren(...groups.filter(([, rows]) => rows.length).flatMap(([title, rows]) => [
    el("tr", { class: "group" }, el("th", { scope: "colgroup", colspan: 2 }, title)),
    ...rows.map(([name, text]) => el("tr", {}, el("th", { scope: "row" }, name), el("td", { class: "num" }, text))),
  ]));
}

const rankRow = (process) => [`rank, process ${process}`, "trains"];

/** What one replica has: its queue, and the loras in its memory. */
const replicaRow = ({ process, jobs, sequences, loras, lora_bytes }) =>
  [`replica, process ${process}`, `${counted(jobs, "request")}, ${counted(sequences, "sequence")}, ${counted(loras, "lora")} (${bytes(lora_bytes)})`];

/** An external sampler: what it has, or why it is not reached. */
const hostRow = ({ address, up, problem, jobs, sequences, loras, lost }) =>
  [address, up ? `${number(jobs)} requests, ${number(sequences)} sequences, ${number(loras)} loras; lost ${number(lost)} times` : `not reached: ${problem}`];

/** How far sampler and trainer are apart, in nats. */
const gapRows = ({ tokens, mean, max, alarms, last }) => tokens === 0 ? [] : [
  ["|Δ logprob| to the trainer, mean", mean.toExponential(1)], ["at most", max.toExponential(1)],
  ...(last ? [["k3 in the last pass", last.k3.toExponential(1)]] : []), ["passes in which it was too large", number(alarms)],
];

/** The share of prompt tokens found in the prefix cache. */
function cacheShare({ prefilled, reused } = {}) {
  return prefilled + reused > 0 ? [["prompt tokens from the prefix cache", percent(reused / (prefilled + reused))]] : [];
}

const words = (name) => name.replaceAll("_", " ");

const counters = (numbers) => Object.entries(numbers ?? {}).map(([name, value]) =>
  [words(name), name.endsWith("_share") ? percent(value) : name.endsWith("bytes") ? bytes(value) : compact(value)]);

/** @param {{method: string, route: string, answered: number, refused: number}[]} requests @param {number} now unix seconds */
function showRoutes(requests, now) {
  const counts = new Map(requests.map(({ method, route, answered, refused }) => [`${method} ${route}`, answered + refused]));
  const rows = requests.toSorted((a, b) => b.answered + b.refused - a.answered - a.refused).map(({ method, route, answered, refused }) => {
    const name = `${method} ${route}`;
    const rate = before && now > before.at ? ((counts.get(name) ?? 0) - (before.counts.get(name) ?? 0)) / (now - before.at) : null;
    return el("tr", {}, el("th", { scope: "row", class: "mono" }, name), el("td", { class: "num" }, number(answered)),
      el("td", { class: "num" }, number(refused)), el("td", { class: "num" }, rate === null ? "–" : rate.toFixed(1)));
  });
  find("#routes tbody").replaceChildren(...rows);
  before = { at: now, counts };
}

setInterval(refresh, EVERY_MS);
document.addEventListener("visibilitychange", refresh);
refresh();
