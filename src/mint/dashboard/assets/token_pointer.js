// A small box with the facts about the token under the mouse or the keyboard cursor. Knows cards with their token blocks;
// knows nothing of requests or colours.

import { el } from "./common.js";
import { appendVisible, describe } from "./tokens.js";

const LONGEST_PIECE = 60;

/** Follows the mouse and the arrow keys over the tokens of all cards. */
export class TokenPointer {
  /**
   * @param {HTMLElement} box where the numbers are shown
   * @param {HTMLElement} area what holds the cards
   * @param {() => import("./rollout_card.js").Card[]} cards
   */
  constructor(box, area, cards) {
    this.box = box;
    this.cards = cards;
    this.current = null;
    area.addEventListener("mouseover", (event) => this.#at(event.target));
    area.addEventListener("mouseleave", () => this.hide());
    area.addEventListener("click", (event) => this.#at(event.target));
    area.addEventListener("keydown", (event) => this.#step(event));
    area.addEventListener("focusout", () => this.hide());
    addEventListener("scroll", () => this.hide(), { passive: true, capture: true });
  }

  hide() {
    this.box.hidden = true;
    this.current?.classList.remove("tok--current");
    this.current = null;
  }

  #at(target) {
    const element = target instanceof Element ? target.closest(".tok") : null;
    if (element === this.current) return;
    this.hide();
    const block = element && this.#blockOf(element);
    const span = block?.spanAt(element);
    if (!element || !block || !span) return;
    this.current = element;
    element.classList.add("tok--current");
    this.#show(describe(block.row, span), element);
  }

  #blockOf(element) {
    for (const card of this.cards()) {
      if (!card.element.contains(element)) continue;
      return card.blocks.find((block) => block.element.contains(element)) ?? null;
    }
    return null;
  }

  #step(event) {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const block = event.target instanceof Element ? event.target.closest(".tokens") : null;
    if (event.key === "Escape") this.hide();
    if (!by || !block) return;
    event.preventDefault();
    const all = [...block.querySelectorAll(".tok")];
    const at = this.current ? all.indexOf(this.current) : -1;
    const next = all[Math.max(0, Math.min(all.length - 1, at < 0 ? 0 : at + by))];
    next?.scrollIntoView({ block: "nearest" });
    this.#at(next);
  }

  #show(pairs, element) {
    const list = el("dl", {});
    for (const [name, value] of pairs) {
      const shown = el("dd", { class: "mono" });
      appendVisible(shown, value.length > LONGEST_PIECE ? `${value.slice(0, LONGEST_PIECE)}…` : value);
      list.append(el("dt", {}, name), shown);
    }
    this.box.replaceChildren(list);
    this.box.hidden = false;
    const place = element.getClientRects()[0];
    const { width, height } = this.box.getBoundingClientRect();
    const below = place.bottom + 6;
    const top = below + height < innerHeight ? below : place.top - height - 6;
    this.box.style.left = `${Math.max(4, Math.min(place.left, innerWidth - width - 8))}px`;
    this.box.style.top = `${Math.max(4, top)}px`;
  }
}
