// Shows the experts of a token: a picture with a column for each layer and a row for each expert, and the same as text.

import { h } from "./dom.js";

const WIDTH = 232;
const HEIGHT = 96;
const FEW_LAYERS = 8;

const between = (low, value, high) => Math.max(low, Math.min(value, high));

/** `routes` are the experts of each layer, of `count` experts. In a hint, many layers are shown by the picture alone. */
export function expertsOf(routes, count, inHint) {
  const many = Math.max(count ?? 0, ...routes.flat().map((expert) => expert + 1));
  const text = routes.map((chosen, layer) => h("li", {}, h("span", { class: "faint" }, `MoE layer ${layer}`), ` ${chosen.join(" ")}`));
  return h("div", { class: "experts" },
    h("p", { class: "faint" }, `${routes.length} MoE layers across, ${many} experts down`), picture(routes, many),
    inHint && routes.length > FEW_LAYERS ? null : h("ol", {}, ...text));
}

function picture(routes, many) {
  const wide = between(2, Math.floor(WIDTH / routes.length), 12);
  const high = between(1, Math.floor(HEIGHT / many), 8);
  const gap = high > 3 ? 1 : 0;
  const canvas = h("canvas", { width: routes.length * wide, height: many * high, role: "img", "aria-label": "Experts of each layer" });
  const pen = canvas.getContext("2d");
  const colours = getComputedStyle(document.documentElement);
  pen.fillStyle = colours.getPropertyValue("--line");
  routes.forEach((_, layer) => {
    for (let expert = 0; expert < many; expert++) pen.fillRect(layer * wide, expert * high, wide - 1, high - gap);
  });
  pen.fillStyle = colours.getPropertyValue("--accent");
  routes.forEach((chosen, layer) => chosen.forEach((expert) => pen.fillRect(layer * wide, expert * high, wide - 1, high - gap)));
  return canvas;
}
