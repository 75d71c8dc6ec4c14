// The list of conversations.

import { button, h } from "./dom.js";

export function showChats(list, chats, current, { open, remove }) {
  const focused = list.contains(document.activeElement) ? document.activeElement.dataset.chat : null;
  list.replaceChildren(...chats.map((chat) => {
    const title = chat.title || "New chat";
    const opener = button(title, () => open(chat), { class: "chat", "data-chat": chat.id, "aria-current": chat === current ? "true" : null });
    const remover = button("✕", () => {
      // A second press deletes, so that one by mistake does not.
      if (remover.classList.contains("sure")) return remove(chat);
      remover.classList.add("sure");
      remover.textContent = "Delete?";
      remover.setAttribute("aria-label", `Press again to delete ${title}`);
    }, { class: "quiet remove", "aria-label": `Delete ${title}` });
    remover.addEventListener("blur", () => {
      remover.classList.remove("sure");
      remover.textContent = "✕";
      remover.setAttribute("aria-label", `Delete ${title}`);
    });
    return h("li", {}, opener, remover);
  }));
  if (focused) list.querySelector(`[data-chat="${focused}"]`)?.focus();
}
