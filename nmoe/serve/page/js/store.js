// Keeps conversations in the browser's localStorage, each under its own key, and writes and reads files of them.

import { checkedChat } from "./check.js";
import { newId } from "./tree.js";

export const PREFIX = "nmoe.chat.";
const FORMAT = "nmoe-chats";

/** All stored chats, the newest first, and the keys of entries that cannot be read (which are left as they are). */
export function stored() {
  const chats = [];
  const damaged = [];
  for (const key of Object.keys(localStorage).filter((name) => name.startsWith(PREFIX))) {
    try {
      chats.push(checkedChat(JSON.parse(localStorage.getItem(key)), key));
    } catch {
      damaged.push(key);
    }
  }
  return { chats: chats.sort((a, b) => b.updated - a.updated), damaged };
}

const withoutExperts = (node) => node.tokens?.forEach((token) => (token[4] = null));
const withoutTokens = (node) => delete node.tokens;

/** Stores a chat. Where there is no room, experts and then tokens are given up, of the oldest of `chats` first; false if that is not
 * enough. */
export function save(chat, chats) {
  const write = (one) => localStorage.setItem(PREFIX + one.id, JSON.stringify(one));
  const byAge = [...chats.filter((one) => one !== chat).sort((a, b) => a.updated - b.updated), chat];
  const ways = [withoutExperts, withoutTokens].flatMap((lighten) => byAge.map((oldest) => [oldest, lighten]));
  for (const [oldest, lighten] of [[], ...ways]) {
    try {
      if (oldest) {
        Object.values(oldest.nodes).forEach(lighten);
        write(oldest);
      }
      write(chat);
      return true;
    } catch (error) {
      if (error.name !== "QuotaExceededError") throw error;
    }
  }
  return false;
}

export const remove = (chat) => localStorage.removeItem(PREFIX + chat.id);

export const fileOf = (chats) => JSON.stringify({ format: FORMAT, version: 1, chats }, null, 1);

/** Reads a file of chats; a chat whose id is in `taken` gets another. Throws an Error that says what is wrong. */
export function readFile(text, name, taken) {
  let file;
  try {
    file = JSON.parse(text);
  } catch (error) {
    throw new Error(`${name} is not JSON: ${error.message}`);
  }
  if (file?.format !== FORMAT || file.version !== 1 || !Array.isArray(file.chats)) {
    throw new Error(`${name} is no file that this page exported: it needs "format": "${FORMAT}", "version": 1 and "chats"`);
  }
  return file.chats.map((chat, index) => {
    const read = checkedChat(chat, `${name}: chats[${index}]`);
    if (taken.has(read.id)) read.id = newId();
    taken.add(read.id);
    return read;
  });
}

/** Has the browser save a text as a file. */
export function download(text, name, type) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
