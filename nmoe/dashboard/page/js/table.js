// Makes tables whose rows lead somewhere.

import { h } from "./dom.js";

/** `columns` are pairs of a heading and a function from a row to a text, number or element; `go` gives a row's link. */
export function table(columns, rows, go = null) {
  const head = h("thead", {}, h("tr", {}, ...columns.map(([name]) => h("th", { scope: "col" }, name))));
  const body = h("tbody", {}, ...rows.map((row) => lineOf(columns, row, go)));
  return h("div", { class: "scroll" }, h("table", { class: "rows" }, head, body));
}

export function lineOf(columns, row, go) {
  const cells = columns.map(([, value], number) => {
    const shown = value(row);
    const inside = shown instanceof Node ? shown : document.createTextNode(shown ?? "");
    const linked = number === 0 && go ? h("a", { href: go(row) }, inside) : inside;
    return h("td", { class: columns[number][2] ?? null }, linked);
  });
  const line = h("tr", { class: go ? "go" : null }, ...cells);
  if (go) line.addEventListener("click", (event) => event.target.closest("a, input, button") || (location.hash = go(row).slice(1)));
  return line;
}
