// The fleet as a picture: a card for each host, a tile for each replica with its GPUs, its cache and what it runs.

import { arrange, byId, el, keepOneStop, rove, setAttribute, setName, setText, svg, table } from "./dom.js";
import { count, duration, gibibytes, percent, plural, seconds, short } from "./figures.js";
import { model, phaseOf, replicas, speed } from "./model.js";

/** From so many replicas on, tiles have their figures only. */
const MANY = 24;
/** Requests that are drawn as marks; more are a number alone. */
const MAX_MARKS = 32;

const cards = new Map();
const tiles = new Map();
let opened = () => {};
/** What somebody looks for, in small letters. */
let filter = "";

/** Whether a replica has all words of the filter in its name, phase, models or job. */
function matches(node, replica) {
  if (!filter) return true;
  const told = [replica.id, phaseOf(node, replica), node.job?.id ?? "", ...replica.models].join(" ").toLowerCase();
  return filter.split(/\s+/).every((word) => told.includes(word));
}

/** `open` is called with a replica's id, or a node's name, that somebody picks. */
export function prepareFleet(open) {
  opened = open;
  const hosts = byId("hosts");
  rove(hosts, () => [...hosts.querySelectorAll("button")]);
  byId("filter").addEventListener("input", (event) => {
    filter = event.target.value.trim().toLowerCase();
    drawFleet();
  });
  const keys = [["in-use", "KV in use"], ["cached", "cached"], ["running", "running"], ["waiting", "waiting"]];
  byId("fleet-legend").append(...keys.map(([mark, words]) => el("li", {}, el("i", { class: `swatch ${mark}`, "aria-hidden": "true" }), words)));
}

export function drawFleet() {
  const hosts = byId("hosts");
  const all = replicas();
  hosts.classList.toggle("many", all.length > MANY);
  for (const [map, names] of [[cards, model.nodes.map((node) => node.name)], [tiles, all.map(({ replica }) => replica.id)]]) {
    const kept = new Set(names);
    for (const key of map.keys()) if (!kept.has(key)) map.delete(key);
  }
  if (model.nodes.length === 0) {
    if (!hosts.querySelector(".empty")) hosts.replaceChildren(emptiness());
    return;
  }
  const shown = model.nodes.map((node) => ({ node, replicas: node.replicas.filter((replica) => matches(node, replica)) }));
  const cardsShown = shown.filter(({ replicas: kept }) => kept.length > 0 || !filter).map(({ node, replicas: kept }) => card(node, kept));
  if (cardsShown.length === 0) hosts.replaceChildren(el("p", { class: "empty" }, `No replica matches “${filter}”.`));
  else arrange(hosts, cardsShown);
  const count = shown.reduce((total, { replicas: kept }) => total + kept.length, 0);
  setText(byId("filter-note"), filter ? `${count} of ${all.length}` : "");
  keepOneStop([...hosts.querySelectorAll("button")], document.activeElement);
}

function emptiness() {
  const start = el("code", {}, "hostler agent --router HOST:PORT --model MODEL");
  return el("p", { class: "empty" }, "No node has come yet. On a GPU host: ", start);
}

function card(node, shown) {
  let known = cards.get(node.name);
  if (!known) {
    const name = el("button", { type: "button", class: "name", onclick: () => opened(node.name) });
    const job = el("span", { class: "note" });
    const grid = el("div", { class: "tiles" });
    known = { root: el("article", { class: "host" }, el("header", {}, el("h3", {}, name), job), grid), name, job, grid };
    cards.set(node.name, known);
  }
  setName(known.name, node.name);
  setText(known.job, nodeWords(node));
  known.root.classList.toggle("lost", !node.attached);
  arrange(known.grid, shown.map((replica) => tile(node, replica)));
  return known.root;
}

function nodeWords(node) {
  if (!node.attached) return "agent not connected";
  if (!node.job) return "";
  const left = node.job.leaves_at ? (node.job.leaves_at - model.at) / 1000 : null;
  return `job ${node.job.id}${left === null ? "" : left > 0 ? `, ${duration(left)} left` : ", leaving"}`;
}

function tile(node, replica) {
  let known = tiles.get(replica.id);
  if (!known) {
    known = new Tile(replica.id);
    tiles.set(replica.id, known);
  }
  known.update(node, replica);
  return known.root;
}

class Tile {
  constructor(id) {
    this.name = el("span", { class: "id" });
    this.phase = el("span", { class: "phase" });
    this.words = el("span", { class: "words" });
    this.cached = svg("rect", { class: "cached", height: 8 });
    this.used = svg("rect", { class: "in-use", height: 8 });
    const track = svg("rect", { class: "track", width: "100%", height: 8 });
    this.bar = svg("svg", { class: "kv" }, track, this.cached, this.used);
    this.share = el("span", { class: "figure" });
    // One mark each, drawn as the dashes of a line.
    this.running = svg("line", { class: "running", y1: 4, y2: 4 });
    this.waiting = svg("line", { class: "waiting", y1: 4, y2: 4 });
    this.marks = svg("svg", { class: "marks" }, this.running, this.waiting);
    this.load = el("span", { class: "figure" });
    this.tokens = el("span", { class: "tokens" });
    this.gpus = el("span", { class: "gpus" });
    this.ping = el("span", { class: "ping" });
    const lines = [
      el("span", { class: "row" }, this.name, this.phase),
      this.words,
      el("span", { class: "row kv-row" }, this.bar, this.share),
      el("span", { class: "row marks-row" }, this.marks, this.load),
      el("span", { class: "row token-row" }, this.tokens),
      this.gpus,
      this.ping,
    ];
    // Who listens hears one sentence instead.
    this.sentence = el("span", { class: "unseen" });
    const seen = el("span", { class: "seen", "aria-hidden": "true" }, ...lines);
    this.root = el("button", { type: "button", class: "tile", onclick: () => opened(id) }, seen, this.sentence);
  }

  update(node, replica) {
    const phase = phaseOf(node, replica);
    setAttribute(this.root, "data-phase", phase);
    setText(this.name, replica.id.startsWith(`${node.name}/`) ? `/${replica.id.slice(node.name.length + 1)}` : replica.id);
    setText(this.phase, phase);
    setText(this.words, tileWords(phase, replica));
    const cached = cachedShare(replica);
    setAttribute(this.cached, "width", `${(cached * 100).toFixed(1)}%`);
    setAttribute(this.used, "width", `${(replica.kv_use * 100).toFixed(1)}%`);
    setText(this.share, `${percent(replica.kv_use)}`);
    this.draw(replica);
    setText(this.load, replica.waiting ? `${replica.running} + ${replica.waiting}` : String(replica.running));
    setText(this.tokens, `${short(speed(replica.id).tokens)} tok/s`);
    this.drawGpus(replica.gpus);
    setText(this.sentence, sentence(node, replica, phase, cached));
  }

  draw({ running, waiting }) {
    const shown = Math.min(running, MAX_MARKS);
    setAttribute(this.running, "x2", shown * 6);
    const first = shown * 6 + (shown ? 4 : 0);
    setAttribute(this.waiting, "x1", first);
    setAttribute(this.waiting, "x2", first + Math.min(waiting, MAX_MARKS) * 6);
  }

  drawGpus(gpus) {
    while (this.gpus.children.length > gpus.length) this.gpus.lastElementChild.remove();
    gpus.forEach((gpu, index) => {
      let row = this.gpus.children[index];
      if (!row) {
        const used = svg("rect", { class: "memory", height: 4 });
        const bar = svg("svg", { class: "gpu-bar" }, svg("rect", { class: "track", width: "100%", height: 4 }), used);
        row = el("span", { class: "gpu" }, el("span", { class: "row" }, bar, el("span", { class: "figure" })), el("span", { class: "gpu-words" }));
        this.gpus.append(row);
      }
      const share = gpu.memory_used_bytes && gpu.memory_bytes ? gpu.memory_used_bytes / gpu.memory_bytes : 0;
      setAttribute(row.querySelector(".memory"), "width", `${(share * 100).toFixed(1)}%`);
      setText(row.querySelector(".figure"), memoryWords(gpu));
      setText(row.lastElementChild, [`GPU ${gpu.index}`, ...readings(gpu)].join(" · "));
      row.classList.toggle("hot", gpu.throttled.length > 0);
    });
  }

  /** A request has just gone there. */
  flash() {
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) return;
    const steps = [{ transform: "translateX(-100%)", opacity: 0.9 }, { transform: "translateX(100%)", opacity: 0 }];
    this.ping.animate(steps, { duration: 900, easing: "ease-out" });
  }
}

export function flash(ids) {
  for (const id of new Set(ids)) tiles.get(id)?.flash();
}

/** The share of an engine's blocks that the router knows to be cached. */
export const cachedShare = ({ cache, kv_blocks }) => (kv_blocks ? Math.min(1, cache.blocks / kv_blocks) : 0);

/** What a tile says below its name: what serves there, or why nothing does. */
function tileWords(phase, replica) {
  if (phase === "starting" || phase === "loading") {
    const { stage, percent: done, seconds_left: left } = replica.progress ?? {};
    return stage ? `${stage} ${done} %${left ? `, about ${duration(left)} left` : ""}` : replica.reason || "begins";
  }
  if (phase !== "ready") return (replica.failure?.cause || replica.reason).split("\n")[0];
  return [replica.models[0], replica.is_standby && "standby"].filter(Boolean).join(", ");
}

const memoryWords = (gpu) => (gpu.memory_used_bytes === null ? "" : `${gibibytes(gpu.memory_used_bytes)}/${gibibytes(gpu.memory_bytes)} GiB`);

function readings(gpu) {
  const words = [];
  if (gpu.utilisation !== null) words.push(`${gpu.utilisation} %`);
  if (gpu.celsius !== null) words.push(`${gpu.celsius} °C`);
  if (gpu.watts !== null) words.push(`${Math.round(gpu.watts)} W`);
  if (gpu.throttled.length > 0) words.push("held down");
  return words;
}

/** All that is known of a GPU. */
export function gpuWords(gpu) {
  return [`GPU ${gpu.index}`, memoryWords(gpu), ...readings(gpu)].filter(Boolean).join(", ");
}

function sentence(node, replica, phase, cached) {
  const parts = [`Replica ${replica.id}, ${phase}`, tileWords(phase, replica)];
  if (phase === "ready") {
    parts.push(`${plural(replica.running, "request")} running, ${replica.waiting} waiting`);
    parts.push(`KV cache ${percent(replica.kv_use)} in use, ${percent(cached)} cached`);
    parts.push(`${short(speed(replica.id).tokens)} tokens a second`);
  }
  return [...parts, ...replica.gpus.map(gpuWords)].filter(Boolean).join("; ");
}

const COLUMNS = ["Replica", "Phase", "Models", "Running", "Waiting", "KV in use", "Cached", "Tokens/s", "First token", "99 %", "Hits", "Served", "Restarts", "GPUs"];

export function fleetTable() {
  const rows = replicas().map(({ node, replica }) => [
    replica.id,
    phaseOf(node, replica),
    replica.models.join(", "),
    String(replica.running),
    String(replica.waiting),
    percent(replica.kv_use),
    replica.cache.exact && replica.kv_blocks ? percent(cachedShare(replica)) : "–",
    short(speed(replica.id).tokens),
    seconds(replica.first_tokens?.p50),
    seconds(replica.first_tokens?.p99),
    replica.prefix_queries ? percent(replica.prefix_hits / replica.prefix_queries) : "–",
    count(replica.served),
    String(replica.restarts),
    replica.gpus.map(gpuWords).join("; ") || "–",
  ]);
  return table("All replicas", COLUMNS, rows);
}
