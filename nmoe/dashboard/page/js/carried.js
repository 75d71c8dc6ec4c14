// Answers the page's questions in an exported page, from the answers that it carries.

const BOUNDS = { step: "step", reward: "reward", tokens: "tokens", version: "newest" };
const EQUAL = ["problem", "failure", "outcome", "left_out", "source"];

/** Returns the answer to a question, whose parameters are a URLSearchParams in alphabetical order; undefined if there is none. */
export function carriedAnswer(answers, name, query) {
  const params = Object.fromEntries(query);
  const of = (kind, run) => answers[`${kind}?${new URLSearchParams({ run })}`];
  if (name === "samples") return filtered(of("rows", params.run) ?? [], params);
  if (name === "curves") return curves(params.runs.split("\n"), params.names.split(","), params.smooth, (run) => of("every", run));
  if (name === "bands") return answers[`bands?${new URLSearchParams({ runs: params.runs, smooth: params.smooth ?? "" })}`] ?? { bands: {} };
  if (name === "diff") return differences(params.runs.split("\n"), (run) => of("run", run).config);
  return answers[`${name}?${query}`];
}

/** Filters and sorts rows as the server does. */
function filtered(rows, params) {
  const fits = (row) =>
    EQUAL.every((name) => !params[name] || row[name] === params[name]) &&
    (!params.wrong || row.wrong === 1) &&
    Object.entries(BOUNDS).every(([name, column]) =>
      (!params[`${name}_min`] || row[column] >= Number(params[`${name}_min`])) &&
      (!params[`${name}_max`] || row[column] <= Number(params[`${name}_max`]))) &&
    (!params.text || row.text.includes(params.text));
  const order = params.order ?? "newest";
  const name = order.replace("-", "");
  const sign = order.startsWith("-") || order === "oldest" || order === "problem" ? 1 : -1;
  const value = (row) => (name === "newest" || name === "oldest" ? row.step : row[name]);
  const found = rows.filter(fits).sort((a, b) => (value(a) < value(b) ? -sign : value(a) > value(b) ? sign : a.line - b.line));
  return { rows: found, more: null, count: found.length, counted: true, indexing: 0 };
}

function curves(runs, names, smooth, every) {
  const parts = runs.map((run) => {
    const all = every(run);
    const chosen = (of) => Object.fromEntries(names.filter((name) => name in of).map((name) => [name, of[name]]));
    return [run, { ...all, curves: chosen(all.curves), smooth: smooth ? chosen(all.smoothed[smooth]) : {}, status: "ended" }];
  });
  return { runs: Object.fromEntries(parts) };
}

const NOT_COMPARED = ["run.name", "run.directory", "run.resume"];

function differences(runs, config) {
  const configs = runs.map(config);
  const keys = [...new Set(configs.flatMap(Object.keys))].filter((key) => !NOT_COMPARED.includes(key));
  const shown = (value) => (value === undefined ? "absent" : JSON.stringify(value));
  const rows = keys.map((key) => [key, ...configs.map((one) => shown(one[key]))]);
  return { runs, rows: rows.filter(([, first, ...rest]) => rest.some((value) => value !== first)), same: rows.length };
}
