// Puts the page together: shows the view that the address names, and asks for what is new while a run goes on.

import { KeyWanted, isExported, setKey } from "./ask.js";
import { curves } from "./curves.js";
import { $, h } from "./dom.js";
import { experts } from "./experts.js";
import { areOn, listen, switchOn } from "./keys.js";
import { list } from "./list.js";
import { overview } from "./overview.js";
import { link, route } from "./route.js";
import { sample } from "./sample.js";
import { samples } from "./samples.js";
import { themed } from "./theme.js";
import { alerts, config, problems, step, time } from "./views.js";

const VIEWS = { list, overview, curves, samples, sample, problems, experts, alerts, time, config, step };
const TABS = { overview: "Overview", curves: "Curves", samples: "Samples", problems: "Problems", experts: "Experts", alerts: "Alerts", time: "Time", config: "Configuration" };
const EVERY_MS = 3000;

let shown = 0;
let here = {};

async function show() {
  const number = ++shown;
  const where = route();
  const view = VIEWS[where.view] ? where.view : "overview";
  $("title").textContent = where.runs.length ? where.runs.join(", ") : "Runs";
  document.title = where.runs.length ? `${where.runs[0]}: nmoe dashboard` : "nmoe dashboard";
  const several = new Set(["overview", "curves", "alerts", "time", "config"]);
  const tabs = Object.entries(TABS).filter(([name]) => where.runs.length < 2 || several.has(name));
  $("views").replaceChildren(...(where.runs.length ? tabs.map(([name, label]) => h("a", { href: link(where.runs, name), "aria-current": name === view ? "page" : null }, label)) : []));
  const place = h("div");
  $("main").dataset.ready = "";
  try {
    // A view draws into an element of its own, so that the answer to an earlier address does not overwrite a later one.
    const made = (await draw(view, place, where, number)) ?? {};
    if (number !== shown) return;
    here = made;
    notice("");
  } catch (error) {
    if (number === shown) fail(error);
  }
  if (number === shown) $("main").dataset.ready = view;
}

async function draw(view, place, where, number) {
  if (number === shown) $("main").replaceChildren(place);
  return VIEWS[view](place, where);
}

function notice(text) {
  if ($("notice").textContent !== text) $("notice").textContent = text;
}

function fail(error) {
  if (error instanceof KeyWanted) {
    if (!$("key-dialog").open) $("key-dialog").showModal();
    return;
  }
  notice(error.message);
}

let waiting = false;
async function follow() {
  if (document.hidden || waiting || isExported || !here.update) return;
  waiting = true;
  const number = shown;
  try {
    const running = await here.update();
    if (number === shown) $("live").textContent = running ? "follows the run" : "";
    notice("");
  } catch (error) {
    if (number === shown) fail(error);
  } finally {
    waiting = false;
  }
}

const next = themed($("theme"));
$("theme").addEventListener("click", () => here.redraw?.());
const tab = (name) => () => route().runs.length && (location.hash = link(route().runs, name).slice(1));
const SHORTCUTS = [
  ["g", "go to the list of runs", () => (location.hash = "#/")],
  ...Object.entries(TABS).map(([name, label], number) => [String(number + 1), `show ${label.toLowerCase()}`, tab(name)]),
  ["j", "show the next sample of the prompt", () => here.next?.()],
  ["k", "show the previous sample of the prompt", () => here.previous?.()],
  ["/", "go to the first field", () => $("main").querySelector("input:not([type=checkbox])")?.focus()],
  ["d", "switch between light and dark", () => { next(); here.redraw?.(); }],
  ["?", "show these keys", () => $("help").showModal()],
];
$("keys").tBodies[0].append(...SHORTCUTS.map(([keys, does]) => h("tr", {}, h("td", {}, h("kbd", {}, keys)), h("td", {}, does))));
$("letters").checked = areOn();
$("letters").addEventListener("change", () => switchOn($("letters").checked));
$("open-help").addEventListener("click", () => $("help").showModal());
$("close-help").addEventListener("click", () => $("help").close());
listen(SHORTCUTS, () => {});
$("key-use").addEventListener("click", () => {
  setKey($("key").value);
  $("key-dialog").close();
  show();
});
addEventListener("hashchange", show);
setInterval(follow, EVERY_MS);
show();
