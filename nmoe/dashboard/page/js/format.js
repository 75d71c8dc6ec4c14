// Writes numbers for people, and names the colours of runs.

// Okabe and Ito's palette, whose colours colour-blind readers can distinguish.
export const COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"];
export const colour = (number) => COLOURS[number % COLOURS.length];

export function figure(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e9) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size >= 1e5 || (size < 1e-3 && size > 0) ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

export const share = (value) => `${Number((100 * value).toPrecision(3))}%`;
