// What a page starts on the server: a run, a run that goes on, an evaluation. Says how it goes until it ends.

import { find, getJson, postJson } from "./common.js";

const POLL_MS = 1000;

/**
 * Asks the server to start something, and follows it. Nothing is thrown: `place` says what went wrong.
 * @param {string} path @param {unknown} body @param {HTMLElement} place
 * @returns {Promise<any>} how it ended, or null if it was refused
 */
export async function launch(path, body, place) {
  place.textContent = "starting …";
  try {
    let { launch: started } = await postJson(path, body);
    while (started.state === "running") {
      show(place, started);
      await new Promise((resolve) => setTimeout(resolve, POLL_MS));
      const { launches } = await getJson("launches");
      started = launches.find((one) => one.launch === started.launch) ?? { ...started, state: "failed", told: "The dashboard was started again." };
    }
    show(place, started);
    return started;
  } catch (error) {
    place.textContent = error instanceof Error ? error.message : String(error);
    return null;
  }
}

function show(place, { state, command, told }) {
  place.textContent = [`${state}: ${command}`, told].filter(Boolean).join(" — ");
}

/** Sets up the form that starts a run, if the page has one. */
export function beginStart() {
  const form = find("#start-form");
  form?.addEventListener("submit", (event) => {
    event.preventDefault();
    const { recipe, task } = form.elements;
    launch("launches", { recipe: recipe.value, task: task.value.trim(), settings: settingsOf(form) }, find("#start-state"));
  });
}

/** The settings of the form: what is empty is left to the task, and a value is JSON if it reads as JSON. */
function settingsOf(form) {
  const named = ["base_model", "steps", "learning_rate", "batch_size", "group_size", "seed"].map((name) => form.elements[name]);
  const own = named.filter(({ value, dataset }) => value.trim() && [undefined, form.elements.recipe.value].includes(dataset.of));
  const lines = form.elements.more.value.split("\n").map((line) => line.trim()).filter(Boolean);
  const more = lines.map((line) => [line.split("=")[0].trim(), line.slice(line.indexOf("=") + 1).trim()]);
  return Object.fromEntries([...own.map(({ name, value }) => [name, value.trim()]), ...more].map(([name, text]) => [name, valueOf(text)]));
}

function valueOf(text) {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}
