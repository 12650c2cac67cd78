// What was used, by day, by whom, and by the nodes of a fleet: asked for when somebody opens it.

import { byId, el, table } from "./dom.js";
import { count } from "./figures.js";
import { ask } from "./session.js";

const HEADINGS = ["Requests", "Failed", "Prompt tokens", "of them cached", "Answer tokens"];
const USES = ["serving", "idle", "loading", "starting", "overlap", "leaving"];

export function prepareUsage() {
  const details = byId("usage-numbers");
  details.addEventListener("toggle", () => details.open && read());
  byId("usage-again").addEventListener("click", read);
}

async function read() {
  const place = byId("usage");
  try {
    place.replaceChildren(...tables(await ask("/page/usage")));
  } catch (error) {
    place.replaceChildren(el("p", { class: "note" }, error.message));
  }
}

const cells = (counts) =>
  [counts.requests, counts.failed, counts.prompt_tokens, counts.cached_tokens, counts.answer_tokens].map(count);

function tables({ days, holders, others, entries }) {
  const found = [];
  const add = (words, columns, rows) => found.push(el("h3", {}, words), table(words, columns, rows));
  if (entries.length > 0) {
    const hours = ({ node_seconds }) => USES.map((use) => ((node_seconds[use] ?? 0) / 3600).toFixed(1));
    add("Node-hours since the first job", ["Model", ...USES, "Budget"], entries.map((entry) => [entry.name, ...hours(entry), entry.budget || "none"]));
  }
  if (days.length > 0) {
    add("The last 30 days", ["Day (UTC)", ...HEADINGS], days.map(([day, counts]) => [day, ...cells(counts)]));
    const rows = holders.map(({ key, tenant, model, ...counts }) => [tenant || "no tenant", key || "no key", model || "no model", ...cells(counts)]);
    add("By tenant, key and model", ["Tenant", "Key", "Model", ...HEADINGS], rows);
  }
  if (others > 0) found.push(el("p", { class: "note" }, `${count(others)} more are in \`hostler usage\`.`));
  return found.length > 0 ? found : [el("p", { class: "note" }, "Nothing was counted yet.")];
}
