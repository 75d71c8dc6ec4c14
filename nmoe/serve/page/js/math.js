// LaTeX in markdown: finds it before markdown reads it, and typesets it once it is in the page.

const FORMS = [
  { level: "block", start: /\$\$|\\\[/, rule: /^(?:\$\$((?:[^$\\]|\\[^])+?)\$\$|\\\[([^]+?)\\\])(?=\s|$)/, display: true },
  { level: "inline", start: /\$\$|\\\[/, rule: /^(?:\$\$((?:[^$\\]|\\[^])+?)\$\$|\\\[([^]+?)\\\])/, display: true },
  // As pandoc reads it: no blank inside of the signs and no digit after them, so that prices stay prices.
  { level: "inline", start: /\$|\\\(/, rule: /^(?:\$(?!\s)((?:[^$\\\n]|\\[^\n])+?)(?<!\s)\$(?!\d)|\\\(([^]+?)\\\))/, display: false },
];

export const escaped = (text) => text.replace(/[&<>"']/g, (sign) => `&#${sign.charCodeAt(0)};`);

/** Extensions of marked that make <span data-tex> of LaTeX. */
export const extensions = FORMS.map(({ level, start, rule, display }, index) => ({
  name: `math${index}`,
  level,
  start: (source) => start.exec(source)?.index,
  tokenizer(source) {
    const found = rule.exec(source);
    return found ? { type: `math${index}`, raw: found[0], tex: (found[1] ?? found[2]).trim() } : undefined;
  },
  renderer: ({ tex, raw }) => `<span data-tex="${escaped(tex)}" data-display="${display}">${escaped(raw)}</span>${level === "block" ? "\n" : ""}`,
}));

let loading = null;

/** Typesets the formulas below an element. Those that KaTeX cannot read stay as they were written. */
export async function typeset(element) {
  const spans = [...element.querySelectorAll("span[data-tex]:not(.typeset)")];
  if (!spans.length) return;
  if (!globalThis.katex) await (loading ??= import("../vendored/katex.min.js"));
  for (const span of spans) {
    span.classList.add("typeset");
    const drawn = document.createElement("span");
    try {
      globalThis.katex.render(span.dataset.tex, drawn, {
        displayMode: span.dataset.display === "true", throwOnError: true, trust: false, strict: "ignore", maxSize: 20, maxExpand: 500,
      });
    } catch {
      span.classList.add("unread");
      continue;
    }
    if (span.dataset.display === "true") span.tabIndex = 0;
    span.replaceChildren(drawn);
  }
}
