// Requests to the server that sent this page. Every failure is a ServerError, with the server's own words.

import { events } from "./sse.js";

const KEY = "nmoe.key";

export class ServerError extends Error {
  constructor(message, { status = 0, param = null, retryAfter = null } = {}) {
    super(message);
    this.status = status;
    this.param = param;
    this.retryAfter = retryAfter;
  }

  /** What the reader of the message can do. */
  get advice() {
    if (this.status === 0) return "Look whether `nmoe serve` still runs, then try again. The answer so far is kept.";
    if (this.status === 401) return "Enter the server's key.";
    if (this.status === 404) return "Choose another model in the settings.";
    if (this.status === 413) return "Shorten the message, or start a new chat.";
    if (this.status === 429) return `The server is busy: try again${this.retryAfter ? ` in ${this.retryAfter} s` : ""}.`;
    if (this.status < 500) return this.param ? `Change ${this.param} and try again.` : "Change the request and try again.";
    return "Try again; the server's own output says more.";
  }
}

export const setKey = (key) => sessionStorage.setItem(KEY, key);

async function fetched(path, options) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...(options.body ? { "Content-Type": "application/json" } : {}), ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  let reply;
  try {
    reply = await fetch(new URL(path, document.baseURI), { ...options, headers, cache: "no-store", redirect: "error" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(error instanceof TypeError && !error.message.includes("header") ? "The server cannot be reached." : error.message);
  }
  if (reply.ok) return reply;
  let said = null;
  try {
    said = (await reply.json()).error;
  } catch {
    // Not in OpenAI's form: the status has to do.
  }
  const message = typeof said?.message === "string" ? said.message : `The server answered ${reply.status} ${reply.statusText}.`;
  const param = typeof said?.param === "string" ? said.param : null;
  throw new ServerError(message, { status: reply.status, param, retryAfter: reply.headers.get("Retry-After") });
}

/** What the server says of its model, and the names of its models. */
export async function described() {
  const [about, models] = await Promise.all([fetched("nmoe/page", {}), fetched("v1/models", {})]);
  return { ...(await about.json()), models: (await models.json()).data.map((one) => one.id) };
}

/** Yields the chunks of a chat completion. */
export async function* chat(body, signal) {
  const reply = await fetched("v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal });
  try {
    for await (const data of events(reply.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ServerError(String(chunk.error.message), { status: 500 });
      yield chunk;
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ServerError) throw error;
    throw new ServerError("The connection to the server broke off.");
  }
  throw new ServerError("The connection to the server broke off.");
}
