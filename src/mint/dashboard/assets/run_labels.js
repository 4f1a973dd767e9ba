// What a reader changes in one run, on its page: title, tags, note and archive; its end, its
// continuation, and its deletion.

import { el, find, postJson, runPath, showError } from "./common.js";
import { launch } from "./launches.js";

/** Sets up the form. @param {string} run */
export function beginLabels(run) {
  const form = find("#labels-form");
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const { title, tags, note, is_archived: archived } = form.elements;
    const given = { title: title.value, tags: tags.value.split(",").map((tag) => tag.trim()).filter(Boolean), note: note.value, is_archived: archived.checked };
    find("#labels-state").textContent = "";
    try {
      const { summary } = await postJson(runPath(run, "labels"), given);
      show(summary);
      find("#labels-state").textContent = "saved";
    } catch (error) {
      showError(error);
    }
  });
  find("#stop-run").addEventListener("click", async () => {
    try {
      const { summary } = await postJson(runPath(run, "stop"), {});
      const notice = find(".headline [data-cell=notice]");
      notice.textContent = summary.notice;
      notice.hidden = false;
    } catch (error) {
      showError(error);
    }
  });
  find("#resume-run")?.addEventListener("click", () => launch(runPath(run, "resume"), {}, find("#resume-state")));
  find("#delete-run").addEventListener("click", async () => {
    try {
      const { entry } = await postJson(runPath(run, "delete"), {});
      location.assign(`/?${new URLSearchParams({ deleted: entry })}`);
    } catch (error) {
      showError(error);
    }
  });
}

/** @param {{title: string, tags: string[]}} summary */
function show({ title, tags }) {
  find("#labels [data-cell=labels]").replaceChildren(title ? el("bdi", { class: "muted" }, title) : "",
    ...tags.flatMap((tag) => [" ", el("span", { class: "tag" }, el("bdi", {}, tag))]));
}
