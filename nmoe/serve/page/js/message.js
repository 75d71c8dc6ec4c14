// Shows one message: its text or its tokens, its reasoning and calls, and what can be done with it.

import { button, h } from "./dom.js";
import { copied, render } from "./render.js";
import { TokenView } from "./tokens.js";

const NAMES = { user: "You", assistant: "Model", tool: "Tool" };
const FINISHES = { length: "cut off at the limit", stopped: "stopped", tool_calls: "calls a tool" };

export class MessageView {
  /** `actions`: edit, regenerate, resume, instead, branch, answer, retry; each takes the message. */
  constructor(node, actions) {
    this.node = node;
    this.actions = actions;
    this.asTokens = false;
    this.drawnAt = this.cost = 0;
    this.body = h("div", { class: "body" });
    this.tools = h("div", { class: "tools" });
    this.element = h("article", { class: `message ${node.role}`, tabindex: "-1", "data-id": node.id, "aria-label": NAMES[node.role] });
    this.thought = h("pre", { class: "thought" });
    this.fold = h("details", { class: "reasoning", hidden: true }, h("summary", {}, "Reasoning"), this.thought);
    this.calls = h("div", { class: "calls" });
    this.trouble = h("div", { class: "trouble", hidden: true });
    this.tokens = new TokenView((at, other) => actions.instead(node, at, other));
    this.element.append(h("div", { class: "who" }, node.role === "tool" ? `Tool ${node.name}` : NAMES[node.role]), this.fold, this.body, this.calls, this.trouble, this.tools);
  }

  /** Draws what changed. While a message grows, its text is drawn again at most a fifth of the time. */
  update(branches, growing) {
    this.growing = growing;
    this.element.setAttribute("aria-busy", String(growing));
    const now = performance.now();
    if (growing && now - this.drawnAt < 4 * this.cost) {
      clearTimeout(this.later);
      this.later = setTimeout(() => this.update(branches, this.growing), 4 * this.cost);
      return;
    }
    clearTimeout(this.later);
    this.#text();
    this.#reasoning();
    this.#calls();
    this.#trouble();
    this.#tools(branches);
    this.drawnAt = performance.now();
    this.cost = this.drawnAt - now;
  }

  toggleTokens() {
    if (!this.node.tokens?.length) return;
    this.asTokens = !this.asTokens;
    this.toolsFor = null;
    this.update(this.branches, this.growing);
  }

  #text() {
    const { node, body } = this;
    if (this.asTokens && node.tokens?.length) {
      this.tokens.update(node.tokens, node.experts);
      if (body.firstChild !== this.tokens.element) body.replaceChildren(this.tokens.element);
      this.text = null;
    } else if (this.text !== node.content) {
      this.tokens.close();
      this.text = node.content;
      if (node.role === "assistant") render(body, node.content);
      else body.replaceChildren(h("div", { class: "plain" }, node.content));
    }
    body.classList.toggle("waiting", Boolean(this.growing) && !node.content && !node.reasoning && !node.calls?.length);
  }

  #reasoning() {
    const { reasoning = "", content } = this.node;
    this.fold.hidden = !reasoning || this.asTokens;
    if (this.thought.textContent !== reasoning) this.thought.textContent = reasoning;
    this.fold.firstChild.textContent = this.growing && !content ? "Reasoning …" : `Reasoning, ${reasoning.trim().split(/\s+/).length} words`;
  }

  #calls() {
    const { calls = [] } = this.node;
    const wanted = JSON.stringify([calls, this.growing, this.actions.open(this.node)]);
    if (wanted === this.callsFor) return;
    this.callsFor = wanted;
    const open = !this.growing && calls.length && this.actions.open(this.node);
    const answers = calls.map(() => h("textarea", { rows: "2" }));
    this.calls.replaceChildren(
      ...calls.map((call, at) => h("section", { class: "call", "aria-label": `Call of ${call.name}` },
        h("div", { class: "call-head" }, "calls ", h("code", {}, call.name)),
        h("pre", { tabindex: "0" }, indented(call.arguments)),
        open ? h("label", {}, `Answer of ${call.name}`, answers[at]) : null)),
      ...(open ? [button(calls.length > 1 ? "Send the answers" : "Send the answer", () => this.actions.answer(this.node, answers.map((area) => area.value)), { class: "strong" })] : []),
    );
  }

  #trouble() {
    const { error } = this.node;
    this.trouble.hidden = !error;
    if (!error) return this.trouble.replaceChildren();
    const again = this.node.tokens?.length
      ? [button("Go on", () => this.actions.resume(this.node)), button("Try again", () => this.actions.regenerate(this.node))]
      : [button("Try again", () => this.actions.retry(this.node))];
    this.trouble.replaceChildren(h("p", { class: "error" }, error.message), h("p", { class: "faint" }, error.advice), h("div", { class: "row" }, ...again));
  }

  #tools(branches) {
    this.branches = branches;
    const { node, actions } = this;
    const wanted = JSON.stringify([branches, this.growing, this.asTokens, node.usage, node.rate, node.finish, node.tokens?.length]);
    if (wanted === this.toolsFor) return;
    this.toolsFor = wanted;
    const parts = [];
    const focused = this.tools.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") ?? document.activeElement.textContent : null;
    if (branches.of > 1) {
      parts.push(h("span", { class: "branches", role: "group", "aria-label": "Branches" },
        button("‹", () => actions.branch(node, -1), { class: "quiet", disabled: branches.at === 1, "aria-label": "Previous branch" }),
        h("span", { class: "number" }, `${branches.at} / ${branches.of}`),
        button("›", () => actions.branch(node, 1), { class: "quiet", disabled: branches.at === branches.of, "aria-label": "Next branch" })));
    }
    if (!this.growing) {
      if (node.role !== "assistant") parts.push(button("Edit", () => this.edit(), { class: "quiet" }));
      else parts.push(button("Regenerate", () => actions.regenerate(node), { class: "quiet" }));
      // Without a reason it has no end: the page was left while it came.
      if (["stopped", "length", null, undefined].includes(node.finish) && node.tokens?.length && !node.error) parts.push(button("Go on", () => actions.resume(node), { class: "quiet" }));
      parts.push(button("Copy", () => copied(node.content), { class: "quiet" }));
    }
    if (node.tokens?.length) parts.push(button("Tokens", () => this.toggleTokens(), { class: "quiet", "aria-pressed": String(this.asTokens) }));
    if (node.role === "assistant") parts.push(h("span", { class: "counts faint" }, counts(node)));
    this.tools.replaceChildren(...parts);
    if (focused) [...this.tools.querySelectorAll("button")].find((one) => (one.getAttribute("aria-label") ?? one.textContent) === focused)?.focus();
  }

  /** Replaces the text by a field; what is sent becomes a branch. */
  edit() {
    if (this.body.querySelector("textarea")) return;
    const area = h("textarea", { "aria-label": "Edited message", rows: String(Math.min(12, this.node.content.split("\n").length + 1)) });
    area.value = this.node.content;
    const restore = () => {
      this.text = null;
      this.#text();
    };
    const back = () => {
      restore();
      this.element.focus();
    };
    const send = () => this.actions.edit(this.node, area.value) && restore();
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") back();
      else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send();
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    this.body.replaceChildren(area, h("div", { class: "row" }, button("Send as a branch", send, { class: "strong" }), button("Cancel", back)));
    area.focus();
  }
}

function counts(node) {
  const sampled = node.tokens?.length || node.usage?.[1] || 0;
  const parts = [];
  if (sampled) parts.push(`${sampled} token${sampled === 1 ? "" : "s"}`);
  if (node.rate) parts.push(`${node.rate.toFixed(1)} tokens/s`);
  if (node.usage) parts.push(`prompt ${node.usage[0]}`);
  if (node.reason) parts.push(`cut off by the server: ${node.reason}`);
  else if (FINISHES[node.finish]) parts.push(FINISHES[node.finish]);
  return parts.join(" · ");
}

function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
