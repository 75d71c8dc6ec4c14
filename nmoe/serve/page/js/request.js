// The body of a request: what is sent for a conversation under its settings.

/** The settings of a chat: name in the request, label, kind, bounds. An empty one is left out, so that the server decides. */
export const SETTINGS = [
  ["temperature", "Temperature", "number", { min: 0, max: 2, step: 0.05 }],
  ["top_p", "Top-p", "number", { min: 0, max: 1, step: 0.01 }],
  ["top_k", "Top-k", "integer", { min: 0, step: 1 }],
  ["min_p", "Min-p", "number", { min: 0, max: 1, step: 0.01 }],
  ["max_tokens", "Most tokens", "integer", { min: 1, step: 1 }],
  ["presence_penalty", "Presence penalty", "number", { min: -2, max: 2, step: 0.1 }],
  ["frequency_penalty", "Frequency penalty", "number", { min: -2, max: 2, step: 0.1 }],
  ["seed", "Seed", "integer", { step: 1 }],
  ["alternatives", "Alternatives kept of a token", "integer", { min: 0, max: 20, step: 1 }],
  ["stop", "Stop text", "text", {}],
  ["reasoning_effort", "Reasoning effort", ["none", "low", "medium", "high"], {}],
  ["model", "Model", "model", {}],
];

const ALTERNATIVES = 8;
const OWN = ["alternatives"];

/** The tools of a chat. Throws an Error that says what is wrong. */
export function toolsOf(text) {
  if (!text.trim()) return [];
  let tools;
  try {
    tools = JSON.parse(text);
  } catch (error) {
    throw new Error(`The tools are not JSON: ${error.message}`);
  }
  if (!Array.isArray(tools)) throw new Error("The tools must be a list: [{\"type\": \"function\", \"function\": {\"name\": …}}]");
  const names = new Set();
  tools.forEach((tool, index) => {
    const wrong = (why) => new Error(`Tool ${index + 1}: ${why}`);
    const called = tool?.function;
    if (tool?.type !== "function" || typeof called !== "object" || called === null) {
      throw wrong("must be {\"type\": \"function\", \"function\": {\"name\": …, \"parameters\": …}}");
    }
    if (typeof called.name !== "string" || !/^[\w.-]{1,64}$/.test(called.name)) throw wrong("its name must be 1 to 64 letters, digits, _, . or -");
    if (names.has(called.name)) throw wrong(`the name ${called.name} is there twice`);
    names.add(called.name);
    const schema = called.parameters;
    if (schema !== undefined && (typeof schema !== "object" || schema === null || Array.isArray(schema) || (schema.type ?? "object") !== "object")) {
      throw wrong("its parameters must be the JSON schema of an object");
    }
  });
  return tools;
}

/** The messages of a path through the tree, in OpenAI's form. */
export function messagesOf(chat, nodes) {
  const system = chat.system.trim() ? [{ role: "system", content: chat.system }] : [];
  return [...system, ...nodes.map(messageOf)];
}

function messageOf(node) {
  if (node.role === "tool") return { role: "tool", content: node.content, tool_call_id: node.call, name: node.name };
  if (node.role === "user") return { role: "user", content: node.content };
  const calls = (node.calls ?? []).map(({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } }));
  return {
    role: "assistant",
    content: node.content,
    ...(node.reasoning ? { reasoning_content: node.reasoning } : {}),
    ...(calls.length ? { tool_calls: calls } : {}),
  };
}

/** The body for an answer to the last of `nodes`; `kept` are the tokens that it goes on from. */
export function bodyOf(chat, nodes, info, kept = []) {
  const set = Object.entries(chat.settings).filter(([name, value]) => !OWN.includes(name) && value !== "" && value !== null);
  const tools = toolsOf(chat.tools);
  const top = chat.settings.alternatives ?? ALTERNATIVES;
  return {
    model: info.model,
    messages: messagesOf(chat, nodes),
    ...Object.fromEntries(set),
    ...(tools.length ? { tools } : {}),
    stream: true,
    stream_options: { include_usage: true },
    return_token_ids: true,
    logprobs: true,
    top_logprobs: top,
    ...(info.has_experts ? { return_experts: true } : {}),
    ...(kept.length ? { continue_token_ids: kept.map(([id]) => id), echo: true } : {}),
  };
}
