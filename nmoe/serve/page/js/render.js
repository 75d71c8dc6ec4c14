// Shows markdown. What a model wrote passes DOMPurify; HTML in it is shown as text, and pictures as links, so that nothing is loaded.

import "../vendored/purify.min.js";
import { Marked } from "../vendored/marked.esm.js";
import { button, h } from "./dom.js";
import { escaped, extensions, typeset } from "./math.js";

const purify = globalThis.DOMPurify;
const CLEAN = {
  ALLOWED_TAGS: [
    "p", "br", "hr", "h3", "h4", "h5", "h6", "ul", "ol", "li", "blockquote", "pre", "code", "em", "strong", "del", "a", "span",
    "table", "thead", "tbody", "tr", "th", "td",
  ],
  ALLOWED_ATTR: ["href", "title", "class", "start", "align", "data-tex", "data-display"],
  ALLOW_ARIA_ATTR: false,
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ADD_URI_SAFE_ATTR: ["align", "start"],
  RETURN_DOM_FRAGMENT: true,
};
const LONGEST = 200_000;

const marked = new Marked({
  gfm: true,
  breaks: true,
  extensions,
  renderer: {
    html: ({ text }) => escaped(text),
    heading({ tokens, depth }) {
      const level = Math.min(depth + 2, 6);
      return `<h${level}>${this.parser.parseInline(tokens)}</h${level}>\n`;
    },
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});

/** Fills an element with rendered markdown. */
export function render(element, text) {
  let fragment;
  try {
    if (text.length > LONGEST) throw new RangeError("too long to be parsed at each change");
    fragment = purify.sanitize(marked.parse(text), CLEAN);
  } catch {
    element.replaceChildren(h("pre", {}, text));
    return;
  }
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer";
  }
  fragment.querySelectorAll("pre").forEach(asCodeBlock);
  for (const table of fragment.querySelectorAll("table")) table.replaceWith(h("div", { class: "wide", tabindex: "0", role: "group", "aria-label": "Table" }, table.cloneNode(true)));
  element.replaceChildren(fragment);
  typeset(element);
}

function asCodeBlock(pre) {
  const code = pre.querySelector("code");
  const language = /language-([\w+#.-]+)/.exec(code?.className ?? "")?.[1] ?? "";
  const copy = button("Copy", async () => {
    await copied(pre.textContent);
    copy.textContent = "Copied";
    setTimeout(() => (copy.textContent = "Copy"), 1500);
  }, { class: "quiet", "aria-label": "Copy code" });
  pre.tabIndex = 0;
  const block = h("div", { class: "code" }, h("div", { class: "code-head" }, h("span", {}, language), copy));
  pre.replaceWith(block);
  block.append(pre);
}

/** Puts a text on the clipboard, also where the page has no secure origin. */
export async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = h("textarea", { class: "hidden" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}
