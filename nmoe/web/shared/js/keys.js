// Keyboard shortcuts. Letters work outside of text fields only, and can be switched off.

const LETTERS = "nmoe.letters";

/** `shortcuts` are rows [keys, what they do, function]; Escape is handled by `escape`. */
export function listen(shortcuts, escape) {
  document.addEventListener("keydown", (event) => {
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape" && !document.querySelector("dialog[open]")) return escape();
    if (event.target.closest("input, textarea, select, dialog[open]") || !areOn()) return;
    const found = shortcuts.find(([keys]) => keys.split(" ").includes(event.key));
    if (!found?.[2]) return;
    event.preventDefault();
    found[2]();
  });
}

export const areOn = () => localStorage.getItem(LETTERS) !== "off";
export const switchOn = (on) => localStorage.setItem(LETTERS, on ? "on" : "off");
