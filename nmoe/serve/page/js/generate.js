// Runs one answer: sends the request, and adds what comes to its message until it ends, is stopped or fails.

import { chat as stream } from "./api.js";
import { Reply } from "./reply.js";
import { bodyOf } from "./request.js";
import { path } from "./tree.js";

/** `grown` is called at each chunk. Resolves to null, or to the ServerError that ended it. */
export async function generate(chat, node, info, kept, signal, grown) {
  const reply = new Reply(node, kept);
  node.error = null;
  try {
    const body = bodyOf(chat, path(chat, node.parent), info, kept);
    for await (const chunk of stream(body, signal)) {
      reply.add(chunk);
      grown();
    }
    node.calls?.forEach((call, at) => (call.id ||= `call_${node.id}_${at}`));
    return null;
  } catch (error) {
    if (error.name === "AbortError") {
      node.finish = "stopped";
      return null;
    }
    node.error = { message: error.message, advice: error.advice ?? "Look at the settings." };
    return error;
  }
}
