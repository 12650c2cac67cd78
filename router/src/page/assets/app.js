// The page: lets somebody in, draws each picture that comes, says how the connection is.

import { drawChat, prepareChat } from "./chat.js";
import { announce, arrange, byId, el, setAttribute, setText, table } from "./dom.js";
import { drawNothingPicked, drawRequests, prepareRequests } from "./explain.js";
import { clock, count, percent, plural, some } from "./figures.js";
import { drawFleet, flash, fleetTable, prepareFleet } from "./fleet.js";
import { openDialog } from "./dialog.js";
import { tenantHour } from "./hour.js";
import { advice, apply, concerns, findingName, model, noteEvent, replicas, serves } from "./model.js";
import { openDetail, updateDetail } from "./replica.js";
import { Refused, restore, signIn, watch } from "./session.js";
import { drawStrip, prepareStrip, stripTable } from "./strip.js";
import { prepareUsage } from "./usage.js";

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

prepareStrip();
prepareFleet(openDetail);
prepareRequests();
prepareChat();
prepareUsage();
for (const details of document.querySelectorAll("details.numbers")) details.addEventListener("toggle", drawTables);

function drawHealth() {
  const all = replicas();
  const ready = all.filter(serves).length;
  const trouble = model.totals.findings.map(({ kind }) => findingName(kind)).join(", ");
  const many = all.filter(({ replica }) => replica.is_simulated).length;
  const simulated = many === 0 ? "" : many === all.length ? " · simulated" : ` · ${many} simulated`;
  const words = all.length === 0 ? "no replica yet" : `${ready} of ${plural(all.length, "replica")} ready${simulated}`;
  setText(byId("health"), trouble ? `${trouble} · ${words}` : words);
  const phase = all.length === 0 ? "starting" : ready === all.length ? "ready" : ready === 0 ? "failed" : "draining";
  setAttribute(byId("health"), "data-phase", trouble ? "failed" : phase);
  byId("health").parentElement.classList.toggle("troubled", trouble !== "");
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
    const look = (name) => el("button", { type: "button", class: "name", onclick: () => openDialog(`Tenant ${name}`, [tenantHour(name)]) }, name);
    const rows = model.tenants.map((tenant) => [look(tenant.name), count(tenant.in_flight), percent(tenant.left)]);
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

function drawAdvice() {
  const found = advice();
  byId("advice").hidden = found.length === 0;
  const list = byId("advice-list");
  const key = JSON.stringify(found);
  if (list.dataset.key === key) return;
  list.dataset.key = key;
  const item = (one) => el("li", {}, el("b", {}, some(one.replicas, 3)), ` ${one.evidence}`, el("span", { class: "remedy" }, one.advice));
  list.replaceChildren(...found.map(item));
}

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
  draw("lines-numbers", stripTable);
}

function draw() {
  drawHealth();
  drawConcerns();
  drawStrip();
  drawFleet();
  drawChat();
  drawRequests();
  drawNothingPicked();
  drawDemand();
  drawAdvice();
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
  byId("chat-key").value = "";
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
