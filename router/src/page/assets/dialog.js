// A dialog that shows one thing closely, with a heading and a button that closes it.

import { el } from "./dom.js";

/** Opens it; `closed` is called when it has been closed. */
export function openDialog(title, children, closed = () => {}) {
  const close = el("button", { type: "button", class: "quiet close", "aria-label": "Close" }, "✕");
  const heading = el("h2", { id: "detail-heading" }, title);
  const dialog = el("dialog", { class: "detail", "aria-labelledby": "detail-heading" }, el("header", {}, heading, close), ...children);
  close.addEventListener("click", () => dialog.close());
  // The backdrop is the dialog's own box outside of its content.
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  dialog.addEventListener("close", () => {
    dialog.remove();
    closed();
  });
  document.body.append(dialog);
  dialog.showModal();
  return heading;
}
