// The last hour of one replica or one tenant, asked for when somebody looks at it.

import { Chart } from "./charts.js";
import { el } from "./dom.js";
import { percent, seconds, short } from "./figures.js";
import { ask, idPath } from "./session.js";

/** A step's figure, or nothing where its subject was not there. */
const figure = (name) => (step) => step[name] ?? null;

const OF_REPLICA = [
  ["Tokens/s", short, [{ name: "tokens/s", of: figure("tokens_per_second"), mark: "first" }]],
  ["First token", seconds, [{ name: "median", of: figure("first_token"), mark: "first" }]],
  [
    "Load",
    short,
    [
      { name: "running", of: figure("running"), mark: "first" },
      { name: "waiting", of: figure("waiting"), mark: "second" },
    ],
  ],
  ["KV cache", percent, [{ name: "in use", of: figure("kv_use"), mark: "first" }], 1],
];

const OF_TENANT = [
  [
    "Requests",
    short,
    [
      { name: "let in/s", of: figure("requests_per_second"), mark: "first" },
      { name: "refused by its limits/s", of: figure("refused_per_second"), mark: "bad" },
    ],
  ],
  ["Tokens/s", short, [{ name: "generated/s", of: figure("tokens_per_second"), mark: "first" }]],
];

export const replicaHour = (id) => hour(`/page/steps/replica/${idPath(id)}`, OF_REPLICA);
export const tenantHour = (name) => hour(`/page/steps/tenant/${encodeURIComponent(name)}`, OF_TENANT);

function hour(path, charts) {
  const place = el("div", { class: "hour" }, el("p", { class: "empty" }, "Asking for the last hour …"));
  fill(place, path, charts);
  return place;
}

async function fill(place, path, charts) {
  try {
    const steps = (await ask(path)).map(([at, step]) => ({ at, ...step }));
    const panels = charts.map(([title, format, lines, most]) => {
      const panel = el("div", { class: "chart" });
      new Chart(panel, title, lines, format, most).update(steps, Date.now());
      return panel;
    });
    place.replaceChildren(...panels);
  } catch (error) {
    place.replaceChildren(el("p", { class: "empty" }, error.message));
  }
}
