// Curves of the metrics of one or several runs, which grow while the runs do.

import { ask } from "./ask.js";
import { Chart } from "./chart.js";
import { h } from "./dom.js";
import { colour, figure } from "./format.js";
import { link } from "./route.js";

const FIRST = ["reward_mean", "correctness", "format_ok", "truncated", "loss", "held_out_loss", "response_length_mean", "entropy_mean", "grad_norm", "ppo_kl", "update_kl", "mismatch_abs_mean", "staleness_mean"];
const LOG = new Set(["loss", "grad_norm", "mismatch_abs_mean", "mismatch_abs_max"]);

export async function curves(main, { runs, settings }) {
  const about = await Promise.all(runs.map((name) => ask("run", { run: name })));
  const every = [...new Set(about.flatMap((run) => run.metrics))].sort();
  let names = (settings.metrics ? settings.metrics.split(",") : FIRST).filter((name) => every.includes(name));
  if (!names.length) names = every.filter((name) => name !== "step").slice(0, 6);
  const state = { cursors: {}, data: {}, bands: new Map(), charts: new Map() };
  const several = recipes(runs, about);
  const banded = settings.seeds === "each" ? [] : several;
  const smoothing = Number(settings.smooth ?? 0);
  const pick = (step) => (location.hash = link([runs[0]], "step", { step }).slice(1));

  const alerts = about.flatMap((run) => run.alerts.map((alert) => ({ step: alert.step, text: alert.message })));
  const wanted = [...names];
  if (every.includes("curriculum_stage")) wanted.push("curriculum_stage");

  const grid = h("div", { class: "charts" });
  for (const name of names) {
    const chart = new Chart(name, { log: LOG.has(name), pick });
    state.charts.set(name, chart);
    grid.append(chart.element);
  }
  const kinds = new Map();
  about.forEach((run, number) => {
    for (const result of run.evaluations) {
      const kind = `${result.mode} on ${result.dataset}`;
      const lines = kinds.get(kind) ?? kinds.set(kind, new Map()).get(kind);
      const line = lines.get(number) ?? lines.set(number, { name: run.name, run: number, steps: [], values: [], low: [], high: [] }).get(number);
      line.steps.push(result.step);
      line.values.push(result.value);
      line.low.push(result.low);
      line.high.push(result.high);
    }
  });
  const evaluated = [...kinds].map(([kind, lines]) => [new Chart(`${kind}, 95% intervals`), [...lines.values()]]);
  grid.prepend(...evaluated.map(([chart]) => chart.element));

  const add = h("input", { list: "metric-names", id: "add-metric", autocomplete: "off", placeholder: "name" });
  add.addEventListener("change", () => {
    if (!every.includes(add.value)) return;
    location.hash = link(runs, "curves", { ...settings, metrics: [...new Set([add.value, ...names])].join(",") }).slice(1);
  });
  const smooth = h("select", { id: "smooth" }, ...[0, 5, 20, 100].map((steps) => h("option", { value: steps, selected: steps === smoothing }, steps ? `mean over ${steps} steps` : "each step")));
  const goto = (changes) => (location.hash = link(runs, "curves", { ...settings, ...changes }).slice(1));
  smooth.addEventListener("change", () => goto({ smooth: smooth.value === "0" ? "" : smooth.value }));
  const seeds = h("select", { id: "seeds" }, h("option", { value: "" }, "median and range"), h("option", { value: "each", selected: settings.seeds === "each" }, "each run"));
  seeds.addEventListener("change", () => goto({ seeds: seeds.value }));
  const legend = h("p", {}, ...runs.flatMap((name, number) => {
    const key = h("span", { class: "key" });
    key.style.background = colour(number);
    return [key, h("a", { href: link([name], "overview") }, name), " "];
  }));
  const marked = h("p", { class: "faint", id: "marks" });
  const ends = h("p", { class: "faint", id: "ends" });
  const spread = h("div", { id: "spread" });
  main.replaceChildren(
    legend,
    h("div", { class: "controls" }, h("label", {}, "Add a metric", add), h("datalist", { id: "metric-names" }, ...every.map((name) => h("option", { value: name }))), h("label", {}, "Smoothing", smooth), several.length ? h("label", {}, "Seeds of one recipe", seeds) : null),
    marked, ends, grid, spread,
  );
  evaluated.forEach(([chart, lines]) => chart.show(lines, []));

  async function update() {
    const since = runs.map((name) => state.cursors[name] ?? "").join(",");
    const { runs: found } = await ask("curves", { runs: runs.join("\n"), names: wanted.join(","), since, points: 800, smooth: smoothing || "" });
    for (const name of runs) {
      const { cursor, first, curves: raw, smooth: means } = found[name];
      const kept = first ? state.data[name] : { raw: {}, smooth: {} };
      joined(kept.raw, raw);
      joined(kept.smooth, means);
      state.data[name] = kept;
      state.cursors[name] = cursor;
    }
    for (const names of banded) {
      const key = names.join("\n");
      // A run that was begun anew begins its band anew.
      const kept = names.every((name) => found[name].first) ? state.bands.get(key) : { after: 0, parts: {} };
      const { bands } = await ask("bands", { runs: key, names: wanted.join(","), after: kept.after, points: 800, smooth: smoothing || "" });
      joined(kept.parts, bands);
      kept.after = Math.max(kept.after, ...Object.values(bands).map(([steps]) => steps.at(-1) ?? 0));
      state.bands.set(key, kept);
    }
    const stages = stagesOf(state.data[runs[0]]?.raw.curriculum_stage);
    const marks = [...alerts, ...stages].sort((a, b) => a.step - b.step);
    marked.replaceChildren(...(marks.length ? ["On the axis: ", ...marks.slice(0, 12).flatMap((mark) => [h("a", { href: link([runs[0]], mark.stage ? "step" : "alerts", { step: mark.step }) }, `step ${mark.step}: ${mark.text}`), " · "])] : []));
    ends.replaceChildren(...banded.flatMap((names) => ended(names, state.data, found)));
    for (const [metric, chart] of state.charts) {
      // An exported page has the bands of all runs of a recipe alone.
      const bands = banded.map((names) => [names, state.bands.get(names.join("\n")).parts]).filter(([, parts]) => Object.keys(parts).length);
      const inBand = new Set(bands.flatMap(([names]) => names));
      const lines = runs.map((name, run) => {
        const [steps, values] = state.data[name].raw[metric] ?? [[], []];
        return { name, run, steps, values, smooth: smoothing ? state.data[name].smooth[metric] : undefined };
      }).filter((line) => !inBand.has(line.name));
      for (const [names, parts] of bands) {
        const [steps, values, low, high] = parts[metric] ?? [[]];
        lines.push({ name: `median of ${names.length} runs`, run: runs.indexOf(names[0]), steps, values, band: { low, high } });
      }
      chart.show(lines.filter((line) => line.steps.length), marks);
    }
    spread.replaceChildren(...several.filter((same) => same.length > 2).map((same) => overRuns(names, same, state.data)));
    return Object.values(found).some((run) => run.status === "running");
  }
  await update();
  return { update, redraw: () => [...state.charts.values(), ...evaluated.map(([chart]) => chart)].forEach((chart) => chart.redraw()) };
}

/** Adds columns to those that there are, by metric. */
function joined(kept, parts) {
  for (const [metric, columns] of Object.entries(parts)) {
    kept[metric] = columns.map((column, number) => [...(kept[metric]?.[number] ?? []), ...column]);
  }
}

/** Says where the median of some runs ends for good before the last of them: at the last step of those that ended first. */
function ended(names, data, found) {
  const last = new Map(names.map((name) => [name, Math.max(0, ...Object.values(data[name].raw).map(([steps]) => steps.at(-1) ?? 0))]));
  const first = Math.min(...last.values());
  const short = names.filter((name) => last.get(name) === first && found[name].status !== "running");
  if (!short.length || short.length === names.length) return [];
  return [`The median of ${names.length} runs is to step ${figure(first)}, where ${short.join(" and ")} ended; "each run" shows the others to step ${figure(Math.max(...last.values()))}. `];
}

/** Returns the runs of each recipe that several of them have, which differ in names and seed alone. */
function recipes(runs, about) {
  const found = new Map();
  about.forEach(({ recipe }, number) => found.set(recipe, [...(found.get(recipe) ?? []), runs[number]]));
  return [...found.values()].filter((names) => names.length > 1);
}

function stagesOf(column) {
  if (!column) return [];
  const [steps, values] = column;
  return steps.flatMap((step, at) => (at && values[at] !== values[at - 1] ? [{ step, text: `curriculum stage ${values[at]}`, stage: true }] : []));
}

// Of Student's t with n - 1 degrees of freedom, at 95%.
const T = [0, 12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.16, 2.145, 2.131, 2.12, 2.11, 2.101, 2.093];

/** The mean of the last values over the runs of a recipe, with its interval. */
function overRuns(names, runs, data) {
  const rows = names.flatMap((metric) => {
    const values = runs.map((name) => data[name].raw[metric]?.[1].at(-1)).filter((value) => value !== undefined);
    if (values.length < 3) return [];
    const mean = values.reduce((a, b) => a + b) / values.length;
    const deviation = Math.sqrt(values.reduce((sum, value) => sum + (value - mean) ** 2, 0) / (values.length - 1));
    const half = ((T[values.length - 1] ?? 2.09) * deviation) / Math.sqrt(values.length);
    return [h("li", {}, `${metric}: ${figure(mean)}, 95% interval ${figure(mean - half)} to ${figure(mean + half)} over ${values.length} runs`)];
  });
  return h("section", {}, h("h2", {}, `Last values, over ${runs.join(", ")}`), h("ul", {}, ...rows));
}
