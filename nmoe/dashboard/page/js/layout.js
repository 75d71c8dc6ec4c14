// Lays the text of a sample out as messages: reasoning, answers and calls, in Harmony, in chat formats, or as plain text.

import { h } from "./dom.js";

const HARMONY = /(?:<\|start\|>([^<]*))?<\|channel\|>([^<]*?)(?:<\|constrain\|>([^<]*))?<\|message\|>([^]*?)(<\|end\|>|<\|return\|>|<\|call\|>|(?=<\|start\|>)|$)/g;
const CHAT = /<think>([^]*?)(?:<\/think>|$)|<tool_call>([^]*?)(?:<\/tool_call>|$)/g;

/** Returns blocks {kind, title, text}. All of the text is in them. */
export function blocks(text) {
  if (text.includes("<|message|>")) return split(text, HARMONY, ([, role, channel, kind, content, end]) => {
    const call = end === "<|call|>" || channel.includes("to=");
    return { kind: call ? "call" : channel.trim().split(" ")[0], title: [role, channel, kind, end].filter(Boolean).join(" ").trim(), text: content };
  });
  if (/<think>|<tool_call>/.test(text)) return split(text, CHAT, ([, thought, call]) => (thought === undefined ? { kind: "call", title: "tool call", text: call } : { kind: "analysis", title: "reasoning", text: thought }));
  return [{ kind: "final", title: "", text }];
}

function split(text, pattern, made) {
  const found = [];
  let at = 0;
  for (const match of text.matchAll(pattern)) {
    if (!match[0]) continue;
    if (match.index > at) found.push({ kind: "between", title: "", text: text.slice(at, match.index) });
    found.push(made(match));
    at = match.index + match[0].length;
  }
  if (at < text.length) found.push({ kind: "between", title: "", text: text.slice(at) });
  return found.filter((block) => block.title || block.text.trim());
}

export const shown = (text) => h("div", {}, ...blocks(text).map((block) =>
  h("div", { class: `block ${/^\w+$/.test(block.kind) ? block.kind : "between"}` }, block.title ? h("div", { class: "kind" }, block.title) : null, h("pre", { class: "text" }, block.text))));
