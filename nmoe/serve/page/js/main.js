// Puts the page together: holds the conversations, and does what its buttons and keys ask for.

import { ServerError, described, setKey } from "./api.js";
import { showChats } from "./chats.js";
import { $, h } from "./dom.js";
import { generate } from "./generate.js";
import { areOn, listen, switchOn } from "./keys.js";
import { MessageView } from "./message.js";
import { instead } from "./reply.js";
import { messagesOf, toolsOf } from "./request.js";
import { SettingsPanel } from "./settings.js";
import { PREFIX, download, fileOf, readFile, remove as forget, save, stored } from "./store.js";
import { themed } from "./theme.js";
import { add, children, newChat, pairs, path, sibling } from "./tree.js";

const SAVE_EVERY_MS = 1000;
const TITLE = 60;
const READ_OUT = 600; // characters of an answer that a screen reader is given at its end

let info = { model: "", models: [], defaults: {}, has_experts: false, reasoning: false };
let { chats, damaged } = stored();
let current = null;
let views = new Map();
const running = new Map(); // chat -> AbortController
const savedAt = new Map();

const panel = new SettingsPanel($("settings"), () => keep(current), () => showSettings(false));

// Conversations

function keep(chat) {
  if (!chats.includes(chat)) return;
  savedAt.set(chat, performance.now());
  if (!save(chat, chats)) notice("The browser's storage is full: export conversations, then delete some. The last changes are not stored.");
}

function touch(chat) {
  chat.updated = Date.now();
  if (!chats.includes(chat)) chats.unshift(chat);
  chats.sort((a, b) => b.updated - a.updated);
  keep(chat);
  listChats();
}

function open(chat) {
  current = chat;
  history.replaceState(null, "", `#${chat.id}`);
  $("title").value = chat.title;
  views = new Map();
  notice("");
  draw(true);
  listChats();
  showChatsPanel(false);
  panel.show(chat, info);
}

function startChat() {
  // Settings go along to the next chat; its text does not.
  open(newChat({ ...current?.settings }, current?.system ?? "", current?.tools ?? ""));
  $("draft").focus();
}

function deleteChat(chat) {
  running.get(chat)?.abort();
  chats = chats.filter((one) => one !== chat);
  forget(chat);
  if (chat === current) open(chats[0] ?? newChat());
  else listChats();
  say(`Deleted ${chat.title || "New chat"}`);
}

const listChats = () => showChats($("chat-list"), chats, current, { open, remove: deleteChat });

// Messages

function draw(toEnd = false) {
  const scroll = $("scroll");
  const atEnd = toEnd || scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 80;
  const shown = path(current);
  const elements = shown.map((node) => {
    if (!views.has(node.id)) views.set(node.id, new MessageView(node, actions));
    const view = views.get(node.id);
    const all = children(current, node.parent);
    view.update({ at: all.indexOf(node) + 1, of: all.length }, running.get(current)?.node === node);
    return view.element;
  });
  const list = $("messages");
  const same = elements.length === list.children.length && elements.every((element, at) => element === list.children[at]);
  if (!same) list.replaceChildren(...(elements.length ? elements : [h("p", { class: "empty faint" }, info.model ? `Say something to ${info.model}.` : "")]));
  const focused = document.activeElement;
  $("send").hidden = running.has(current);
  $("stop").hidden = !running.has(current);
  if (focused?.hidden) $("draft").focus();
  document.title = current.title ? `${current.title} – nmoe` : "nmoe";
  if (atEnd) scroll.scrollTop = scroll.scrollHeight;
}

async function answer(chat, node, kept = []) {
  const controller = new AbortController();
  controller.node = node;
  running.set(chat, controller);
  touch(chat);
  const redraw = () => chat === current && draw();
  let waiting = false;
  const grown = () => {
    if (performance.now() - (savedAt.get(chat) ?? 0) > SAVE_EVERY_MS) keep(chat);
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      redraw();
    });
  };
  if (chat === current) draw(true);
  say("The model answers.");
  const error = await generate(chat, node, { ...info, model: info.model }, kept, controller.signal, grown);
  running.delete(chat);
  if (!chats.includes(chat)) return; // it was deleted meanwhile
  touch(chat);
  redraw();
  if (error) say(`${error.message} ${error.advice ?? ""}`);
  else say(`${node.finish === "stopped" ? "Stopped" : "Answered"}: ${node.content.slice(0, READ_OUT)}`);
  if (error?.status === 401) askKey(error.message, () => actions.retry(node));
  else if (error instanceof ServerError && chat === current && panel.mark(error.param, error.message)) showSettings(true);
}

function ready() {
  if (running.has(current)) return false;
  try {
    toolsOf(current.tools);
    return true;
  } catch (error) {
    notice(error.message);
    showSettings(true);
    return false;
  }
}

function titleOf(text) {
  const line = text.trim().split("\n")[0];
  return line.length <= TITLE ? line : `${line.slice(0, TITLE).replace(/\s+\S*$/, "")} …`;
}

function send() {
  const draft = $("draft");
  if (!draft.value.trim() || !ready()) return;
  const last = path(current).at(-1);
  if (!current.title) current.title = titleOf(draft.value);
  $("title").value = current.title;
  const asked = add(current, last?.id ?? "", "user", { content: draft.value });
  draft.value = "";
  fit();
  notice("");
  answer(current, add(current, asked.id, "assistant"));
}

const actions = {
  /** Returns whether it was sent. */
  edit(node, content) {
    if (!ready()) return false;
    const { role, call, name } = node;
    const edited = add(current, node.parent, role, { content, ...(role === "tool" ? { call, name } : {}) });
    answer(current, add(current, edited.id, "assistant"));
    return true;
  },
  regenerate(node) {
    if (ready()) answer(current, add(current, node.parent, "assistant"));
  },
  retry(node) {
    if (ready()) answer(current, node);
  },
  resume(node) {
    if (ready()) answer(current, node, node.tokens);
  },
  instead(node, at, other) {
    if (!ready()) return;
    const kept = instead(node.tokens, at, other);
    const branch = add(current, node.parent, "assistant", { tokens: kept });
    answer(current, branch, kept);
    views.get(branch.id)?.toggleTokens();
    views.get(branch.id)?.element.focus();
  },
  branch(node, by) {
    const other = sibling(current, node, by);
    if (!other) return;
    current.chosen[node.parent] = other.id;
    keep(current);
    draw();
    const view = views.get(other.id);
    const arrow = [...view.element.querySelectorAll(".branches button:not(:disabled)")].at(by < 0 ? 0 : -1);
    (arrow ?? view.element).focus();
  },
  /** Whether a message's calls still want their answers. */
  open: (node) => !children(current, node.id).length && !running.has(current),
  answer(node, answers) {
    if (!ready()) return;
    let parent = node.id;
    node.calls.forEach((call, at) => (parent = add(current, parent, "tool", { content: answers[at], call: call.id, name: call.name }).id));
    answer(current, add(current, parent, "assistant"));
  },
};

const stop = () => running.get(current)?.abort();

// What is said of the page's state

function notice(text) {
  $("notice").textContent = text;
}

function say(text) {
  $("status").textContent = text;
}

// Panels and dialogs

function showSettings(shown = $("settings").hidden) {
  $("settings").hidden = !shown;
  $("open-settings").setAttribute("aria-expanded", String(shown));
  if (shown) $("settings").querySelector("textarea").focus();
  else $("open-settings").focus();
}

function showChatsPanel(shown = !$("chats").classList.contains("open")) {
  $("chats").classList.toggle("open", shown);
  if (shown) $("new-chat").focus();
}

function askKey(message, then) {
  $("key-said").textContent = message;
  $("key").value = "";
  $("key-use").onclick = () => {
    try {
      new Headers({ Authorization: `Bearer ${$("key").value}` });
    } catch {
      $("key-said").textContent = "A key has letters, digits and ASCII signs only.";
      return;
    }
    setKey($("key").value);
    $("key-dialog").close();
    describe().then(() => info.model && then());
  };
  if (!$("key-dialog").open) $("key-dialog").showModal();
}

async function describe() {
  try {
    info = await described();
    $("model").textContent = info.model;
    notice("");
    panel.show(current, info);
    draw();
  } catch (error) {
    if (error.status === 401) askKey(error.message, () => {});
    else notice(`${error.message} ${error.advice ?? ""}`);
  }
}

// Files

async function importFile(file) {
  try {
    const added = readFile(await file.text(), file.name, new Set(chats.map((chat) => chat.id)));
    chats.push(...added);
    for (const chat of added) keep(chat);
    chats.sort((a, b) => b.updated - a.updated);
    listChats();
    say(`Imported ${added.length} conversations`);
    if (added.length) open(added[0]);
  } catch (error) {
    notice(error.message);
  }
}

function exportPairs() {
  const records = chats.flatMap((chat) => pairs(chat, messagesOf));
  if (!records.length) return notice("There are no two answers to one message yet: regenerate one, and leave the better one shown.");
  download(records.map((record) => `${JSON.stringify(record)}\n`).join(""), "nmoe-pairs.jsonl", "application/jsonl");
}

// Keys

const focusedView = () => views.get(document.activeElement?.closest?.(".message")?.dataset.id);
const lastView = (role) => path(current).filter((node) => !role || node.role === role).map((node) => views.get(node.id)).at(-1);
const viewFor = (role) => (focusedView()?.node.role === role ? focusedView() : lastView(role));

function step(by) {
  const all = [...$("messages").querySelectorAll(".message")];
  const at = all.indexOf(document.activeElement?.closest?.(".message"));
  all[at < 0 ? (by < 0 ? all.length - 1 : 0) : Math.max(0, Math.min(at + by, all.length - 1))]?.focus();
}

function turnBranch(by) {
  const view = focusedView() ?? [...views.values()].filter((one) => one.element.isConnected && one.branches.of > 1).at(-1);
  if (view) actions.branch(view.node, by);
}

const shortcuts = [
  ["Enter", "sends the message; Shift+Enter begins a line", null],
  ["Escape", "stops the answer; closes what is open", null],
  ["/", "goes to the message field", () => $("draft").focus()],
  ["ArrowUp", "in the empty message field: edits your last message", null],
  ["j k", "goes to the next, the previous message", null],
  ["e", "edits the message, or your last one", () => viewFor("user")?.edit()],
  ["r", "answers again, as a branch", () => viewFor("assistant") && actions.regenerate(viewFor("assistant").node)],
  ["[ ]", "shows the previous, the next branch", null],
  ["t", "shows the answer's tokens, or its text; arrows move among tokens, Enter opens one", toggleTokens],
  ["n", "begins a chat", startChat],
  ["c", "goes to the conversations", () => { showChatsPanel(true); $("new-chat").focus(); }],
  ["s", "opens or closes the settings", () => showSettings()],
  ["d", "switches between light and dark", () => nextTheme()],
  ["?", "shows these keys", () => $("help").showModal()],
];
const single = [["j", "", () => step(1)], ["k", "", () => step(-1)], ["[", "", () => turnBranch(-1)], ["]", "", () => turnBranch(1)]];

function toggleTokens() {
  const view = viewFor("assistant");
  view?.toggleTokens();
  if (view?.asTokens) view.tokens.focus(0);
}

function escape() {
  if (running.has(current)) stop();
  else if ($("chats").classList.contains("open")) showChatsPanel(false);
  else if (!$("settings").hidden) showSettings(false);
}

// The field grows with its text.
function fit() {
  const draft = $("draft");
  draft.style.height = "auto";
  draft.style.height = `${Math.min(draft.scrollHeight + 2, window.innerHeight / 3)}px`;
}

const nextTheme = themed($("theme"));
listen([...single, ...shortcuts.filter(([, , act]) => act)], escape);
$("keys").tBodies[0].append(...shortcuts.map(([keys, does]) => h("tr", {}, h("td", {}, ...keys.split(" ").map((key) => h("kbd", {}, key))), h("td", {}, does))));
$("letters").checked = areOn();
$("letters").addEventListener("change", () => switchOn($("letters").checked));
const clicks = {
  "new-chat": startChat, send, stop, export: () => download(fileOf(chats), "nmoe-chats.json", "application/json"), "export-pairs": exportPairs,
  import: () => $("import-file").click(), "open-chats": () => showChatsPanel(), "close-chats": () => showChatsPanel(false),
  "open-settings": () => showSettings(), "open-help": () => $("help").showModal(), "close-help": () => $("help").close(), "key-cancel": () => $("key-dialog").close(),
};
for (const [id, act] of Object.entries(clicks)) $(id).addEventListener("click", act);
$("key").addEventListener("keydown", (event) => event.key === "Enter" && $("key-use").click());
$("import-file").addEventListener("change", ({ target }) => {
  if (target.files[0]) importFile(target.files[0]);
  target.value = "";
});
$("title").addEventListener("input", () => {
  current.title = $("title").value;
  keep(current);
  listChats();
});
$("draft").addEventListener("input", fit);
$("draft").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  } else if (event.key === "ArrowUp" && !$("draft").value) {
    event.preventDefault();
    lastView("user")?.edit();
  }
});
addEventListener("pagehide", () => [...running.keys()].forEach(keep));
addEventListener("storage", (event) => {
  // Another tab changed a conversation: this one takes it, unless it is at work on it.
  if (!event.key?.startsWith(PREFIX) || running.size) return;
  ({ chats } = stored());
  const again = chats.find((chat) => chat.id === current.id);
  if (again) open(again);
  else listChats();
});

const named = location.hash.slice(1);
open(chats.find((chat) => chat.id === named) ?? chats[0] ?? newChat());
describe().then(() => {
  if (damaged.length) notice(`Stored conversations that cannot be read were left as they are: ${damaged.join(", ")}`);
});
$("draft").focus();
