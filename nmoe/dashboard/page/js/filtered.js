// Filters and sorts the rows that an exported page carries, as the server does with all of them.

const BOUNDS = { step: "step", reward: "reward", tokens: "tokens", version: "newest" };
const EQUAL = ["problem", "failure", "outcome", "left_out", "source"];

export function filtered(rows, params) {
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
