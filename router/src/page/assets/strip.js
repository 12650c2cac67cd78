// A request's way through the fleet, in figures of now and in lines of the last hour.

import { Chart, samplesTable } from "./charts.js";
import { byId, el, setText } from "./dom.js";
import { percent, seconds, short } from "./figures.js";
import { failedPerSecond, fleetSpeed, model, replicas, sum, verdictSpeed } from "./model.js";

/** From this share of failed requests on, the figure is red: the router's own limit for a finding. */
const TROUBLING_SHARE = 0.05;

const rate = (value) => (value > 0 && value < 10 ? value.toFixed(1) : short(value));

const CHARTS = [
  [
    "requests-lines",
    "Requests",
    rate,
    [
      { name: "requests/s", of: (step) => step.requests_per_second, mark: "first" },
      { name: "failed/s", of: failedPerSecond, mark: "bad" },
    ],
  ],
  [
    "queues",
    "Load",
    short,
    [
      { name: "running", of: (step) => step.running, mark: "first" },
      { name: "waiting", of: (step) => step.queued + step.waiting, mark: "second" },
    ],
  ],
  ["throughput", "Throughput", short, [{ name: "tokens/s", of: (step) => step.tokens_per_second, mark: "first" }]],
  [
    "latency",
    "First token",
    seconds,
    [
      { name: "median", of: (step) => step.first_tokens?.p50 ?? null, mark: "first" },
      { name: "99 %", of: (step) => step.first_tokens?.p99 ?? null, mark: "second" },
    ],
  ],
];

let charts = [];
let cells = [];

export function prepareStrip() {
  charts = CHARTS.map(([id, title, format, lines]) => new Chart(byId(id), title, lines, format));
  cells = ["requests/s", "failed/s", "waiting", "running", "tokens/s", "first token", "cached"].map((name) => {
    const value = el("b", { class: "big" }, "–");
    const note = el("span", { class: "note" });
    return { value, note, root: el("li", {}, el("span", { class: "label" }, name), value, note) };
  });
  byId("flow").append(...cells.map(({ root }) => root));
}

export function drawStrip() {
  const speed = fleetSpeed();
  const ended = verdictSpeed();
  const failed = ended.full + ended.error;
  const all = replicas().map(({ replica }) => replica);
  const [running, waiting] = [sum(all, (one) => one.running), sum(all, (one) => one.waiting)];
  const [queries, hits] = [sum(all, (one) => one.prefix_queries), sum(all, (one) => one.prefix_hits)];
  const first = model.totals.first_tokens;
  const figures = [
    [rate(speed.requests), "to all replicas"],
    [rate(failed), failureWords(ended)],
    [short(model.totals.queued), waiting ? `and ${short(waiting)} in engines` : "in the router"],
    [short(running), `${short(model.totals.in_flight)} from here`],
    [short(speed.tokens), running ? `${short(speed.tokens / running)} per request` : "generated"],
    [seconds(first?.p50), first ? `99 %: ${seconds(first.p99)}` : "no stream lately"],
    [queries ? percent(hits / queries) : "–", "of prompts"],
  ];
  figures.forEach(([value, note], index) => {
    setText(cells[index].value, value);
    setText(cells[index].note, note);
    cells[index].note.title = note;
  });
  cells[1].root.classList.toggle("troubled", failed > 0 && failed >= TROUBLING_SHARE * (failed + ended.answered));
  charts.forEach((chart) => chart.update(model.history, model.at));
}

/** What failed, of this router's requests. */
function failureWords({ full, error, client_fault: theirs }) {
  const parts = [];
  if (full > 0) parts.push(`${rate(full)} no room`);
  if (error > 0) parts.push(`${rate(error)} errors`);
  if (parts.length === 0 && theirs > 0) parts.push(`${rate(theirs)} of clients’ own fault`);
  return parts.join(", ") || "of this router";
}

export const stripTable = () => samplesTable(model.history);
