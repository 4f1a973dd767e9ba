// The form that filters rollouts: shows a filter, and reads one from its fields. Makes no requests and does not know the
// results.

import { el, find, findAll, searchKey, showError } from "./common.js";
import { noFilter, partsOf } from "./rollout_query.js";

/** @typedef {import("./rollout_query.js").Filter} Filter */

export class Finder {
  /**
   * @param {HTMLFormElement} form
   * @param {(filter: Filter) => void} choose called with every new choice
   * @param {() => Promise<string[]>} codes the codes of the run's findings; asked for when they are first needed
   */
  constructor(form, choose, codes) {
    this.form = form;
    this.choose = choose;
    this.codes = codes;
    this.more = find("details", form);
    /** @type {Filter} */
    this.filter = noFilter();
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      find("[name=text]", form).blur(); // the keys are the page's again
      choose(this.#read());
    });
    for (const box of this.#boxes()) {
      if (box.name !== "text") box.addEventListener("change", () => choose(this.#read()));
    }
    for (const button of findAll(".flag", form))
      button.addEventListener("click", () => this.#turn(button.dataset.flag));
    this.more.addEventListener("toggle", () => this.#loadCodes(), { once: true });
    searchKey(find("[name=text]", form));
  }

  /** Shows a filter. @param {Filter} filter */
  draw(filter) {
    this.filter = filter;
    if (filter.finding) this.#loadCodes();
    for (const box of this.#boxes()) {
      if (document.activeElement !== box) box.value = filter[box.name] ?? "";
    }
    for (const button of findAll(".flag", this.form)) this.#drawFlag(button);
    const order = find("[name=sort]", this.form).selectedOptions[0]?.text;
    const parts = partsOf(filter, order).map(({ label, without }) =>
      el(
        "button",
        { type: "button", class: "button part", onclick: () => this.choose(without), "aria-label": `Remove ${label}` },
        `${label} ×`,
      ),
    );
    const clear = el(
      "button",
      { type: "button", class: "button button--plain", onclick: () => this.choose(noFilter()) },
      "clear",
    );
    find(".finder-parts", this.form).replaceChildren(...parts, ...(parts.length ? [clear] : []));
  }

  /** @returns {HTMLInputElement[]} */
  #boxes() {
    return findAll("[name]", this.form);
  }

  #drawFlag(button) {
    const { flag, label } = button.dataset;
    const state = this.filter.flag.includes(flag) ? "with" : this.filter.without.includes(flag) ? "without" : "";
    button.dataset.state = state;
    button.textContent = `${{ with: "✓ ", without: "✕ " }[state] ?? ""}${label}`;
    button.setAttribute("aria-label", `${label}: ${state || "either"}`);
  }

  /** From either to with, to without, to either. @param {string} flag */
  #turn(flag) {
    const { flag: having, without } = this.filter;
    const drop = (flags) => flags.filter((other) => other !== flag);
    const isWith = having.includes(flag);
    const isWithout = without.includes(flag);
    this.choose({
      ...this.#read(),
      flag: isWith || isWithout ? drop(having) : [...having, flag],
      without: isWith ? [...without, flag] : drop(without),
    });
  }

  #read() {
    const filter = { ...this.filter };
    for (const box of this.#boxes()) filter[box.name] = box.value.trim();
    return filter;
  }

  async #loadCodes() {
    if (this.isLoaded) return;
    this.isLoaded = true;
    const select = find("[name=finding]", this.form);
    const codes = await this.codes().catch((error) => (showError(error), []));
    const all = [...new Set([...codes, this.filter.finding])].filter(Boolean).sort();
    select.append(...all.map((code) => el("option", { value: code }, code.replaceAll("_", " "))));
    select.value = this.filter.finding;
  }
}
