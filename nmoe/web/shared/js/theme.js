// The switch between light and dark. Without a choice the browser's own setting holds.

const KEY = "nmoe.theme";
const ORDER = ["auto", "light", "dark"];
const SIGNS = { auto: "◐", light: "○", dark: "●" };

const current = () => (ORDER.includes(localStorage.getItem(KEY)) ? localStorage.getItem(KEY) : "auto");

function apply(button) {
  const theme = current();
  document.documentElement.dataset.theme = theme;
  button.textContent = SIGNS[theme];
  button.setAttribute("aria-label", `Colours: ${theme}`);
}

/** Applies the choice, and returns a function that makes the next one. */
export function themed(button) {
  apply(button);
  const next = () => {
    localStorage.setItem(KEY, ORDER[(ORDER.indexOf(current()) + 1) % ORDER.length]);
    apply(button);
  };
  button.addEventListener("click", next);
  return next;
}
