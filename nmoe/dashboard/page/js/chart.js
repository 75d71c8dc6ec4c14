// Draws curves by uPlot, with marks on the time axis and intervals of points.

import { isExported } from "./ask.js";
import { h } from "./dom.js";
import { colour, figure } from "./format.js";

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export class Chart {
  /** `curves` are {name, run, steps, values, low, high, smooth, band}: `low` and `high` are intervals of points, `smooth` has steps
   * and running means, and `band` the least and greatest values. `marks` are {step, text}; `pick` gets the step that is clicked. */
  constructor(title, { log = false, pick = null, height = 190 } = {}) {
    // An exported page holds few of the steps that a click could ask for.
    Object.assign(this, { log, pick: isExported ? null : pick, height, curves: [], marks: [] });
    this.last = h("span", { class: "last" });
    this.place = h("div");
    this.element = h("div", { class: "chart" }, h("h3", {}, h("span", {}, title), this.last), this.place);
    this.element.dataset.chart = title;
  }

  show(curves, marks) {
    Object.assign(this, { curves, marks });
    this.last.textContent = curves.map((one) => figure(one.values.at(-1))).filter(Boolean).join(" · ");
    const key = curves.map((one) => `${one.run}${one.smooth ? "~" : ""}${one.band ? "=" : ""}`).join("\n");
    if (this.plot && key === this.key) {
      this.plot.setData(this.#data());
      return;
    }
    this.key = key;
    this.plot?.destroy();
    this.plot = new uPlot(this.#options(), this.#data(), this.place);
  }

  #data() {
    const tables = this.curves.flatMap((one) => [
      [one.steps, one.values],
      ...(one.smooth ? [one.smooth] : []),
      ...(one.band ? [[one.steps, one.band.high], [one.steps, one.band.low]] : []),
    ]);
    return tables.length > 1 ? uPlot.join(tables) : tables[0] ?? [[], []];
  }

  #options() {
    const axis = { stroke: css("--soft"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line"), width: 1 }, font: "11px sans-serif" };
    const series = this.curves.flatMap((one) => {
      const line = { label: one.name, stroke: colour(one.run), width: 1.5, spanGaps: true, value: (_, value) => figure(value), points: { show: one.steps.length < 3 || Boolean(one.low) } };
      const edge = { ...line, width: 0.5, alpha: 0.6, points: { show: false } };
      if (one.smooth) return [{ ...line, alpha: 0.3, width: 1, label: `${one.name}, each step` }, { ...line, width: 2 }];
      return one.band ? [{ ...line, width: 2 }, { ...edge, label: "highest" }, { ...edge, label: "lowest" }] : [line];
    });
    const bands = [];
    let at = 1;
    for (const one of this.curves) {
      if (one.band) bands.push({ series: [at + 1, at + 2], fill: `${colour(one.run)}33` });
      at += 1 + (one.smooth ? 1 : 0) + (one.band ? 2 : 0);
    }
    return {
      width: Math.max(260, this.place.clientWidth || 400), height: this.height, cursor: { drag: { x: true, y: false } },
      scales: { x: { time: false }, y: { distr: this.log && this.curves.every((one) => one.values.every((value) => value > 0)) ? 3 : 1 } },
      axes: [{ ...axis }, { ...axis, size: 58, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : figure(tick))) }],
      series: [{ label: "step" }, ...series],
      bands,
      hooks: { draw: [(plot) => this.#overlay(plot)], ready: [(plot) => this.#clicks(plot)] },
    };
  }

  #overlay(plot) {
    const { ctx } = plot;
    const { top, height, left, width } = plot.bbox;
    ctx.save();
    ctx.beginPath();
    ctx.rect(left, top, width, height);
    ctx.clip();
    ctx.setLineDash([4, 3]);
    for (const mark of this.marks) {
      const x = plot.valToPos(mark.step, "x", true);
      ctx.strokeStyle = mark.stage ? css("--accent") : css("--wrong");
      ctx.beginPath();
      ctx.moveTo(x, top);
      ctx.lineTo(x, top + height);
      ctx.stroke();
    }
    ctx.setLineDash([]);
    for (const one of this.curves) {
      if (!one.low) continue;
      ctx.strokeStyle = colour(one.run);
      one.steps.forEach((step, at) => {
        if (one.low[at] === undefined) return;
        const x = plot.valToPos(step, "x", true);
        ctx.beginPath();
        ctx.moveTo(x, plot.valToPos(one.low[at], "y", true));
        ctx.lineTo(x, plot.valToPos(one.high[at], "y", true));
        ctx.stroke();
      });
    }
    ctx.restore();
  }

  #clicks(plot) {
    plot.over.addEventListener("click", () => {
      const step = plot.data[0][plot.cursor.idx];
      if (this.pick && step !== undefined) this.pick(step);
    });
  }

  /** Draws anew, in the present width and colours. */
  redraw() {
    this.key = null;
    if (this.curves.length) this.show(this.curves, this.marks);
  }
}
