// A chat is a tree of messages. Each message has its parent's id, "" at the top; `chosen` names the child that is shown.

export const newId = () => crypto.getRandomValues(new Uint32Array(3)).reduce((text, word) => text + word.toString(36), "m");

export function newChat(settings = {}, system = "", tools = "") {
  return { id: newId(), title: "", updated: Date.now(), system, settings, tools, nodes: {}, chosen: {} };
}

export const children = (chat, parent) => Object.values(chat.nodes).filter((node) => node.parent === parent);

/** The messages that are shown, the first one first; or those that lead to the message `last`. */
export function path(chat, last) {
  const found = [];
  if (last !== undefined) {
    for (let id = last; id; id = chat.nodes[id].parent) found.unshift(chat.nodes[id]);
    return found;
  }
  for (let id = chat.chosen[""]; id; id = chat.chosen[id]) found.push(chat.nodes[id]);
  return found;
}

/** Appends a message and shows it. */
export function add(chat, parent, role, more = {}) {
  const node = { id: newId(), parent, role, content: "", ...more };
  chat.nodes[node.id] = node;
  chat.chosen[parent] = node.id;
  return node;
}

/** The message `by` branches further on among its siblings, or undefined. */
export function sibling(chat, node, by) {
  const all = children(chat, node.parent);
  return all[all.indexOf(node) + by];
}

/** Pairs of answers to one prompt, as records of nmoe's preference training: the answer that is shown is the chosen one. */
export function pairs(chat, messagesOf) {
  const good = (node) => node.role === "assistant" && node.content && !node.calls?.length && !node.error;
  const said = (node) => [{ role: "assistant", content: node.content }];
  return Object.entries(chat.chosen).flatMap(([parent, id]) => {
    const chosen = chat.nodes[id];
    if (!parent || !good(chosen)) return [];
    const prompt = messagesOf(chat, path(chat, parent));
    const others = new Set(children(chat, parent).filter((node) => good(node) && node.content !== chosen.content).map((node) => node.content));
    return [...others].map((content) => ({ prompt, chosen: said(chosen), rejected: said({ content }) }));
  });
}
