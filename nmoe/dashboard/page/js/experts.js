// Expert load by step as a heat map: a column for each step, a row for each expert.

import { ask } from "./ask.js";
import { h } from "./dom.js";
import { share } from "./format.js";
import { keep, link } from "./route.js";

export async function experts(main, { runs, settings }) {
  const run = runs[0];
  const about = await ask("run", { run });
  if (!about.layers) {
    main.replaceChildren(h("p", {}, "This run has no experts, or has not recorded their load."));
    return undefined;
  }
  const chosen = settings.layer ?? "0";
  const layer = h("select", { id: "layer" }, ...Array.from({ length: about.layers }, (_, at) => h("option", { value: at, selected: String(at) === chosen }, at)));
  const canvas = h("canvas", { class: "heat", role: "img" });
  const said = h("p", { class: "number", id: "load-said", role: "status" }, "Point at the map for a share.");
  const dead = about.findings.filter((found) => found.view === "experts").map((found) => h("li", {}, found.text));
  main.replaceChildren(
    h("section", { id: "dead" }, h("h2", {}, "Experts without tokens"), dead.length ? h("ul", {}, ...dead) : h("p", {}, "Every expert gets tokens at the last step.")),
    h("section", {}, h("h2", {}, "Load"), h("div", { class: "controls" }, h("label", {}, "Layer", layer)), canvas, said,
      h("p", { class: "faint" }, "Black: no tokens; dark blue: twice an equal share or more. Steps run from left to right, experts from top to bottom.")),
  );
  let data;
  async function draw() {
    data = await ask("load", { run, layer: layer.value, columns: 200 });
    const count = data.shares[0]?.length ?? 0;
    Object.assign(canvas, { width: Math.max(1, data.steps.length), height: Math.max(1, count) });
    canvas.style.height = `${Math.min(640, Math.max(60, 18 * count))}px`;
    canvas.setAttribute("aria-label", `Load of ${count} experts of layer ${layer.value} over steps ${data.steps[0]} to ${data.steps.at(-1)}`);
    const context = canvas.getContext("2d");
    data.shares.forEach((row, x) => row.forEach((value, y) => {
      const level = Math.min(1, (value * count) / 2);
      context.fillStyle = value === 0 ? "#1b1b1b" : `hsl(205 75% ${94 - 64 * level}%)`;
      context.fillRect(x, y, 1, 1);
    }));
  }
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const x = Math.min(data.steps.length - 1, Math.floor(((event.clientX - box.left) / box.width) * data.steps.length));
    const y = Math.floor(((event.clientY - box.top) / box.height) * canvas.height);
    const value = data.shares[x]?.[y];
    if (value !== undefined) said.textContent = `step ${data.steps[x]}, expert ${y}: ${share(value)} of the picks, ${(value * canvas.height).toFixed(2)} x an equal share`;
  });
  canvas.addEventListener("click", (event) => {
    const box = canvas.getBoundingClientRect();
    location.hash = link([run], "step", { step: data.steps[Math.floor(((event.clientX - box.left) / box.width) * data.steps.length)] }).slice(1);
  });
  layer.addEventListener("change", () => {
    keep({ ...settings, layer: layer.value });
    draw();
  });
  await draw();
  return undefined;
}
