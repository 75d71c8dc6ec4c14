// One sample: why it has its reward, its messages, its tokens, and the other samples of its prompt beside it.

import { ask, isExported } from "./ask.js";
import { button, h } from "./dom.js";
import { figure } from "./format.js";
import { shown } from "./layout.js";
import { link } from "./route.js";
import { COLUMNS } from "./samples.js";
import { table } from "./table.js";
import { Tokens } from "./tokens.js";

const BESIDE = 8;

export async function sample(main, { runs, settings }) {
  const run = runs[0];
  const { step, line } = settings;
  const about = await ask("sample", { run, step, line });
  const tokens = new Tokens(run, about, settings);
  const beside = h("div");
  const others = about.siblings.filter((row) => row.line !== about.line);
  const compare = button(`The ${about.siblings.length} samples of this prompt side by side`, () => sideBySide(run, about, beside), { id: "side-by-side" });
  const more = button("More of the text", async () => {
    const next = await ask("sample", { run, step, line, first: about.text.length });
    about.text += next.text;
    text.replaceChildren(shown(about.text));
    more.hidden = about.text.length >= about.text_length;
  });
  more.hidden = about.text.length >= about.text_length;
  const text = h("div", { id: "messages" }, shown(about.text));
  const moreSaid = about.text.length < about.text_length ? h("p", { class: "faint" }, `The first ${figure(about.text.length)} of ${figure(about.text_length)} characters.`) : null;
  main.replaceChildren(
    h("section", {}, h("h2", {}, `Step ${figure(about.step)}, sample ${about.index} of ${about.problem}`), ...why(run, about)),
    h("section", {}, h("h2", {}, "Asked"), ...(about.history ?? []).map((message) => h("div", { class: "block" }, h("div", { class: "kind" }, message.role), h("pre", { class: "text" }, message.content))), h("pre", { class: "text" }, about.question ?? "")),
    h("section", {}, h("h2", {}, "Written"), moreSaid, text, more, ...tools(about)),
    h("section", {}, h("h2", {}, "Tokens"), tokens.element),
    h("section", {}, others.length && !isExported ? compare : null, beside, table(COLUMNS, about.siblings, (row) => link([run], "sample", { step: row.step, line: row.line }))),
  );
  await tokens.load(Number(settings.first ?? 0));
  const at = about.siblings.findIndex((row) => row.line === about.line);
  const to = (by) => about.siblings[at + by] && (location.hash = link([run], "sample", { step, line: about.siblings[at + by].line }).slice(1));
  return { next: () => to(1), previous: () => to(-1) };
}

function why(run, about) {
  const rows = Object.keys({ ...about.weights, ...about.components }).map((name) => ({ name, value: about.components?.[name], weight: about.weights?.[name] }));
  const parts = [table([["reward from", (one) => one.name], ["value", (one) => figure(one.value), "n"], ["weight", (one) => figure(one.weight), "n"], ["adds", (one) => figure((one.value ?? 0) * (one.weight ?? 0)), "n"]], rows)];
  const verdict = about.verdict;
  const said = [`reward ${figure(about.reward)}`];
  if (about.failure !== "ok") said.push(about.failure);
  if (verdict) said.push(`${verdict.outcome} (${verdict.layer}): ${verdict.reason}`);
  else if (about.answer === null) said.push("no answer found");
  if (about.reason) said.push(about.reason);
  if (about.left_out) said.push(`not trained on: ${about.left_out.replaceAll("_", " ")}`);
  parts.unshift(h("p", { id: "verdict", class: verdict ? (verdict.outcome === "correct" ? "right" : "wrong") : null }, said.join("; ")));
  parts.push(h("div", { class: "pair", id: "answers-beside" },
    h("div", {}, h("h3", {}, "Extracted answer"), h("pre", { class: "text" }, about.answer ?? "none")),
    h("div", {}, h("h3", {}, "Right answer"), h("pre", { class: "text" }, about.gold ?? ""))));
  parts.push(h("p", {}, h("a", { href: link([run], "samples", { problem: about.problem }) }, "All samples of this problem"), " · ", h("a", { href: link([run], "step", { step: about.step }) }, `What changed at step ${about.step}`)));
  return parts;
}

function tools(about) {
  return (about.tool_events ?? []).map((event) => h("div", { class: "block tool" },
    h("div", { class: "kind" }, `${event.name}, call ${event.call_id}: ${event.failure}, ${figure(event.wall_s)} s`),
    h("pre", { class: "text" }, event.arguments), h("pre", { class: "text" }, event.output)));
}

async function sideBySide(run, about, place) {
  const rows = about.siblings.slice(0, BESIDE);
  const found = await Promise.all(rows.map((row) => ask("sample", { run, step: row.step, line: row.line })));
  place.replaceChildren(h("div", { class: "side", tabindex: "0", role: "group", "aria-label": "The samples of this prompt" }, ...found.map((one) =>
    h("article", {}, h("h3", {}, `sample ${one.index}: reward ${figure(one.reward)}`), h("p", {}, one.verdict?.outcome ?? one.failure, ", answer ", h("code", {}, one.answer ?? "none")), shown(one.text.slice(0, 4000))))));
}
