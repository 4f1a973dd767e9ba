// Samples two checkpoints on one prompt side by side, with the same seed, temperature and limit. Knows the elements of the
// comparison; prompts come from the reader, the held-out set, or the run's rollouts.

import { duration, el, find, findAll, getJson, pageData, query, runPath, setQuery } from "./common.js";
import { appendAnswer, finishText, sample, waiting } from "./sampling.js";

const OFFERED = 16;
const LABEL_CHARACTERS = 60;

const form = find("#compare");
const source = find("#compare-source");
/** @type {AbortController | null} */
let asked = null;

/** Sets up the form, and offers prompts of the run. */
export async function beginCompare() {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    compare();
  });
  find("#compare-stop").addEventListener("click", () => asked?.abort());
  form.elements.prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) compare();
    if (event.key === "Escape") asked?.abort();
  });
  form.elements.prompt.addEventListener("input", () => (source.value = ""));
  for (const button of findAll("[data-form]", form)) button.addEventListener("click", () => setForm(button.dataset.form));
  source.addEventListener("change", () => takePrompt(source.value));
  for (const [name, select] of sides().map((side) => [side.dataset.side, find("[data-model]", side)])) {
    const wanted = query().get(name);
    if (wanted && [...select.options].some(({ value }) => value === wanted)) select.value = wanted;
    select.addEventListener("change", () => setQuery({ [name]: select.value }));
  }
  await offerPrompts();
}

const sides = () => findAll(".side[data-side]");

function setForm(form_) {
  for (const button of findAll("[data-form]", form)) button.setAttribute("aria-pressed", String(button.dataset.form === form_));
}

const isChat = () => find("[data-form=chat]", form).getAttribute("aria-pressed") === "true";

/* prompts */

/** @type {Map<string, string>} */
const prompts = new Map();

async function offerPrompts() {
  const run = pageData().run ?? "";
  const evaluations = Number(pageData().evaluations);
  const [held, drawn] = await Promise.allSettled([
    evaluations ? getJson(runPath(run, `evaluations/${evaluations - 1}/examples`)) : { rows: [] },
    newestGroups(run),
  ]);
  if (held.status === "fulfilled") offer("held-out set", held.value.rows);
  if (drawn.status === "fulfilled") offer("last step's groups", drawn.value);
  const first = prompts.keys().next().value;
  if (first !== undefined && !form.elements.prompt.value) takePrompt((source.value = first));
}

async function newestGroups(run) {
  const { steps } = await getJson(runPath(run, "steps"));
  return steps.length ? (await getJson(runPath(run, `steps/${steps.at(-1)}/groups`))).groups : [];
}

function offer(title, rows) {
  const known = new Set(prompts.values());
  const group = el("optgroup", { label: title });
  for (const { prompt } of rows) {
    if (!prompt || known.has(prompt) || group.children.length >= OFFERED) continue;
    known.add(prompt);
    const key = `${title} ${group.children.length}`;
    prompts.set(key, prompt);
    group.append(el("option", { value: key }, labelOf(prompt)));
  }
  if (group.children.length) source.append(group);
}

function labelOf(prompt) {
  const line = prompt.replace(/[\s\p{Cc}\p{Cf}]+/gu, " ").trim();
  return line.length > LABEL_CHARACTERS ? `${Array.from(line).slice(0, LABEL_CHARACTERS).join("")} …` : line;
}

function takePrompt(key) {
  const prompt = prompts.get(key);
  if (prompt === undefined) return;
  form.elements.prompt.value = prompt;
  setForm("text"); // it is what the model read, its template applied
}

/* sampling */

async function compare() {
  if (asked || !form.reportValidity()) return;
  asked = new AbortController();
  find("#compare-go").disabled = true;
  find("#compare-stop").disabled = false;
  const { signal } = asked;
  const status = find("#compare-state");
  status.textContent = "sampling …";
  const done = await Promise.all(sides().map((side) => run(side, signal)));
  status.textContent = signal.aborted ? "stopped" : "";
  asked = null;
  find("#compare-go").disabled = false;
  find("#compare-stop").disabled = true;
  if (done.every(Boolean)) markDifferences();
}

function question(model) {
  const field = (name) => Number(form.elements[name].value);
  const prompt = form.elements.prompt.value;
  return {
    model,
    temperature: field("temperature"),
    max_tokens: field("max_tokens"),
    seed: field("seed"),
    n: field("samples"),
    ...(isChat() ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
  };
}

/** Samples for one side; returns whether it finished. */
async function run(side, signal) {
  const out = find("[data-cell=out]", side);
  const pace = find("[data-cell=pace]", side);
  const asks = question(find("[data-model]", side).value);
  const cards = Array.from({ length: asks.n }, () => {
    const text = el("div", { class: "answer-text mono", "data-answer": "" });
    const end = el("span", { class: "muted small" });
    return { card: el("article", { class: "answer" }, text, end), text, end };
  });
  out.replaceChildren(...cards.map(({ card }) => card));
  out.setAttribute("aria-busy", "true");
  const stopWaiting = waiting((text) => (pace.textContent = text));
  const began = performance.now();
  try {
    for await (const { choice, text, finish } of sample(asks, signal)) {
      stopWaiting();
      const card = cards[choice];
      if (!card) continue;
      appendAnswer(card.text, text);
      if (finish) card.end.textContent = finishText(finish);
    }
    pace.textContent = duration((performance.now() - began) / 1000);
    return true;
  } catch (error) {
    pace.textContent = signal.aborted ? "stopped" : "";
    if (!signal.aborted) out.replaceChildren(el("p", { class: "chat-error" }, error instanceof Error ? error.message : String(error)));
    return false;
  } finally {
    stopWaiting();
    out.setAttribute("aria-busy", "false");
  }
}

/** Marks each pair of answers as equal or different. */
function markDifferences() {
  const [left, right] = sides().map((side) => findAll(".answer", side));
  left.forEach((answer, i) => {
    const other = right[i];
    if (!other) return;
    const isSame = find("[data-answer]", answer).textContent === find("[data-answer]", other).textContent;
    for (const one of [answer, other]) {
      one.classList.toggle("answer--differs", !isSame);
      one.append(el("span", { class: "tag answer-tag" }, isSame ? "= same" : "≠ differs"));
    }
  });
}
