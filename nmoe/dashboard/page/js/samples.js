// The samples of a run, filtered and sorted by the server.

import { ask } from "./ask.js";
import { button, h } from "./dom.js";
import { figure } from "./format.js";
import { keep, link } from "./route.js";
import { lineOf, table } from "./table.js";

const FIELDS = [
  ["text", "Text in it", ""], ["step_min", "Step from", "short"], ["step_max", "to", "short"], ["reward_min", "Reward from", "short"], ["reward_max", "to", "short"],
  ["tokens_min", "Tokens from", "short"], ["tokens_max", "to", "short"], ["version_min", "Version from", "short"], ["version_max", "to", "short"], ["problem", "Problem", ""],
];
const ORDERS = { newest: "newest step first", oldest: "oldest step first", reward: "highest reward first", "-reward": "lowest reward first", tokens: "longest first", "-tokens": "shortest first", problem: "by problem" };

export const COLUMNS = [
  ["sample", (row) => `step ${figure(row.step)} · ${row.number}`],
  ["problem", (row) => row.problem],
  ["reward", (row) => figure(row.reward), "n"],
  ["verdict", (row) => (row.failure === "ok" ? row.outcome : row.failure)],
  ["tokens", (row) => figure(row.tokens), "n"],
  ["version", (row) => (row.oldest === row.newest ? figure(row.newest) : `${row.oldest} to ${row.newest}`), "n"],
  ["not trained on", (row) => (row.left_out ?? "").replaceAll("_", " ")],
];

export async function samples(main, { runs, settings }) {
  const run = runs[0];
  const { totals } = await ask("run", { run });
  const wanted = { ...settings };
  const go = (row) => link([run], "sample", { step: row.step, line: row.line });
  const body = h("div", { id: "found" });
  const said = h("p", { class: "faint", id: "count", role: "status" });
  const more = button("More", () => load(true));
  let rest = null;
  let asked = 0;

  async function load(adding = false) {
    const number = ++asked;
    const params = { run, ...wanted, ...(adding ? rest : {}) };
    const found = await ask("samples", params);
    if (number !== asked) return;
    rest = found.more;
    more.hidden = !rest;
    more.textContent = rest?.before ? "Search on" : "More";
    if (!adding) body.replaceChildren(table(COLUMNS, [], go));
    const lines = body.querySelector("tbody");
    lines.append(...found.rows.map((row) => lineOf(COLUMNS, row, go)));
    const count = lines.children.length;
    const waiting = found.indexing ? `; ${figure(found.indexing)} steps are still being read` : "";
    said.textContent = (wanted.text ? (rest ? `${figure(count)} found back to step ${rest.before.split(":")[0]}` : `${figure(count)} found`) : `${found.counted ? figure(found.count) : "10,000 or more"} samples`) + waiting;
    // A rare text: the search goes on by itself until there is something to show.
    if (wanted.text && rest && count < 5) await load(true);
  }
  const change = (name, value) => {
    wanted[name] = value;
    keep(wanted);
    load().catch((error) => (said.textContent = error.message));
  };
  const inputs = FIELDS.map(([name, label, kind]) => {
    const field = h("input", { id: `filter-${name}`, class: kind || null, value: wanted[name] ?? "", autocomplete: "off", inputmode: kind ? "decimal" : null });
    field.addEventListener("change", () => change(name, field.value.trim()));
    return h("label", {}, label, field);
  });
  const select = (name, label, options) => {
    const field = h("select", { id: `filter-${name}` }, ...Object.entries(options).map(([value, text]) => h("option", { value, selected: value === (wanted[name] ?? "") }, text)));
    field.addEventListener("change", () => change(name, field.value));
    return h("label", {}, label, field);
  };
  const failures = Object.fromEntries([["", "any"], ...Object.keys(totals.failures).map((name) => [name, name])]);
  main.replaceChildren(
    h("div", { class: "controls" }, ...inputs,
      select("failure", "Failure", failures),
      select("outcome", "Verdict", { "": "any", correct: "correct", incorrect: "incorrect" }),
      select("left_out", "Not trained on", { "": "any", zero_variance: "equal rewards", outside_solve_rate: "outside solve_rate", surplus: "surplus", masked: "masked" }),
      select("wrong", "Rewarded", { "": "any", 1: "wrong, yet highly rewarded" }),
      select("order", "Order", ORDERS)),
    said, body, more,
  );
  await load();
}
