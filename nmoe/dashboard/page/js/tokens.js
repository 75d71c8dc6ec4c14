// The tokens of a sample, coloured by one of their columns; hovering or focusing one shows all its numbers.

import { ask, isExported } from "./ask.js";
import { button, h } from "./dom.js";
import { figure, share } from "./format.js";
import { keep } from "./route.js";

const COLUMNS = {
  logprob: "learner's log-probability", behaviour: "log-probability when sampled", advantage: "advantage", gradient_share: "share of the gradient", entropy: "entropy",
  mask: "trained on", expert: "expert", versions: "weight version", mismatch: "mismatch: learner less sampler", kept: "tokens kept to draw from",
};
const SIGNED = new Set(["advantage", "mismatch"]);
// Of a colour behind text, so faint that the text can be read on it.
const tint = (share) => `calc(var(--tint) * ${share.toFixed(3)})`;
const HUES = [205, 25, 160, 325, 45, 265, 95, 355];

export class Tokens {
  constructor(run, about, settings) {
    Object.assign(this, { run, about, settings });
    this.flow = h("div", { class: "tokens", role: "group", "aria-label": "Tokens" });
    this.facts = h("div", { class: "facts", id: "token-facts", role: "status" });
    this.colour = h("select", { id: "token-colour" });
    this.layer = h("select", { id: "token-layer" });
    this.pager = h("div", { class: "row" });
    this.derived = h("div", { id: "derived" });
    this.recompute = button("Recompute this token", () => this.#explain(), { id: "recompute", disabled: true });
    this.recompute.hidden = isExported;
    this.colour.addEventListener("change", () => this.#paint(true));
    this.layer.addEventListener("change", () => this.#paint(true));
    this.flow.addEventListener("pointerover", (event) => this.#peek(event.target));
    this.flow.addEventListener("focusin", (event) => this.#peek(event.target));
    this.flow.addEventListener("click", (event) => this.#choose(event.target));
    this.flow.addEventListener("keydown", (event) => this.#key(event));
    this.element = h("div", {},
      h("div", { class: "controls" }, h("label", {}, "Colour by", this.colour), h("label", {}, "Layer", this.layer), this.recompute),
      this.facts, this.derived, this.pager, this.flow);
  }

  async load(first) {
    this.data = await ask("tokens", { run: this.run, step: this.about.step, line: this.about.line, first });
    const { data } = this;
    const there = Object.entries(COLUMNS).filter(([name]) => (name === "expert" ? data.experts : data[name]));
    const wanted = this.settings.colour ?? "logprob";
    this.colour.replaceChildren(...there.map(([name, label]) => h("option", { value: name, selected: name === wanted }, label)));
    this.layer.parentElement.hidden = !data.experts;
    this.layer.replaceChildren(...Array.from({ length: data.layers ?? 0 }, (_, layer) => h("option", { value: layer }, layer)));
    this.flow.replaceChildren(...data.texts.map((text, at) => h("span", { class: `token${data.mask[at] ? "" : " given"}`, tabindex: at ? "-1" : "0", role: "button", "aria-label": text && !text.trim() ? `blank ${JSON.stringify(text)}` : null }, text === "" ? "∅" : text)));
    const page = (label, to) => button(label, () => this.load(to).catch((error) => (this.facts.textContent = error.message)));
    const size = data.ids.length;
    const said = h("span", { class: "faint" }, size < data.of ? `tokens ${figure(first)} to ${figure(first + size - 1)} of ${figure(data.of)}` : `${figure(data.of)} tokens`);
    this.pager.replaceChildren(said, ...(first ? [page("Earlier", Math.max(0, first - 2000))] : []), ...(first + size < data.of ? [page("Later", first + size)] : []));
    this.facts.textContent = data.advantage ? "Point at a token for its numbers." : "Only what was sampled is recorded of these tokens; [monitor] samples = \"all\" records the learner's columns, too.";
    this.#paint(false);
    if (this.settings.token) this.#choose(this.flow.children[Number(this.settings.token) - first]);
  }

  #values() {
    const name = this.colour.value;
    if (name !== "expert") return this.data[name] ?? [];
    const layer = Number(this.layer.value || 0);
    return this.data.experts.map((row) => row && row.slice((layer * row.length) / this.data.layers, ((layer + 1) * row.length) / this.data.layers));
  }

  #paint(kept) {
    const name = this.colour.value;
    const values = this.#values();
    const numbers = values.filter((value) => typeof value === "number");
    const most = Math.max(1e-12, ...numbers.map(Math.abs));
    const least = Math.min(...numbers);
    [...this.flow.children].forEach((token, at) => {
      const value = values[at];
      let colour = "";
      if (name === "expert") colour = value ? `hsl(${HUES[value[0] % HUES.length]} 70% 50% / .35)` : "";
      else if (name === "versions") colour = value >= 0 ? `hsl(${HUES[value % HUES.length]} 70% 50% / .3)` : "";
      else if (value === null || value === undefined) colour = "";
      else if (name === "mask") colour = value ? "hsl(160 70% 45% / .3)" : "";
      else if (SIGNED.has(name)) colour = `hsl(${value < 0 ? 15 : 190} 80% 45% / ${tint(Math.abs(value) / most)})`;
      else if (name === "logprob" || name === "behaviour") colour = `rgba(var(--heat), ${tint(1 - Math.exp(value))})`;
      else colour = `rgba(var(--heat), ${tint(value / most)})`;
      token.style.background = colour;
      token.dataset.value = name === "expert" ? (value ?? []).join(" ") : figure(value ?? "");
    });
    this.flow.dataset.least = figure(least);
    if (kept) keep({ ...this.settings, colour: name });
  }

  #at(target) {
    const token = target.closest?.(".token");
    return token ? [...this.flow.children].indexOf(token) : -1;
  }

  #peek(target) {
    const at = this.#at(target);
    if (at < 0) return;
    const { data } = this;
    const facts = [["token", `${data.first + at}, id ${data.ids[at]}`]];
    for (const [name, label] of Object.entries(COLUMNS)) {
      const value = name === "expert" ? data.experts?.[at]?.join(" ") : data[name]?.[at];
      if (value === undefined || value === null) continue;
      const written = name === "mask" ? (value ? "yes" : "no, given") : name === "gradient_share" ? share(value) : figure(value);
      const probability = name === "logprob" || name === "behaviour" ? ` (${share(Math.exp(value))})` : "";
      facts.push([label, written + probability]);
    }
    this.facts.replaceChildren(...facts.map(([label, value]) => h("span", {}, h("span", { class: "faint" }, `${label} `), value)));
  }

  #choose(target) {
    const at = target ? this.#at(target) : -1;
    if (at < 0) return;
    this.flow.querySelector(".chosen")?.classList.remove("chosen");
    this.flow.children[at].classList.add("chosen");
    this.chosen = this.data.first + at;
    this.recompute.disabled = false;
    this.#peek(this.flow.children[at]);
    keep({ ...this.settings, token: this.chosen });
  }

  #key(event) {
    const at = this.#at(event.target);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: this.data.ids.length - 1 }[event.key];
    if (event.key === "Enter" || event.key === " ") this.#choose(event.target);
    else if (to === undefined) return;
    else {
      const token = this.flow.children[Math.max(0, Math.min(to, this.flow.children.length - 1))];
      for (const other of this.flow.querySelectorAll("[tabindex='0']")) other.tabIndex = -1;
      token.tabIndex = 0;
      token.focus();
    }
    event.preventDefault();
    event.stopPropagation();
  }

  async #explain() {
    this.derived.replaceChildren(h("p", { class: "faint" }, "Deriving it from the kept weights…"));
    try {
      const { lines } = await ask("explain", { run: this.run, step: this.about.step, line: this.about.line, token: this.chosen }, true);
      this.derived.replaceChildren(h("pre", { class: "text" }, lines.join("\n")));
    } catch (error) {
      this.derived.replaceChildren(h("p", { class: "error" }, error.message));
    }
  }
}
