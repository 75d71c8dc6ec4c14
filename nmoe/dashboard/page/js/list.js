// The list of runs, of which some are chosen to be shown together.

import { ask } from "./ask.js";
import { button, h } from "./dom.js";
import { figure } from "./format.js";
import { link } from "./route.js";
import { table } from "./table.js";

const chosen = new Set();

export async function list(main) {
  const { runs, roots } = await ask("runs");
  const show = button("Show the chosen together", () => (location.hash = link([...chosen], "curves").slice(1)), { class: "strong", disabled: chosen.size < 2 });
  const differ = button("What differs", () => (location.hash = link([...chosen], "config").slice(1)), { disabled: chosen.size < 2 });
  const choose = (run) => {
    const box = h("input", { type: "checkbox", "aria-label": `Choose ${run.name}` });
    box.checked = chosen.has(run.name);
    box.addEventListener("change", () => {
      if (box.checked) chosen.add(run.name);
      else chosen.delete(run.name);
      show.disabled = differ.disabled = chosen.size < 2;
    });
    return box;
  };
  const columns = [
    ["run", (run) => run.name],
    ["", choose],
    ["status", (run) => (run.fault && run.status !== "deleted" ? "unreadable" : run.status)],
    ["step", (run) => `${figure(run.step)}${run.steps ? ` of ${figure(run.steps)}` : ""}`, "n"],
    ["last", (run) => (run.headline ? `${run.headline} ${figure(run.value)}` : "no step yet"), "n"],
    ["seed", (run) => figure(run.seed), "n"],
    ["alerts", (run) => (run.alerts ? "yes" : "")],
    ["started (UTC)", (run) => run.started.slice(0, 16), "n"],
  ];
  const place = h("div");
  const find = h("input", { type: "search", id: "find-run", autocomplete: "off" });
  const draw = () => {
    const words = find.value.toLowerCase().split(/\s+/);
    const fitting = runs.filter((run) => words.every((word) => run.name.toLowerCase().includes(word)));
    const rows = fitting.sort((a, b) => (b.status === "running") - (a.status === "running") || b.started.localeCompare(a.started));
    place.replaceChildren(table(columns, rows, (run) => link([run.name], "overview")), h("p", { class: "faint" }, `${rows.length} of ${runs.length} runs below ${roots.join(", ")}`));
  };
  find.addEventListener("input", draw);
  draw();
  main.replaceChildren(
    h("div", { class: "controls" }, h("label", {}, "Find by name", find), show, differ),
    runs.length ? place : h("p", {}, `There are no runs below ${roots.join(", ")} yet.`),
  );
}
