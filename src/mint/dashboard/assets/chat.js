// A conversation with one checkpoint: tokens appear as they arrive, and errors are shown as text. Knows the elements of
// the chat box by their ids; the conversation exists only in this page.

import { duration, el, find } from "./common.js";
import { appendAnswer, finishText, sample, waiting } from "./sampling.js";

/** @typedef {{role: "user" | "assistant", content: string}} Message */

const box = find("#chat");
const log = find("#chat-log");
const input = find("#chat-input");
const model = find("#chat-model");

/** @type {Message[]} */
let messages = [];
/** @type {AbortController | null} */
let asked = null;
/** Whether the model has no chat template, so that it gets plain text. */
let isPlain = false;

/** Opens the box with a checkpoint. @param {string} checkpoint */
export function chatWith(checkpoint) {
  model.value = checkpoint;
  box.scrollIntoView({ block: "nearest" });
  input.focus();
}

/** Sets up the chat box. */
export function beginChat() {
  find("#chat-form").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
  box.addEventListener("keydown", (event) => event.key === "Escape" && stop());
  find("#chat-stop").addEventListener("click", stop);
  find("#chat-clear").addEventListener("click", clear);
  model.addEventListener("change", () => (isPlain = false));
}

const stop = () => asked?.abort();

function clear() {
  stop();
  messages = [];
  isPlain = false;
  log.replaceChildren(el("p", { class: "muted" }, "A new conversation."));
  input.focus();
}

function send() {
  const content = input.value.trim();
  if (!content || asked) return;
  input.value = "";
  messages.push({ role: "user", content });
  const said = bubble("user", "you");
  appendAnswer(said.text, content);
  answer(said);
}

/** Requests the next message and shows it while it arrives. */
async function answer(said) {
  const conversation = messages;
  const reply = bubble("assistant", find("option:checked", model)?.textContent ?? model.value);
  const stopWaiting = waiting((text) => (reply.state.textContent = text));
  asked = new AbortController();
  const own = asked;
  show();
  let content = "";
  let finish = null;
  const began = performance.now();
  try {
    for await (const piece of sample(question(), own.signal)) {
      stopWaiting();
      content += piece.text;
      finish = piece.finish ?? finish;
      write(reply.text, piece.text);
      reply.state.textContent = duration((performance.now() - began) / 1000);
    }
    reply.state.textContent = `${finishText(finish)} · ${duration((performance.now() - began) / 1000)}`;
    if (!content) reply.text.append(el("span", { class: "muted" }, "(said nothing)"));
  } catch (error) {
    if (own.signal.aborted) reply.state.textContent = "stopped";
    else fail(reply, error);
  } finally {
    stopWaiting();
    if (asked === own) asked = null;
    show();
  }
  if (conversation !== messages) return;
  // An answer that never began is left out, and the question goes back to the input.
  if (content) messages.push({ role: "assistant", content });
  else if (finish === null) takeBack(said);
}

function question() {
  const system = find("#chat-system").value.trim();
  const sampling = {
    model: model.value,
    temperature: Number(find("#chat-temperature").value),
    max_tokens: Math.max(1, Math.trunc(Number(find("#chat-tokens").value)) || 1),
  };
  if (!isPlain) return { ...sampling, messages: [...(system ? [{ role: "system", content: system }] : []), ...messages] };
  return { ...sampling, prompt: [system, ...messages.map(({ content }) => content)].filter(Boolean).join("\n") };
}

function takeBack(said) {
  const last = messages.pop();
  said.state.textContent = "not part of the conversation";
  if (last && !input.value) input.value = last.content;
}

function fail(reply, error) {
  reply.state.textContent = "";
  reply.text.append(el("p", { class: "chat-error" }, error instanceof Error ? error.message : String(error)));
  if (error.code !== "no_template" || isPlain) return;
  const proceed = () => {
    isPlain = true;
    send();
  };
  reply.text.append(el("button", { type: "button", class: "button", onclick: proceed }, "Continue the plain text instead"));
}

function bubble(role, name) {
  find("#chat-empty")?.remove();
  const text = el("div", { class: "chat-text" });
  const state = el("span", { class: "muted small num" });
  log.append(el("article", { class: `chat-message chat-message--${role}` },
    el("header", {}, el("b", {}, name), " ", state), text));
  log.scrollTop = log.scrollHeight;
  return { text, state };
}

/** Adds new text; keeps the end in view if the reader is there. */
function write(place, text) {
  const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  appendAnswer(place, text);
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

function show() {
  const isBusy = asked !== null;
  log.setAttribute("aria-busy", String(isBusy));
  find("#chat-stop").hidden = !isBusy;
  find("#chat-send").hidden = isBusy;
}
