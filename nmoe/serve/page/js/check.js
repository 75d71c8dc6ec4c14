// Checks conversations that come from a file or from storage, so that the page never meets one that it did not write.

const isTable = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const isText = (value) => typeof value === "string";
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const isId = (value) => isText(value) && /^[a-z0-9]{1,64}$/.test(value);
const scored = (value) => Array.isArray(value) && isNumber(value[0]) && isText(value[1]) && isNumber(value[2]);
const isToken = (value) => scored(value) && Array.isArray(value[3]) && value[3].every(scored) && (value[4] == null || isRoutes(value[4]));
const isRoutes = (value) => Array.isArray(value) && value.every((layer) => Array.isArray(layer) && layer.every(isNumber));
const isCall = (value) => isTable(value) && [value.id, value.name, value.arguments].every(isText);
const listOf = (check) => (value) => Array.isArray(value) && value.every(check);
const isSetting = (value) => value === null || isText(value) || isNumber(value);

const CHAT = {
  id: [isId, "an id"],
  title: [isText, "a text"],
  updated: [isNumber, "a number"],
  system: [isText, "a text"],
  tools: [isText, "a text"],
  settings: [(value) => isTable(value) && Object.values(value).every(isSetting), "a table of texts and numbers"],
  nodes: [isTable, "a table"],
  chosen: [isTable, "a table"],
};
const NODE = {
  id: [isId, "an id"],
  parent: [(value) => value === "" || isId(value), "an id"],
  role: [(value) => ["user", "assistant", "tool"].includes(value), "user, assistant or tool"],
  content: [isText, "a text"],
};
const NODE_MAY = {
  reasoning: [isText, "a text"],
  calls: [listOf(isCall), "a list of calls"],
  tokens: [listOf(isToken), "a list of tokens"],
  finish: [isText, "a text"],
  reason: [isText, "a text"],
  usage: [(value) => listOf(isNumber)(value) && value.length === 2, "two numbers"],
  experts: [isNumber, "a number"],
  rate: [isNumber, "a number"],
  wait: [isNumber, "a number"],
  error: [(value) => isTable(value) && isText(value.message) && isText(value.advice), "an error"],
  model: [isText, "a text"],
  call: [isText, "a text"],
  name: [isText, "a text"],
};

const shown = (value) => JSON.stringify(value)?.slice(0, 60) ?? "nothing";

function checkFields(table, where, must, may = {}) {
  if (!isTable(table)) throw new Error(`${where} = ${shown(table)}: must be a table`);
  for (const [name, [check, kind]] of Object.entries(must)) {
    if (!check(table[name])) throw new Error(`${where}.${name} = ${shown(table[name])}: must be ${kind}`);
  }
  for (const [name, value] of Object.entries(table)) {
    if (name in must) continue;
    if (!Object.hasOwn(may, name)) throw new Error(`${where}.${name}: unknown; leave it out`);
    if (value !== null && value !== undefined && !may[name][0](value)) throw new Error(`${where}.${name} = ${shown(value)}: must be ${may[name][1]}`);
  }
}

/** Returns a copy of a chat without prototypes of its own. Throws an Error that says what is wrong. */
export function checkedChat(chat, where) {
  checkFields(chat, where, CHAT);
  for (const [id, node] of Object.entries(chat.nodes)) {
    checkFields(node, `${where}.nodes.${id}`, NODE, NODE_MAY);
    if (node.id !== id) throw new Error(`${where}.nodes.${id}.id = ${shown(node.id)}: must be ${id}`);
    const seen = new Set();
    for (let at = node; at.parent !== ""; at = chat.nodes[at.parent]) {
      if (!Object.hasOwn(chat.nodes, at.parent)) throw new Error(`${where}.nodes.${at.id}.parent = ${shown(at.parent)}: there is no such message`);
      if (seen.has(at.id)) throw new Error(`${where}.nodes.${id}.parent: is among the answers to it`);
      seen.add(at.id);
    }
  }
  for (const [parent, id] of Object.entries(chat.chosen)) {
    if (!isText(id) || !Object.hasOwn(chat.nodes, id) || chat.nodes[id].parent !== parent) {
      throw new Error(`${where}.chosen.${parent} = ${shown(id)}: is no answer to that message`);
    }
  }
  return chat;
}
