// Asks the server, or, in an exported page, the answers that it carries.

import { carriedAnswer } from "./carried.js";

const KEY = "nmoe.dashboard.key";
const carried = document.getElementById("answers");
const answers = carried ? JSON.parse(carried.textContent) : null;

export const isExported = answers !== null;

export class KeyWanted extends Error {}

export const setKey = (key) => sessionStorage.setItem(KEY, key);

const plain = (params) => Object.entries(params).filter(([, value]) => value !== undefined && value !== null && value !== "");

/** Returns an answer of the server as an object. Throws an Error with a sentence for people. */
export async function ask(name, params = {}, post = false) {
  const query = new URLSearchParams(plain(params));
  query.sort();
  const address = `${name}?${query}`;
  if (answers) {
    const found = carriedAnswer(answers, name, query);
    if (found !== undefined) return found;
    throw new Error("This exported page does not hold that; it is in the dashboard of the runs.");
  }
  const key = sessionStorage.getItem(KEY);
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  let reply;
  try {
    reply = await fetch(`data/${address}`, { headers, method: post ? "POST" : "GET" });
  } catch {
    throw new Error("The server does not answer. What is shown stays.");
  }
  const body = await reply.json().catch(() => ({ error: `The server answered with status ${reply.status}.` }));
  if (reply.status === 401) throw new KeyWanted(body.error);
  if (!reply.ok) throw new Error(body.error);
  return body;
}
