// What stands out in a run, its evaluations, and what it is.

import { ask } from "./ask.js";
import { h } from "./dom.js";
import { figure, share } from "./format.js";
import { link } from "./route.js";
import { table } from "./table.js";

export async function overview(main, { runs }) {
  let before = "";
  async function update() {
    const found = await Promise.all(runs.map((name) => ask("run", { run: name })));
    // Drawn anew only if something changed, so that a link under the pointer stays.
    if (JSON.stringify(found) !== before) main.replaceChildren(...found.flatMap(one));
    before = JSON.stringify(found);
    return found.some((run) => run.status === "running");
  }
  await update();
  return { update };
}

function one(run) {
  const findings = run.findings.map((found) =>
    h("li", {}, h("a", { href: link([run.name], found.view, { step: found.step, ...found.query }) }, found.text)));
  const samples = Object.entries(run.totals.failures).map(([name, count]) => `${figure(count)} ${name}`).join(", ");
  const about = [
    ["status", run.status], ["step", `${figure(run.step)}${run.steps ? ` of ${figure(run.steps)}` : ""}`], ["command", run.command],
    ["folder", run.path], ["started (UTC)", run.started],
    ["samples", run.totals.samples ? `${figure(run.totals.samples)} of ${figure(run.totals.steps)} steps: ${samples}` : "none recorded"],
  ];
  const parts = [h("section", {}, h("h2", {}, run.name), table([["", ([name]) => name], ["", ([, value]) => value]], about.filter(([, value]) => value)))];
  if (run.fault) parts.push(h("section", {}, h("p", { class: "error" }, run.fault)));
  if (run.status === "deleted") parts.push(h("section", {}, h("p", { class: "error" }, "The run's folder was deleted. What was read before is shown.")));
  parts.push(h("section", { id: "findings" }, h("h2", {}, "What stands out"), findings.length ? h("ul", { class: "findings" }, ...findings) : h("p", {}, "Nothing so far.")));
  if (run.indexing) parts.push(h("p", { class: "faint" }, `The samples of ${figure(run.indexing)} steps are still being read.`));
  if (run.evaluations.length) parts.push(h("section", {}, h("h2", {}, "Evaluations"), evaluations(run)));
  if (run.torn.length) parts.push(h("section", { id: "torn" }, h("h2", {}, "Lines that cannot be read"), h("p", {}, "They are left out; the others are shown."), h("ul", {}, ...run.torn.map((place) => h("li", {}, place)))));
  return parts;
}

function evaluations(run) {
  const value = (result) => (result.lower_is_better ? figure(result.value) : share(result.value));
  const bounds = (result) => ("low" in result ? (result.lower_is_better ? `${figure(result.low)} to ${figure(result.high)}` : `${share(result.low)} to ${share(result.high)}`) : "");
  return table([
    ["step", (one) => figure(one.step), "n"], ["evaluation", (one) => `${one.mode} on ${one.dataset}`], ["value", value, "n"],
    ["95% interval", bounds, "n"], ["problems", (one) => figure(one.problems), "n"],
  ], [...run.evaluations].reverse().slice(0, 60));
}
