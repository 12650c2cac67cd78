// The last requests, and one of them explained: what each candidate would have cost, in seconds, and what came of the choice.

import { byId, el, keepOneStop, rove, setAttribute, setName, setText, svg, table } from "./dom.js";
import { clock, count, percent, plural, seconds, some } from "./figures.js";
import { model } from "./model.js";
import { ask } from "./session.js";

const COSTS = [
  ["queue", "waiting behind others"],
  ["prefill", "reading the prompt"],
  ["load", "loading from the host"],
  ["steps", "waiting for steps"],
  ["memory", "waiting for memory"],
  ["congestion", "slowing others"],
  ["decode", "writing the answer"],
];
/** Candidates that are drawn; the rest are in the table. */
const MAX_BARS = 6;
/** Gaps in a stream that are told, in seconds. */
const GAP_FROM = 0.5;

const rows = new Map();
let body;
/** `id-attempt`, or `refused-number`. */
let picked = null;
let asked = 0;
let isHeld = false;

const keyOf = (request) => (request.cause ? `refused-${request.number}` : `${request.id}-${request.attempt}`);

export function prepareRequests() {
  const place = byId("requests");
  body = el("tbody", {});
  const columns = ["Time", "To", "Prompt", "Cached", "First token", "Status"];
  const head = el("tr", {}, ...columns.map((name, index) => el("th", { scope: "col", class: index > 1 ? "number" : null }, name)));
  place.append(el("table", {}, el("caption", { class: "unseen" }, "The last requests, the latest first"), el("thead", {}, head), body));
  rove(body, () => [...body.querySelectorAll("button")]);
  // What somebody points at does not run away.
  const hold = (held) => () => {
    isHeld = held;
    setText(byId("requests-note"), held ? "held while you are here" : "");
    if (!held) drawRequests();
  };
  place.addEventListener("pointerenter", hold(true));
  place.addEventListener("pointerleave", () => place.contains(document.activeElement) || hold(false)());
  place.addEventListener("focusin", hold(true));
  place.addEventListener("focusout", (event) => place.contains(event.relatedTarget) || hold(false)());
}

export function drawRequests() {
  const all = [...model.requests, ...model.refused].sort((one, other) => other.at_ms - one.at_ms);
  if (all.length === 0 && rows.size === 0) {
    if (!body.firstChild) body.append(el("tr", {}, el("td", { colspan: 6, class: "empty" }, "No request has come yet.")));
    return;
  }
  const known = new Map(all.map((request) => [keyOf(request), request]));
  if (!isHeld) {
    const shown = all.map((request) => row(request));
    if (body.children.length !== shown.length || shown.some((element, index) => body.children[index] !== element)) body.replaceChildren(...shown);
    for (const key of rows.keys()) if (!known.has(key)) rows.delete(key);
  }
  for (const [key, request] of known) rows.get(key)?.update(request);
  const buttons = [...body.querySelectorAll("button")];
  keepOneStop(buttons, buttons.find((button) => button.getAttribute("aria-current")));
  if (!picked && all[0]) pick(all[0]);
}

function row(request) {
  const key = keyOf(request);
  if (rows.has(key)) return rows.get(key).element;
  const open = el("button", { type: "button", onclick: () => pick(request) }, clock(request.at_ms));
  const cells = ["", "number", "number", "number", "number"].map((kind) => el("td", { class: kind || null }));
  const element = el("tr", {}, el("th", { scope: "row" }, open), ...cells);
  const to = el("div", {});
  cells[0].append(to);
  element.addEventListener("click", (event) => event.target === open || pick(request));
  const update = (now) => {
    if (now.cause) {
      setName(to, `refused: ${now.cause.replaceAll("_", " ")}`);
      const texts = ["–", "–", "–", now.count > 1 ? `${now.status} ×${count(now.count)}` : String(now.status)];
      texts.forEach((text, index) => setText(cells[index + 1], text));
      setText(open, clock(now.at_ms));
      cells.at(-1).classList.add("grave");
      element.classList.toggle("picked", key === picked);
      setAttribute(open, "aria-current", key === picked ? "true" : null);
      return;
    }
    const cached = now.cached ?? now.predicted_cached;
    const tokens = now.told_tokens ?? now.tokens;
    const share = tokens ? percent(cached / tokens) : "–";
    setName(to, now.attempt > 1 ? `${now.replica} (${now.attempt})` : now.replica);
    const texts = [tokens ? count(tokens) : "–", share, seconds(now.first_token), statusWords(now)];
    texts.forEach((text, index) => setText(cells[index + 1], text));
    cells.at(-1).classList.toggle("grave", hasFailed(now));
    element.classList.toggle("picked", key === picked);
    setAttribute(open, "aria-current", key === picked ? "true" : null);
  };
  update(request);
  rows.set(key, { element, update });
  return element;
}

/** How an answer ended, where its status does not say it. */
const ENDS = { complete: "", rejected: "", full: "", error: "", client_left: "left" };

/** `200`, `500`, `200 engine lost`; `…` while nothing is known. */
function statusWords({ status, end }) {
  const word = ENDS[end] ?? end.replaceAll("_", " ");
  return [status, word].filter(Boolean).join(" ") || "…";
}

const hasFailed = ({ status, end }) => status >= 500 || (end !== "" && ENDS[end] === undefined) || end === "full";

/** Shows why a request went where it went. */
export const explainRequest = (decision) => pick(decision);

async function pick(request) {
  picked = keyOf(request);
  drawRequests();
  const mine = (asked += 1);
  if (request.cause) {
    const now = model.refused.find((one) => one.number === request.number) ?? request;
    byId("explained").replaceChildren(...refusal(now));
    return;
  }
  try {
    const decisions = await ask(`/page/requests/${request.id}`);
    if (mine !== asked) return;
    const decision = decisions.find((one) => one.attempt === request.attempt) ?? decisions[0];
    byId("explained").replaceChildren(...explanation(decision, decisions.length));
    // Its first token may still be on its way.
    if (decision.first_token === null && Date.now() - decision.at_ms < 60_000) setTimeout(() => mine === asked && pick(request), 2000);
  } catch (error) {
    if (mine === asked) byId("explained").replaceChildren(el("p", { class: "empty" }, error.message));
  }
}

export function drawNothingPicked() {
  if (!picked) byId("explained").replaceChildren(el("p", { class: "empty" }, "Pick a request, and see what each replica would have cost it."));
}

const REASONS = {
  only: "was the only replica that could take the request.",
  cheapest: "was expected to answer soonest.",
  near_tie: "was drawn from those that were about as good.",
  ends_first: "was chosen for its time: no candidate’s job lasts long enough for the answer, and this one lasts longest.",
  last_resort: "was what was left: no replica was in good standing.",
};
const LEVELS = {
  exact: "What is cached is known exactly.",
  text: "What is cached is guessed from text that was sent there.",
  load: "Placed by load alone.",
};

/** Why the router refused a request before it chose a replica, and what helps. */
function refusal({ at_ms: at, cause, count: times, method, path, model: name, key, tenant, status, meaning }) {
  const parts = [clock(at), `${method} ${path}`, name && `model ${name}`, key ? `key ${key}` : "", tenant && `tenant ${tenant}`, `status ${status}`, `cause ${cause}`];
  if (times > 1) parts.push(`${count(times)} alike, this the latest`);
  return [
    el("p", { class: "verdict" }, el("b", {}, "Refused"), ` before a replica was chosen. ${meaning}`),
    el("p", { class: "note" }, parts.filter(Boolean).join(" · ")),
  ];
}

const total = (candidate) => COSTS.reduce((sum, [name]) => sum + candidate.terms[name], 0);

function explanation(decision, attempts) {
  const chosen = decision.scored[decision.chosen];
  const others = decision.scored.filter((candidate) => candidate !== chosen).sort((one, other) => total(one) - total(other));
  const ordered = [chosen, ...others];
  return [
    el("p", { class: "verdict" }, el("b", {}, chosen.replica), " ", verdict(decision, chosen, others)),
    bars(ordered, decision),
    outcome(decision, chosen),
    el("p", { class: "note" }, subtitle(decision, attempts)),
    numbers(ordered, chosen),
  ];
}

/** Why a request went to its replica, in one sentence or two. */
export function whyThere(decision) {
  const chosen = decision.scored[decision.chosen];
  const others = decision.scored.filter((candidate) => candidate !== chosen).sort((one, other) => total(one) - total(other));
  return verdict(decision, chosen, others);
}

function verdict(decision, chosen, others) {
  const sentences = [REASONS[decision.why] ?? ""];
  const best = others[0];
  if (best && decision.why === "cheapest" && total(best) > total(chosen)) {
    sentences[0] = `was expected to answer soonest: ${seconds(total(best) - total(chosen))} less than ${best.replica}.`;
    const biggest = COSTS.map(([name, words]) => [best.terms[name] - chosen.terms[name], words]).sort((one, other) => other[0] - one[0])[0];
    if (biggest[0] > 0) sentences.push(`Most of that is ${biggest[1]}.`);
  }
  sentences.push(LEVELS[decision.level] ?? "");
  if (decision.fallback) sentences.push(`Its tokens were not known (${decision.fallback}).`);
  return sentences.join(" ");
}

function bars(candidates, decision) {
  const shown = candidates.slice(0, MAX_BARS);
  const most = Math.max(...shown.map(total), 1e-9);
  const used = COSTS.filter(([name]) => shown.some((candidate) => candidate.terms[name] / most > 0.004));
  const legend = el("ul", { class: "legend" }, ...used.map(([name, words]) => el("li", { title: words }, el("i", { class: `swatch cost-${name}`, "aria-hidden": "true" }), name)));
  const lines = shown.map((candidate, index) => {
    let from = 0;
    const pieces = used.map(([name]) => {
      const width = (candidate.terms[name] / most) * 100;
      const piece = svg("rect", { class: `cost-${name}`, x: `${from.toFixed(2)}%`, width: `${Math.max(0, width).toFixed(2)}%`, height: 14 });
      from += width;
      return piece;
    });
    const said = used.map(([name]) => `${name} ${seconds(candidate.terms[name])}`).join(", ");
    const bar = svg("svg", { class: "cost-bar", role: "img", "aria-label": `${candidate.replica}: ${seconds(total(candidate))}; ${said}` }, ...pieces);
    const doubt = candidate.doubtful ? " doubtful" : "";
    const name = el("span", { class: "candidate" });
    setName(name, candidate.replica);
    const figures = el("span", { class: "figure" }, seconds(total(candidate)));
    const words = el("span", { class: "note" }, `${cachedWords(candidate, decision)}, ${candidate.in_flight} in flight${doubt}`);
    return el("li", { class: index === 0 ? "chosen" : null }, name, bar, figures, words);
  });
  const left = decision.candidates - shown.length;
  const rest = left > 0 ? el("p", { class: "note" }, `and ${plural(left, "candidate")} more`) : "";
  return el("div", { class: "bars" }, legend, el("ol", {}, ...lines), rest);
}

const hostWords = ({ loaded, read }, { tokens }) => {
  const of = (part, place) => (part ? `, ${percent(part / tokens)} ${place}` : "");
  return of(loaded - read, "on the host") + of(read, "in files");
};
const cachedWords = (candidate, decision) => (decision.tokens ? `${percent(candidate.matched / decision.tokens)} cached${hostWords(candidate, decision)}` : "tokens not known");

/** Predicted beside actual. */
function outcome(decision, chosen) {
  const { queue, prefill, load, steps, memory } = chosen.terms;
  const time = compare("First token", queue + prefill + load + steps + memory, decision.first_token, seconds);
  const cached = compare("Cached tokens", chosen.matched, decision.cached, count);
  return el("div", { class: "outcome" }, time, cached);
}

function compare(title, predicted, actual, write) {
  const most = Math.max(predicted, actual ?? 0) || 1;
  const line = (name, value, mark) => {
    const width = `${(((value ?? 0) / most) * 100).toFixed(1)}%`;
    const bar = svg("svg", { class: "compare-bar", "aria-hidden": "true" }, svg("rect", { class: mark, width, height: 8 }));
    return el("div", { class: "compare" }, el("dt", {}, name), el("dd", {}, bar, el("span", { class: "figure" }, value === null ? "not told" : write(value))));
  };
  return el("div", {}, el("h3", {}, title), el("dl", {}, line("predicted", predicted, "predicted"), line("actual", actual, "actual")));
}

function subtitle(decision, attempts) {
  const parts = [clock(decision.at_ms), decision.path, decision.model, `id ${decision.id}`];
  if (decision.client_id) parts.push(`client’s id ${decision.client_id}`);
  if (decision.queue_seconds > 0.0005) parts.push(`waited ${seconds(decision.queue_seconds)} here`);
  if (decision.status !== null || decision.end) parts.push(`answer ${statusWords(decision)}`);
  if (decision.between_tokens) parts.push(`${seconds(decision.between_tokens)} between tokens`);
  if (decision.total !== null) parts.push(`${seconds(decision.total)} to its end`);
  if (decision.longest_gap >= GAP_FROM) parts.push(`longest gap ${seconds(decision.longest_gap)}, after ${seconds(decision.longest_gap_at)}`);
  if (attempts > 1) parts.push(`attempt ${decision.attempt} of ${attempts}`);
  if (decision.tied > 1) parts.push(`${decision.tied} were about as good`);
  return parts.filter(Boolean).join(" · ");
}

function numbers(candidates, chosen) {
  const columns = ["Replica", "Total", ...COSTS.map(([name]) => name), "Cached", "Of that on host", "Of that in files", "To read", "In flight", "KV in use", "Report’s age"];
  const lines = candidates.map((candidate) => [
    candidate === chosen ? `${candidate.replica} (chosen)` : candidate.replica,
    seconds(total(candidate)),
    ...COSTS.map(([name]) => seconds(candidate.terms[name])),
    count(candidate.matched),
    count(candidate.loaded - candidate.read),
    count(candidate.read),
    count(candidate.uncached),
    String(candidate.in_flight),
    percent(candidate.kv_use),
    seconds(candidate.age),
  ]);
  const scroll = el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "All candidates as a table" }, table("What each candidate would have cost", columns, lines));
  return el("details", { class: "numbers" }, el("summary", {}, "All figures as a table"), scroll);
}
