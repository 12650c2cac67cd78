// The page: lets somebody in, draws each picture that comes, says how the connection is.

import { Chart, samplesTable } from "./charts.js";
import { announce, arrange, byId, el, setAttribute, setText, svg, table } from "./dom.js";
import { drawNothingPicked, drawRequests, prepareRequests } from "./explain.js";
import { clock, count, percent, plural, seconds, short } from "./figures.js";
import { drawFleet, flash, fleetTable, prepareFleet } from "./fleet.js";
import { apply, concerns, fleetSpeed, model, noteEvent, replicas, serves, sum } from "./model.js";
import { openDetail, updateDetail } from "./replica.js";
import { Refused, restore, signIn, watch } from "./session.js";

const MAX_CONCERNS = 6;
const MAX_EVENTS = 200;

const THEMES = { auto: "Theme: system", light: "Theme: light", dark: "Theme: dark" };
let theme = localStorage.getItem("hostler-theme") ?? "auto";

function showTheme() {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  setText(byId("theme"), THEMES[theme]);
}

byId("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  theme = names[(names.indexOf(theme) + 1) % names.length];
  localStorage.setItem("hostler-theme", theme);
  showTheme();
});

const throughput = new Chart(byId("throughput"), "Throughput", [{ name: "tokens/s", of: (sample) => sample.tokens_per_second, mark: "first" }], short);
const latency = new Chart(
  byId("latency"),
  "First token",
  [
    { name: "median", of: (sample) => sample.first_tokens?.p50 ?? null, mark: "first" },
    { name: "99 %", of: (sample) => sample.first_tokens?.p99 ?? null, mark: "second" },
  ],
  seconds,
);

const flow = ["requests/s", "waiting", "running", "tokens/s", "first token", "cached"].map((name) => {
  const value = el("b", { class: "big" }, "–");
  const note = el("span", { class: "note" });
  return { name, value, note, root: el("li", {}, el("span", { class: "label" }, name), value, note) };
});
byId("flow").append(...flow.map(({ root }) => root));
prepareFleet(openDetail);
prepareRequests();
for (const details of document.querySelectorAll("details.numbers")) details.addEventListener("toggle", drawTables);

/** A request's way through the fleet, in figures. */
function drawFlow() {
  const speed = fleetSpeed();
  const all = replicas().map(({ replica }) => replica);
  const [running, waiting] = [sum(all, (one) => one.running), sum(all, (one) => one.waiting)];
  const [queries, hits] = [sum(all, (one) => one.prefix_queries), sum(all, (one) => one.prefix_hits)];
  const first = model.totals.first_tokens;
  const figures = [
    [speed.requests < 10 ? speed.requests.toFixed(1) : short(speed.requests), "to all replicas"],
    [short(model.totals.queued), waiting ? `and ${short(waiting)} in engines` : "in the router"],
    [short(running), `${short(model.totals.in_flight)} of this router`],
    [short(speed.tokens), running ? `${short(speed.tokens / running)} per request` : "generated"],
    [seconds(first?.p50), first ? `99 %: ${seconds(first.p99)}` : "no stream lately"],
    [queries ? percent(hits / queries) : "–", "of prompt tokens"],
  ];
  figures.forEach(([value, note], index) => {
    setText(flow[index].value, value);
    setText(flow[index].note, note);
  });
  byId("flow").classList.toggle("moves", speed.requests > 0);
}

function drawHealth() {
  const all = replicas();
  const ready = all.filter(serves).length;
  const troubles = { "answers-fail": "requests fail", "first-tokens-slow": "first tokens are slow" };
  const trouble = model.totals.findings.map(({ kind }) => troubles[kind] ?? kind).join(", ");
  const simulated = all.some(({ replica }) => replica.is_simulated) ? " · simulated" : "";
  const words = all.length === 0 ? "no replica yet" : `${ready} of ${plural(all.length, "replica")} ready${simulated}`;
  setText(byId("health"), trouble ? `${trouble} · ${words}` : words);
  const phase = all.length === 0 ? "starting" : ready === all.length ? "ready" : ready === 0 ? "failed" : "draining";
  setAttribute(byId("health"), "data-phase", trouble ? "failed" : phase);
  document.title = all.length === 0 ? "Hostler" : `${trouble ? "⚠ " : ""}${ready}/${all.length} ready – Hostler`;
}

function drawConcerns() {
  const found = concerns();
  byId("attention").hidden = found.length === 0;
  const shown = found.slice(0, MAX_CONCERNS);
  const item = ({ subject, words, remedy, grave }, index) => {
    // What helps several is said once, below the last of them.
    const helps = remedy && remedy !== shown[index + 1]?.remedy ? el("span", { class: "remedy" }, remedy) : "";
    return el("li", { class: grave ? "grave" : null }, el("b", {}, subject), ` ${words}`, helps);
  };
  const list = byId("attention-list");
  const key = JSON.stringify(found);
  if (list.dataset.key === key) return;
  list.dataset.key = key;
  const more = found.length > MAX_CONCERNS ? [el("li", {}, `and ${found.length - MAX_CONCERNS} more`)] : [];
  list.replaceChildren(...shown.map(item), ...more);
}

function drawDemand() {
  const parts = [];
  if (model.models.length > 0) {
    const rows = model.models.map((known) => [known.model, String(serving(known.model)), count(known.in_flight), count(known.waiting)]);
    parts.push(table("Models", ["Model", "Ready", "In flight", "Waiting"], rows));
  }
  if (model.tenants.length > 0) {
    const rows = model.tenants.map((tenant) => [tenant.name, count(tenant.in_flight), percent(tenant.left)]);
    parts.push(table("Tenants", ["Tenant", "In flight", "Left of its limit"], rows));
  }
  if (parts.length === 0) parts.push(el("p", { class: "empty" }, "No model is there yet. Tenants appear when one with limits sends requests."));
  const place = byId("demand");
  const key = parts.map((part) => part.textContent).join();
  if (place.dataset.key === key) return;
  place.dataset.key = key;
  place.replaceChildren(...parts);
}

const serving = (name) => replicas().filter((one) => serves(one) && one.replica.models.includes(name)).length;

const eventRows = new WeakMap();

function drawEvents() {
  const place = byId("events");
  if (model.events.length === 0) {
    if (!place.firstChild) place.append(el("li", { class: "empty" }, "Nothing has happened in the last hour."));
    return;
  }
  const row = (event) => {
    if (!eventRows.has(event)) {
      eventRows.set(event, el("li", { class: event.grave ? "grave" : null }, el("time", {}, clock(event.at)), " ", event.words));
    }
    return eventRows.get(event);
  };
  const [before] = place.children;
  arrange(place, model.events.slice(0, MAX_EVENTS).map(row));
  if (before && before !== place.firstChild) announce(model.events[0].words);
}

function drawTables() {
  const draw = (id, content) => {
    const details = byId(id);
    if (details.open) details.querySelector(".scroll").replaceChildren(content());
  };
  draw("fleet-numbers", fleetTable);
  draw("lines-numbers", () => samplesTable(model.history));
}

function draw() {
  drawHealth();
  drawConcerns();
  drawFlow();
  throughput.update(model.history, model.at);
  latency.update(model.history, model.at);
  drawFleet();
  drawRequests();
  drawNothingPicked();
  drawDemand();
  drawEvents();
  updateDetail();
  drawTables();
}

let wasLive = false;

function tell(state) {
  const place = byId("connection");
  const isLive = state === "live";
  if (isLive) setText(place, `live, router ${model.version || ""}`.trim());
  else setText(place, `${state}; trying again. What you see is of ${model.at ? clock(model.at) : "no time"}.`);
  document.documentElement.classList.toggle("stale", !isLive);
  if (isLive !== wasLive && model.at > 0) {
    noteEvent(isLive ? "the router answers again" : state, !isLive, Date.now());
    drawEvents();
  }
  wasLive = isLive;
}

function show(id) {
  for (const one of ["page", "sign-in"]) byId(one).hidden = one !== id;
}

function askForSignIn(words) {
  show("sign-in");
  for (const dialog of document.querySelectorAll("dialog")) dialog.close();
  setText(byId("refusal"), words);
  setText(byId("connection"), "");
  setText(byId("health"), "");
  byId("rights").hidden = true;
}

async function run(begin) {
  try {
    const session = await begin();
    if (!session) return askForSignIn("");
    model.mayOperate = session.may_operate;
    const rights = byId("rights");
    rights.hidden = false;
    setText(rights, session.may_operate ? "operating" : "watching only");
    show("page");
    await watch((event) => {
      const arrived = apply(event);
      draw();
      flash(arrived);
    }, tell);
  } catch (error) {
    askForSignIn(error instanceof Refused ? error.message : "The router is not reached: is it running?");
  }
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const field = byId("key");
  const key = field.value;
  field.value = "";
  run(() => signIn({ key }));
});

// Another address of `hostler page`, opened where the page is already.
addEventListener("hashchange", () => location.hash.startsWith("#token=") && location.reload());
showTheme();
run(restore);
