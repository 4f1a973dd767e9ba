// Requests samples of a model from the server and yields the text while it arrives, by OpenAI's protocol at `/v1`. Knows no
// page; an error becomes a sentence with a remedy.

import { appendVisible } from "./tokens.js";

/** An error as a sentence. */
export class SamplingError extends Error {
  /** @param {string} message @param {string} [code] */
  constructor(message, code = "") {
    super(message);
    this.code = code;
  }
}

/**
 * @typedef {{model: string, temperature: number, max_tokens: number, seed?: number, n?: number, prompt?: string,
 *   messages?: {role: string, content: string}[]}} Question a prompt is continued; messages are answered
 * @typedef {{choice: number, text: string, finish: string | null}} Piece
 */

/**
 * Samples; yields the pieces of all choices in the order in which the server makes them.
 * @param {Question} question
 * @param {AbortSignal} signal ends it, here and on the server
 * @returns {AsyncGenerator<Piece>}
 * @throws {SamplingError}
 */
export async function* sample(question, signal) {
  const path = question.messages ? "/v1/chat/completions" : "/v1/completions";
  const answer = await ask(path, { ...question, stream: true }, signal);
  for await (const event of eventsOf(/** @type {ReadableStream<Uint8Array>} */ (answer.body), signal)) {
    if (event === "[DONE]") return;
    const body = JSON.parse(event);
    if (body.error) throw errorOf(0, body, question.model);
    for (const choice of body.choices ?? []) {
      const text = choice.text ?? choice.delta?.content ?? "";
      yield { choice: choice.index, text: text + callsIn(choice.delta), finish: choice.finish_reason ?? null };
    }
  }
  throw new SamplingError("The answer ended before it was complete. The server was stopped, or the connection was lost.");
}

async function ask(path, question, signal) {
  let answer;
  try {
    answer = await fetch(path, {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(question),
      signal,
    });
  } catch (error) {
    if (signal.aborted) throw error;
    throw new SamplingError("The server does not answer. Is it still running?");
  }
  if (!answer.ok) throw errorOf(answer.status, await answer.json().catch(() => ({})), question.model);
  return answer;
}

/** The data of each server-sent event. */
async function* eventsOf(stream, signal) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop() ?? "";
      for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6).trim();
    }
  } catch (error) {
    if (signal.aborted || error instanceof SamplingError) throw error;
    throw new SamplingError("The connection was lost while the answer came. Is the server still running?");
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Tool calls as text; they are not executed here. */
const callsIn = (delta) =>
  (delta?.tool_calls ?? []).map((call) => `\n→ ${call.function?.name}(${call.function?.arguments ?? ""})`).join("");

function errorOf(status, body, model) {
  // OpenAI's form, or that of these pages
  const { message, code } = typeof body.error === "object" ? body.error : { message: body.error, code: "" };
  if (code === "model_not_found") {
    return new SamplingError(
      `This server does not have ${model}. It was deleted, belongs to another owner, or lies in another server's data ` +
        "directory: open the dashboard of that server (mint serve), or start mint dashboard with its --data-dir.", code);
  }
  if (status === 401 || status === 403) return new SamplingError("The session has ended. Reload the page to sign in again.", "session");
  return new SamplingError(message ?? `The server answered ${status}. See its log.`, /chat template/.test(message ?? "") ? "no_template" : code ?? "");
}

/**
 * Adds text that a model wrote: keeps its lines, and shows invisible characters by name.
 * @param {HTMLElement} place @param {string} text
 */
export function appendAnswer(place, text) {
  for (const part of text.split(/([\n\t]+)/)) {
    if (/^[\n\t]/.test(part)) place.append(part);
    else appendVisible(place, part);
  }
}

/** What `finish_reason` says, in words. @param {string | null} finish */
export const finishText = (finish) =>
  ({ stop: "ended by itself", length: "cut off at the limit of tokens", tool_calls: "asks for a tool" })[finish ?? ""] ?? finish ?? "";

/**
 * Shows how long the first piece takes; the first request to a server may load the model.
 * @param {(text: string) => void} tell
 * @returns {() => void} ends it
 */
export function waiting(tell) {
  const began = performance.now();
  tell("sampling …");
  const timer = setInterval(() => {
    const seconds = Math.round((performance.now() - began) / 1000);
    tell(`waiting for the first token: loading the model, or in the queue … ${seconds} s`);
  }, 700);
  return () => clearInterval(timer);
}
