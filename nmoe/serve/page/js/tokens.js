// Shows a message as its tokens. Each can be reached by pointer and keyboard, shows its probability and experts, and opens a card
// of its alternatives, one of which the answer can go on from.

import { button, h } from "./dom.js";
import { expertsOf } from "./experts.js";

const PERCENT = new Intl.NumberFormat("en", { style: "percent", maximumSignificantDigits: 3 });

export const percent = (logprob) => {
  const share = Math.exp(logprob);
  return share < 1e-5 ? share.toExponential(1) : PERCENT.format(share);
};

/** A token's text with its blanks made visible. */
export const visible = (text) => (text === "" ? "∅" : text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣"));

const LEVELS = [0.9, 0.5, 0.2, 0.05];
const level = (logprob) => LEVELS.filter((bound) => Math.exp(logprob) < bound).length;

const isControl = (text) => /^(?:<[|｜][^]*[|｜]>|<\/?[\w]+>|\[\/?[A-Z_]+\])$/.test(text);

export class TokenView {
  /** `choose(at, alternative)` goes on from another token. */
  constructor(choose) {
    this.choose = choose;
    this.tokens = [];
    this.flow = h("div", { class: "tokens", role: "group", "aria-label": "Tokens" });
    this.legend = h("p", { class: "legend faint" }, "Shade: how unlikely the token was. Choose one for its alternatives.");
    this.element = h("div", { class: "token-view" }, this.flow, this.legend);
    for (const kind of ["pointerover", "focusin"]) this.flow.addEventListener(kind, (event) => this.#peek(event));
    for (const kind of ["pointerleave", "focusout"]) this.flow.addEventListener(kind, () => this.#unpeek());
    this.flow.addEventListener("click", (event) => this.#open(this.#at(event)));
    this.flow.addEventListener("keydown", (event) => this.#key(event));
  }

  /** Shows the tokens; those that are shown already are left alone, so that a stream costs only its new tokens. */
  update(tokens, experts) {
    this.experts = experts;
    let same = 0;
    while (same < tokens.length && same < this.tokens.length && tokens[same] === this.tokens[same]) same += 1;
    while (this.flow.children.length > same) this.flow.lastChild.remove();
    for (const token of tokens.slice(same)) this.flow.append(this.#drawn(token));
    this.tokens = [...tokens];
    if (!this.flow.querySelector("[tabindex='0']") && this.flow.firstChild) this.flow.firstChild.tabIndex = 0;
  }

  #drawn([, text, logprob]) {
    const kind = `token p${level(logprob)}${isControl(text) ? " control" : ""}`;
    return h("span", { class: kind, role: "button", tabindex: "-1", "aria-label": `${visible(text)}, ${percent(logprob)}` }, text === "" ? "∅" : text);
  }

  #at(event) {
    const token = event.target.closest(".token");
    return token ? [...this.flow.children].indexOf(token) : -1;
  }

  #key(event) {
    const at = this.#at(event);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: this.tokens.length - 1 }[event.key];
    if (event.key === "Enter" || event.key === " ") this.#open(at);
    else if (to === undefined) return;
    else this.focus(Math.max(0, Math.min(to, this.tokens.length - 1)));
    event.preventDefault();
    event.stopPropagation();
  }

  focus(at) {
    for (const token of this.flow.querySelectorAll("[tabindex='0']")) token.tabIndex = -1;
    const token = this.flow.children[at];
    if (!token) return;
    token.tabIndex = 0;
    token.focus();
  }

  #peek(event) {
    const at = this.#at(event);
    if (at < 0 || this.card) return;
    this.#unpeek();
    this.hint = h("div", { class: "card hint", role: "tooltip", id: "token-hint" }, facts(this.tokens[at]), ...this.#routed(this.tokens[at], true));
    this.flow.children[at].setAttribute("aria-describedby", "token-hint");
    this.#place(this.hint, at);
  }

  #unpeek() {
    this.hint?.remove();
    this.flow.querySelector("[aria-describedby]")?.removeAttribute("aria-describedby");
  }

  #open(at) {
    if (at < 0) return;
    this.#unpeek();
    this.close();
    const token = this.tokens[at];
    const close = () => {
      this.close();
      this.focus(at);
    };
    const listed = token[3].some(([id]) => id === token[0]) || !token[3].length ? token[3] : [...token[3], token.slice(0, 3)];
    const rows = listed.map((other) => {
      const same = other[0] === token[0];
      const row = button("", () => {
        this.close();
        this.choose(at, other);
      }, { class: "alternative", disabled: same, "aria-label": same ? `${visible(other[1])}, ${percent(other[2])}, was taken` : `Go on from ${visible(other[1])}, ${percent(other[2])}` });
      const bar = h("span", { class: "bar" });
      bar.style.width = `${Math.max(1, 100 * Math.exp(other[2]))}%`;
      row.append(bar, h("code", {}, visible(other[1])), h("span", { class: "number" }, percent(other[2])));
      return row;
    });
    const none = h("p", { class: "faint" }, "No alternatives were kept of it: the settings say how many are.");
    this.card = h("div", { class: "card", role: "dialog", "aria-label": `Alternatives of ${visible(token[1])}` },
      h("div", { class: "card-head" }, h("strong", {}, "Go on from another token"), button("✕", close, { class: "quiet", "aria-label": "Close the alternatives" })),
      facts(token), ...(rows.length ? rows : [none]), ...this.#routed(token, false));
    this.card.addEventListener("keydown", (event) => {
      const able = [...this.card.querySelectorAll("button:not(:disabled)")];
      const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (event.key === "Escape") close();
      else if (by) able[(able.indexOf(document.activeElement) + by + able.length) % able.length].focus();
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    this.card.addEventListener("focusout", (event) => {
      if (event.relatedTarget && !this.card?.contains(event.relatedTarget)) this.close();
    });
    this.flow.children[at].classList.add("open");
    this.#place(this.card, at);
    this.card.scrollIntoView({ block: "nearest" });
    (this.card.querySelector(".alternative:not(:disabled)") ?? this.card.querySelector("button")).focus();
  }

  close() {
    const card = this.card;
    this.card = null;
    card?.remove();
    this.flow.querySelector(".open")?.classList.remove("open");
  }

  #routed(token, inHint) {
    return token[4] ? [expertsOf(token[4], this.experts, inHint)] : [];
  }

  /** Puts a card below a token, inside of the view's width. */
  #place(card, at) {
    this.element.append(card);
    const token = this.flow.children[at];
    const rect = token.getClientRects()[0] ?? token.getBoundingClientRect();
    const whole = this.element.getBoundingClientRect();
    card.style.top = `${rect.bottom - whole.top + 4}px`;
    card.style.left = `${Math.max(0, Math.min(rect.left - whole.left, whole.width - card.offsetWidth))}px`;
  }
}

/** A token's text, probability and id. */
function facts([id, text, logprob]) {
  return h("p", { class: "facts" }, h("code", {}, visible(text)), ` ${percent(logprob)} `, h("span", { class: "faint" }, `token ${id}`));
}
