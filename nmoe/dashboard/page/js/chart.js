// Draws curves by uPlot, with marks on the time axis and intervals of points.

import { h } from "./dom.js";
import { colour, figure } from "./format.js";

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** Returns the running mean over `steps` values before each one. */
function smooth(values, steps) {
  let sum = 0;
  return values.map((value, at) => {
    sum += value - (at >= steps ? values[at - steps] : 0);
    return sum / Math.min(at + 1, steps);
  });
}

export class Chart {
  /** `curves` are {name, run, steps, values, low, high}; `marks` are {step, text}; `pick` gets the step that is clicked. */
  constructor(title, { log = false, smoothing = 0, pick = null, height = 190 } = {}) {
    Object.assign(this, { log, smoothing, pick, height, curves: [], marks: [] });
    this.last = h("span", { class: "last" });
    this.place = h("div");
    this.element = h("div", { class: "chart" }, h("h3", {}, h("span", {}, title), this.last), this.place);
    this.element.dataset.chart = title;
  }

  show(curves, marks) {
    Object.assign(this, { curves, marks });
    this.last.textContent = curves.map((one) => figure(one.values.at(-1))).filter(Boolean).join(" · ");
    const key = curves.map((one) => one.run).join("\n") + (this.smoothing ? "~" : "");
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
      ...(this.smoothing ? [[one.steps, smooth(one.values, this.smoothing)]] : []),
    ]);
    return tables.length > 1 ? uPlot.join(tables) : tables[0] ?? [[], []];
  }

  #options() {
    const axis = { stroke: css("--soft"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line"), width: 1 }, font: "11px sans-serif" };
    const series = this.curves.flatMap((one) => {
      const line = { label: one.name, stroke: colour(one.run), width: 1.5, spanGaps: true, value: (_, value) => figure(value), points: { show: one.steps.length < 3 || Boolean(one.low) } };
      return this.smoothing ? [{ ...line, alpha: 0.3, width: 1, label: `${one.name}, each step` }, { ...line, width: 2 }] : [line];
    });
    return {
      width: Math.max(260, this.place.clientWidth || 400), height: this.height, cursor: { drag: { x: true, y: false } },
      scales: { x: { time: false }, y: { distr: this.log && this.curves.every((one) => one.values.every((value) => value > 0)) ? 3 : 1 } },
      axes: [{ ...axis }, { ...axis, size: 58, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : figure(tick))) }],
      series: [{ label: "step" }, ...series],
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
