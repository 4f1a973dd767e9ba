// The page of a run's checkpoints: copying, choosing the checkpoint of the chat box, and the search for the checkpoint
// where a metric fell. Comparing and chatting have their own modules.

import { beginChat, chatWith } from "./chat.js";
import { beginCompare } from "./checkpoint_compare.js";
import { launch } from "./launches.js";
import { el, find, findAll, fixed, getJson, pageData, postJson, runPath, shortcut, showError, walkRows } from "./common.js";

const POLL_MS = 1000;
const COPIED_MS = 1200;
const run = pageData().run ?? "";

/* the list */

async function copy(button) {
  try {
    await navigator.clipboard.writeText(button.dataset.copy);
    button.textContent = "copied";
    setTimeout(() => (button.textContent = "copy"), COPIED_MS);
  } catch {
    // Over plain HTTP from another machine, browsers forbid copying: select the text, so that the reader can
    getSelection()?.selectAllChildren(button.previousElementSibling);
  }
}

for (const button of findAll("[data-copy]")) button.addEventListener("click", () => copy(button));
for (const button of findAll("[data-evaluate]")) button.addEventListener("click", () => evaluate(button));
for (const button of findAll("[data-chat]")) button.addEventListener("click", () => chatWith(button.dataset.chat));

async function evaluate(button) {
  const place = find("[data-cell=reading]", button.closest("tr"));
  const ended = await launch(runPath(run, "evaluate"), { checkpoint: button.dataset.evaluate }, place);
  if (ended?.result) place.textContent = Object.entries(ended.result).map(readingText).join(" · ");
}

const readingText = ([temperature, { mean, low, high, n }]) =>
  `${temperature === "0" ? "greedy" : `temperature ${temperature}`}: ${fixed(mean)} [${fixed(low)}, ${fixed(high)}], n ${n}`;

/** Checkpoints are known to people by their steps. @param {string} path */
function nameOf(path) {
  const row = findAll("#kept [data-path]").find(({ dataset }) => dataset.path === path);
  return row ? `step ${row.dataset.step}` : path;
}

/** Text with the names of checkpoints as steps. @param {string} text */
const withSteps = (text) =>
  findAll("#kept [data-path]").reduce((said, { dataset }) => said.replaceAll(dataset.path, `step ${dataset.step}`), text);

/* the search */

const VERDICTS = {
  found: ["tag--error", "found"],
  uncertain: ["tag--warning", "uncertain"],
  none: ["tag--good", "no fall"],
};

async function follow() {
  const state = await getJson(runPath(run, "bisect"));
  showSearch(state);
  if (state.status === "running") setTimeout(() => follow().catch(showError), POLL_MS);
}

async function search(event) {
  event.preventDefault();
  try {
    showSearch(await postJson(runPath(run, "bisect"), { metric: find("#bisect-form").elements.metric.value }));
    await follow();
  } catch (error) {
    showSearch({ status: "failed", error: { error: error instanceof Error ? error.message : String(error) } });
  }
}

function showSearch({ status, metric, evaluated = [], result, error }) {
  const isRunning = status === "running";
  find("#bisect-go").disabled = isRunning;
  if (metric) find("#bisect-form").elements.metric.value = metric;
  const last = evaluated.at(-1);
  find("#bisect-state").textContent = !isRunning ? "" : last
    ? `evaluating the held-out set under ${nameOf(last)} (evaluation ${evaluated.length}) …`
    : "loading the model …";
  const place = find("#bisect-result");
  if (status === "failed") {
    place.replaceChildren(el("p", { class: "chat-error" }, error?.error ?? ""));
  } else if (status === "done") place.replaceChildren(...resultOf(result));
  else place.replaceChildren();
}

function resultOf({ verdict, good, bad, evaluations, explanation, estimates }) {
  const [kind, label] = VERDICTS[verdict] ?? ["", verdict];
  const made = evaluations === 1 ? "1 new evaluation" : `${evaluations} new evaluations`;
  const between = good && bad ? `Between ${nameOf(good)} and ${nameOf(bad)}` : "";
  const rows = Object.entries(estimates ?? {}).map(([path, { mean, low, high, n }]) => {
    const side = path === good ? "last good" : path === bad ? "first bad" : "";
    return el("tr", {}, el("th", { scope: "row" }, nameOf(path)), el("td", { class: "num" }, fixed(mean)),
      el("td", { class: "num muted" }, `[${fixed(low)}, ${fixed(high)}]`), el("td", { class: "num muted" }, n ? `n ${n}` : ""),
      el("td", {}, side));
  });
  const head = el("tr", {}, ...["Checkpoint", "Mean", "95 %", "", ""].map((title, i) => el("th", { scope: "col", class: i === 1 || i === 2 ? "num" : "" }, title)));
  return [
    el("p", {}, el("span", { class: `tag ${kind}` }, label), " ", between && el("b", {}, `${between}. `), `${withSteps(explanation)}; `,
      el("span", { class: "muted" }, `${made}.`)),
    el("div", { class: "scroll" }, el("table", { class: "table bisected" }, el("thead", {}, head), el("tbody", {}, ...rows))),
  ];
}

/* begin */

beginChat();
beginCompare().catch(showError);
if (find("#bisect-form")) {
  find("#bisect-form").addEventListener("submit", search);
  follow().catch(showError);
}
walkRows(() => findAll("#kept tbody tr"), (row) => find("[data-chat]", row).click());
shortcut("c", "Write in the chat box", () => find("#chat-input").focus());
shortcut("p", "Write the prompt to compare on", () => find("#compare textarea").focus());
