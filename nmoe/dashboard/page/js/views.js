// The smaller views: alerts, a step, problems, configurations, and where the time goes.

import { ask, isExported } from "./ask.js";
import { Chart } from "./chart.js";
import { h } from "./dom.js";
import { COLOURS, figure, share } from "./format.js";
import { link } from "./route.js";
import { table } from "./table.js";

const advice = (alert) => h("div", {}, h("div", {}, alert.message), ...(alert.remedies?.length ? [h("ul", {}, ...alert.remedies.map((remedy) => h("li", {}, remedy)))] : []));

export async function alerts(main, { runs }) {
  const parts = await Promise.all(runs.map(async (name) => {
    const run = await ask("run", { run: name });
    const columns = [["step", (alert) => figure(alert.step), "n"], ["alert and what to try", advice], ["rule", (alert) => alert.rule ?? ""]];
    return h("section", {}, h("h2", {}, name), run.alerts.length ? table(columns, run.alerts, (alert) => link([name], "step", { step: alert.step })) : h("p", {}, "No alert."));
  }));
  main.replaceChildren(...parts);
}

export async function step(main, { runs, settings }) {
  const run = runs[0];
  const found = await ask("step", { run, step: settings.step });
  const columns = [["metric", (one) => one.name], ["before", (one) => figure(one.before), "n"], ["from here on", (one) => figure(one.after), "n"], ["deviations", (one) => figure(one.score), "n"]];
  main.replaceChildren(
    h("h2", {}, `Step ${figure(found.step)}`),
    h("p", {}, h("a", { href: link([run], "samples", { step_min: found.step, step_max: found.step }) }, "Samples of this step"), " · ", h("a", { href: link([run], "samples", { step_min: found.step, reward_max: 0, order: "oldest" }) }, "Samples without reward from here on")),
    h("section", { id: "changed" }, h("h3", {}, "What changed most here"), found.changed.length ? table(columns, found.changed, (one) => link([run], "curves", { metrics: one.name })) : h("p", {}, "There are too few steps around it to say.")),
    h("section", { id: "near" }, h("h3", {}, "Alerts within ten steps"), found.alerts.length ? table([["step", (alert) => figure(alert.step), "n"], ["alert and what to try", advice]], found.alerts) : h("p", {}, "None.")),
  );
}

export async function problems(main, { runs, settings }) {
  const run = runs[0];
  const order = settings.order ?? "never";
  const found = await ask("problems", { run, order });
  const { totals } = found;
  const columns = [["problem", (one) => one.problem], ["samples", (one) => figure(one.tried), "n"], ["right", (one) => figure(one.solved), "n"], ["mean reward", (one) => figure(one.mean), "n"], ["last step", (one) => figure(one.last), "n"]];
  main.replaceChildren(
    h("section", { id: "problems" },
      h("h2", {}, `${figure(totals.never_solved)} of ${figure(totals.problems)} recorded problems were never solved`),
      h("p", {}, h("a", { href: link([run], "problems", { order: "never" }) }, "Never solved"), " · ", h("a", { href: link([run], "problems", { order: "mean" }) }, "All, the lowest rewards first")),
      found.indexing ? h("p", { class: "faint" }, `${figure(found.indexing)} steps are still being read.`) : null,
      table(columns, found.rows, (one) => link([run], "samples", { problem: one.problem }))),
  );
}

export async function config(main, { runs }) {
  if (runs.length > 1) {
    const found = await ask("diff", { runs: runs.join("\n") });
    const columns = [["key", (row) => row[0]], ...found.runs.map((name, number) => [name, (row) => row[number + 1], "n"])];
    main.replaceChildren(h("section", { id: "differences" }, h("h2", {}, `${found.rows.length} of ${found.same} keys differ`), found.rows.length ? table(columns, found.rows) : h("p", {}, "The configurations are the same, but for the names.")));
    return;
  }
  const run = await ask("run", { run: runs[0] });
  main.replaceChildren(h("section", {}, h("h2", {}, "Configuration"), table([["key", ([name]) => name], ["value", ([, value]) => JSON.stringify(value), "n"]], Object.entries(run.config))));
}

const PARTS = [["time_rollout_s", "rollout"], ["trainer_wait_s", "waiting for groups"], ["time_learn_s", "learn"], ["time_sync_s", "publish"], ["time_record_s", "record samples"], ["time_save_s", "save"]];

const LANES = { "waits for groups": "var(--line)", trains: COLOURS[0], publishes: COLOURS[1], "engines have requests": COLOURS[2], "engines wait for requests": "var(--line)" };

/** Who waited for whom in an asynchronous run: over all steps, and in some steps second by second. */
async function lanes(name, runs, settings) {
  const { bars, over } = await ask("lanes", { run: name, at: settings.at });
  if (!bars.length) return null;
  const pick = (step) => (location.hash = link(runs, "time", { at: step }).slice(1));
  const chart = new Chart("share of the time spent waiting", { pick });
  const steps = over.map((one) => one.step);
  const ends = Math.max(...bars.map(([, , , end]) => end));
  const rows = ["trainer", "engines"].map((lane) => {
    const place = h("div", { class: "lane", role: "img" });
    const sums = {};
    let done = 0;
    for (const [of, step, begin, end, doing] of bars) {
      if (of !== lane) continue;
      // Between two bars the trainer did something else.
      const bar = h("span", { title: `step ${step} ${doing}: ${figure(end - begin)} s` });
      bar.style.marginLeft = `${(100 * (begin - done)) / ends}%`;
      bar.style.width = `${(100 * (end - begin)) / ends}%`;
      bar.style.background = LANES[doing];
      place.append(bar);
      done = end;
      sums[doing] = (sums[doing] ?? 0) + end - begin;
    }
    const said = Object.entries(sums).map(([doing, seconds]) => `${doing} ${figure(seconds)} s`).join(", ");
    place.setAttribute("aria-label", `${lane}: ${said}`);
    return h("div", {}, h("p", { class: "lane-said" }, `${lane}: ${said}`), place);
  });
  const keys = Object.entries(LANES).flatMap(([doing, background]) => {
    const key = h("span", { class: "key" });
    key.style.background = background;
    return [key, `${doing} `];
  });
  const element = h("div", { class: "lanes" },
    h("h3", {}, `Who waited for whom, steps ${figure(bars[0][1])} to ${figure(bars.at(-1)[1])}`), ...rows, h("p", { class: "faint" }, ...keys),
    isExported ? null : h("p", { class: "faint" }, "A click on the curves below shows the steps there."), chart.element);
  const show = () => chart.show([{ name: "trainer", run: 0, steps, values: over.map((one) => one.trainer) }, { name: "engines", run: 1, steps, values: over.map((one) => one.engines) }], []);
  return { element, chart, show };
}

export async function time(main, { runs, settings }) {
  const drawn = [];
  const sections = await Promise.all(runs.map(async (name) => {
    const { means } = await ask("time", { run: name });
    const mean = (metric) => means[metric];
    const whole = mean("time_step_s");
    if (!whole) return h("section", {}, h("h2", {}, name), h("p", {}, "No times are recorded yet."));
    const waits = mean("trainer_wait_s") !== null;
    const parts = PARTS.filter(([metric]) => !(waits && metric === "time_rollout_s")).map(([metric, label]) => ({ label, seconds: mean(metric) })).filter((part) => part.seconds !== null);
    const rest = whole - parts.reduce((sum, part) => sum + part.seconds, 0);
    if (rest > 0) parts.push({ label: "the rest", seconds: rest });
    const bars = h("div", { class: "bars", role: "img", "aria-label": `Where the time of a step goes: ${parts.map((part) => `${part.label} ${share(part.seconds / whole)}`).join(", ")}` });
    parts.forEach((part, number) => {
      const bar = h("span", { title: part.label });
      bar.style.width = `${(100 * part.seconds) / whole}%`;
      bar.style.background = part.label === "the rest" ? "var(--line)" : COLOURS[number % COLOURS.length];
      part.key = h("span", { class: "key" });
      part.key.style.background = bar.style.background;
      bars.append(bar);
    });
    const idle = mean("engine_idle_share");
    const graded = mean("time_grade_s");
    const beside = await lanes(name, runs, settings);
    if (beside) drawn.push(beside);
    return h("section", {}, h("h2", {}, `${name}: ${figure(whole)} s a step`), bars,
      table([["part", (part) => h("span", {}, part.key, part.label)], ["seconds a step", (part) => figure(part.seconds), "n"], ["share", (part) => share(part.seconds / whole), "n"]], parts),
      graded === null ? null : h("p", {}, `Grading took ${figure(graded)} s a step, summed over samples that are graded while others are sampled.`),
      idle === null ? null : h("p", {}, `The engines had no request in ${share(idle)} of the time; the trainer waited for groups in ${share((mean("trainer_wait_s") ?? 0) / whole)}.`),
      beside?.element);
  }));
  main.replaceChildren(...sections);
  drawn.forEach((one) => one.show());
  return { redraw: () => drawn.forEach((one) => one.chart.redraw()) };
}
