// The end of an engine's log, asked for when somebody opens it. Who may only watch has none.

import { el } from "./dom.js";
import { model } from "./model.js";
import { ask, idPath } from "./session.js";

export function engineLog(id) {
  if (!model.mayOperate) return "";
  const text = el("pre", { class: "log", tabindex: "0", role: "region", "aria-label": `The end of the log of ${id}’s engine` });
  const again = el("button", { type: "button", onclick: () => read(id, text) }, "Read again");
  const details = el("details", { class: "numbers" }, el("summary", {}, "The engine’s log"), text, again);
  details.addEventListener("toggle", () => details.open && read(id, text));
  return details;
}

async function read(id, text) {
  try {
    const { lines } = await ask(`/page/logs/${idPath(id)}`);
    text.textContent = lines.join("\n") || "It has written nothing yet.";
    text.scrollTop = text.scrollHeight;
  } catch (error) {
    text.textContent = error.message;
  }
}
