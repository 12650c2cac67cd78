// Asks a model through the edge, as any client does, and says of each answer where it went and why.

import { announce, byId, el, setText } from "./dom.js";
import { explainRequest, whyThere } from "./explain.js";
import { count, seconds } from "./figures.js";
import { model } from "./model.js";
import { ask, askEdge, pieces } from "./session.js";

/** How often, and after how long, the router is asked again for what came of a request. */
const TRIES = 10;
const RETRY_MS = 300;

/** The conversation, as the model gets it. */
let messages = [];
/** How clients reach the edge; asked for once. */
let edge = null;
/** Set while an answer comes. */
let stop = null;

const pause = (millis) => new Promise((resolve) => setTimeout(resolve, millis));

export function prepareChat() {
  byId("chat-form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (stop) return;
    const field = byId("chat-text");
    const text = field.value.trim();
    if (!text) return;
    field.value = "";
    send(text);
  });
  byId("chat-text").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    byId("chat-form").requestSubmit();
  });
  byId("chat-stop").addEventListener("click", () => stop?.abort());
  byId("chat-new").addEventListener("click", () => {
    stop?.abort();
    messages = [];
    byId("chat-log").replaceChildren();
    byId("chat-log").hidden = byId("chat-new").hidden = true;
    byId("chat-text").focus();
  });
  byId("chat-model").addEventListener("change", drawAccess);
  byId("chat-copy").addEventListener("click", copy);
}

export function drawChat() {
  byId("chat").hidden = !model.mayOperate;
  if (!model.mayOperate) return;
  const names = model.models.map((known) => known.model);
  const select = byId("chat-model");
  if (select.dataset.key !== JSON.stringify(names)) {
    const chosen = select.value;
    select.dataset.key = JSON.stringify(names);
    select.replaceChildren(...names.map((name) => el("option", { value: name, selected: name === chosen }, name)));
    drawAccess();
  }
  byId("chat-send").disabled = names.length === 0;
  if (edge === null) learnEdge();
}

async function learnEdge() {
  edge = {};
  try {
    edge = await ask("/page/edge");
    drawAccess();
  } catch (error) {
    edge = null;
    setText(byId("chat-access"), error.message);
  }
}

/** How any other client asks the same. */
function drawAccess() {
  if (!edge?.base_url) return;
  byId("chat-key-field").hidden = !edge.needs_key || edge.session_key !== null;
  const keys = !edge.needs_key
    ? "It asks for no key."
    : `Its keys are in ${edge.keys_file}; ${edge.session_key ? `this page asks with the key ${edge.session_key}.` : `${edge.key_file ? `yours is in ${edge.key_file}` : "`hostler keys create` makes one"}.`}`;
  setText(byId("chat-access"), `The edge is at ${edge.base_url}. ${keys}`);
  setText(byId("chat-curl"), curlLine());
}

const quote = (word) => `'${word.replaceAll("'", "'\\''")}'`;

function curlLine() {
  const body = { model: byId("chat-model").value, messages: [{ role: "user", content: "Hello" }] };
  const trust = edge.authority_file ? ` --cacert ${quote(edge.authority_file)}` : "";
  const key = edge.key_file ? `$(cat ${quote(edge.key_file)})` : "$OPENAI_API_KEY";
  const shown = edge.needs_key ? ` -H "authorization: Bearer ${key}"` : "";
  return `curl${trust} ${edge.base_url}/chat/completions${shown} -H 'content-type: application/json' -d ${quote(JSON.stringify(body))}`;
}

async function copy() {
  try {
    await navigator.clipboard.writeText(byId("chat-curl").textContent);
    announce("The line is copied");
    setText(byId("chat-copy"), "Copied");
    setTimeout(() => setText(byId("chat-copy"), "Copy"), 2000);
  } catch {
    // Pages of another host's plain HTTP have no clipboard.
    getSelection().selectAllChildren(byId("chat-curl"));
    announce("The line is selected");
  }
}

function addTurn(role, text) {
  const words = el("p", { class: "words" }, text);
  const turn = el("div", { class: `turn ${role}` }, el("b", {}, role === "user" ? "You" : byId("chat-model").value), words);
  const log = byId("chat-log");
  log.hidden = byId("chat-new").hidden = false;
  log.append(turn);
  log.scrollTop = log.scrollHeight;
  return { turn, words };
}

async function send(text) {
  addTurn("user", text);
  const { turn, words } = addTurn("assistant", "");
  const log = byId("chat-log");
  const asked = [...messages, { role: "user", content: text }];
  const mine = (stop = new AbortController());
  log.setAttribute("aria-busy", "true");
  byId("chat-stop").hidden = false;
  byId("chat-send").hidden = true;
  const heard = { text: "", id: null, end: "" };
  try {
    await hear(asked, mine.signal, heard, () => {
      const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
      setText(words, heard.text);
      if (isAtEnd) log.scrollTop = log.scrollHeight;
    });
  } catch (error) {
    heard.end = mine.signal.aborted ? "stopped" : error.message;
  }
  if (stop === mine) stop = null;
  log.setAttribute("aria-busy", "false");
  byId("chat-stop").hidden = true;
  byId("chat-send").hidden = false;
  if (!turn.isConnected) return;
  if (heard.text) messages = [...asked, { role: "assistant", content: heard.text }];
  if (heard.end) turn.append(el("p", { class: heard.end === "stopped" ? "note" : "failure", role: "alert" }, heard.end));
  if (heard.id) await explain(heard.id, turn);
  log.scrollTop = log.scrollHeight;
}

/** Reads an answer into `heard`; raises what was wrong with it. */
async function hear(asked, signal, heard, draw) {
  const body = { model: byId("chat-model").value, messages: asked, stream: true, stream_options: { include_usage: true } };
  const answer = await askEdge(body, byId("chat-key").value.trim(), signal);
  heard.id = answer.headers.get("x-hostler-id");
  if (!answer.ok) throw new Error(errorWords(await answer.text()));
  let left = "";
  let isWhole = false;
  for await (const piece of pieces(answer.body.pipeThrough(new TextDecoderStream()))) {
    const lines = (left + piece).split("\n");
    left = lines.pop();
    for (const line of lines) {
      const data = line.startsWith("data:") ? line.slice("data:".length).trim() : "";
      if (data === "[DONE]") isWhole = true;
      else if (data) take(JSON.parse(data), heard);
    }
    draw();
  }
  if (!isWhole) throw new Error("the answer broke off");
}

function take(event, heard) {
  if (event.error) throw new Error(event.error.message);
  const delta = event.choices?.[0]?.delta ?? {};
  heard.text += delta.reasoning_content ?? delta.reasoning ?? "";
  heard.text += delta.content ?? "";
}

function errorWords(text) {
  try {
    return JSON.parse(text).error.message;
  } catch {
    return text.trim() || "the edge gave no reason";
  }
}

/** Says where an answer came from: replica, cached tokens, first token, and why. */
async function explain(id, turn) {
  for (let tried = 0; tried < TRIES; tried += 1) {
    await pause(tried === 0 ? 0 : RETRY_MS);
    const [decision] = await ask(`/page/requests/${id}`).catch(() => []);
    if (!decision) return;
    if (decision.end === "" && tried + 1 < TRIES) continue;
    const chosen = decision.scored[decision.chosen];
    const cached = decision.cached ?? chosen.matched;
    const figures = [`${count(cached)} of ${count(decision.tokens)} prompt tokens cached`, `first token after ${seconds(decision.first_token)}`];
    const look = el("button", { type: "button", onclick: () => explainRequest(decision) }, "Show the costs");
    turn.append(el("p", { class: "note" }, el("b", {}, chosen.replica), ` ${whyThere(decision)} ${figures.join(", ")}. `, look));
    explainRequest(decision);
    return;
  }
}
