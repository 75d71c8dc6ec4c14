// The panel of a chat's settings: sampling, system prompt, tools. What is wrong is said below its field, and is not sent.

import { h } from "./dom.js";
import { SETTINGS, toolsOf } from "./request.js";

export class SettingsPanel {
  constructor(element, changed, close) {
    this.element = element;
    this.changed = changed;
    this.close = close;
  }

  show(chat, info) {
    this.fields = {};
    const defaults = { ...info.defaults, alternatives: 8 };
    const rows = SETTINGS.filter(([name]) => name !== "reasoning_effort" || info.reasoning).map((setting) => this.#row(chat, info, defaults, setting));
    const system = this.#area(chat, "system", "System prompt", 4, () => null);
    const tools = this.#area(chat, "tools", "Tools, a list in JSON", 6, (text) => {
      try {
        toolsOf(text);
        return null;
      } catch (error) {
        return error.message;
      }
    });
    const about = [info.format && `format ${info.format}`, info.context_tokens && `context ${info.context_tokens.toLocaleString("en")}`, info.has_experts && `${info.experts} experts`];
    this.element.replaceChildren(
      h("div", { class: "panel-head" }, h("h2", {}, "Settings"), h("button", { type: "button", class: "quiet", "aria-label": "Close settings", onclick: this.close }, "✕")),
      h("p", { class: "faint" }, about.filter(Boolean).join(" · ")), system, h("div", { class: "settings-grid" }, ...rows), tools,
    );
  }

  /** Marks the field that the server found wrong. Returns whether there is one. */
  mark(param, message) {
    const name = param?.split(/[.[]/)[0];
    const field = this.fields?.[name === "messages" ? "system" : name];
    if (!field || name === "messages") return false;
    field.say(message);
    return true;
  }

  #row(chat, info, defaults, [name, label, kind, bounds]) {
    const choices = kind === "model" ? info.models : Array.isArray(kind) ? kind : null;
    if (kind === "model" && info.models.length < 2) return null;
    const input = choices
      ? h("select", {}, h("option", { value: "" }, kind === "model" ? info.model : "default"), ...choices.map((one) => h("option", { value: one }, one)))
      : h("input", { type: kind === "text" ? "text" : "number", autocomplete: "off", placeholder: defaults[name] ?? "default", ...(kind === "text" ? {} : { ...bounds, inputmode: "decimal" }) });
    input.value = chat.settings[name] ?? "";
    return this.#field(name, label, input, () => {
      if (input.validity.badInput || !input.validity.valid) return input.validationMessage || "is not a number";
      const value = kind === "number" || kind === "integer" ? (input.value === "" ? null : Number(input.value)) : input.value || null;
      if (value === null) delete chat.settings[name];
      else chat.settings[name] = value;
      return null;
    });
  }

  #area(chat, name, label, rows, check) {
    const input = h("textarea", { rows: String(rows), spellcheck: name === "system" ? "true" : "false" });
    input.value = chat[name];
    return this.#field(name, label, input, () => {
      chat[name] = input.value;
      return check(input.value);
    });
  }

  #field(name, label, input, take) {
    const id = `setting-${name}`;
    const error = h("span", { class: "error", id: `${id}-error` });
    input.id = id;
    const say = (message) => {
      error.textContent = message ?? "";
      input.setAttribute("aria-invalid", String(Boolean(message)));
      if (message) input.setAttribute("aria-describedby", error.id);
      else input.removeAttribute("aria-describedby");
    };
    this.fields[name] = { input, say };
    input.addEventListener("input", () => {
      const wrong = take();
      say(wrong);
      this.changed();
    });
    return h("div", { class: "field" }, h("label", { for: id }, label), input, error);
  }
}
