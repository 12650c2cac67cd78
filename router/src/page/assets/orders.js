// What changes the fleet: asked first, in a dialog that says what would happen, then sent.

import { announce, el } from "./dom.js";
import { plural, some } from "./figures.js";
import { model, noteEvent, phaseOf, replicas, serves, sum } from "./model.js";
import { ask } from "./session.js";

const RUNS = { drain: "Drain", restart: "Restart", release: "Release", sleep: "Put to sleep", wake: "Wake" };
/** Phases in which an order makes sense. */
const FITS = {
  drain: ["starting", "loading", "ready"],
  restart: ["starting", "loading", "ready", "failed", "draining"],
  release: ["quarantined", "failed", "stopped", "draining"],
  sleep: ["ready"],
  wake: ["sleeping"],
};

/** What became of the last order. */
let last = { target: "", words: "" };

export const orderNotice = (target) => (last.target === target ? last.words : "");

const touched = (target) => replicas().filter(({ node, replica }) => node.name === target || replica.id === target);

/** Buttons for what can be ordered of a node or a replica; none for those who only watch. */
export function orderButtons(target) {
  if (!model.mayOperate) return null;
  const phases = touched(target).map(({ node, replica }) => phaseOf(node, replica));
  const fitting = Object.keys(RUNS).filter((order) => phases.some((phase) => FITS[order].includes(phase)));
  if (fitting.length === 0) return null;
  const button = (order) => el("button", { type: "button", onclick: () => confirm(order, target) }, `${RUNS[order]}…`);
  return el("div", { class: "orders" }, ...fitting.map(button));
}

/** What would happen, in sentences. */
function consequences(order, target) {
  const hit = touched(target);
  const running = sum(hit, ({ replica }) => replica.in_flight);
  const requests = running ? `${plural(running, "request")} there: each moves, or may finish.` : "Nothing runs there.";
  const names = hit.map(({ replica }) => replica.id);
  const sentences = names.length > 1 || names[0] !== target ? [`This concerns ${some(names)}.`] : [];
  sentences.push({
    drain: `${requests} Then the engine stops, until it is released.`,
    restart: `${requests} Then the engine starts again.`,
    release: "A quarantined, failed or stopped engine starts again now; one that drains goes on serving.",
    sleep: `${requests} Then it gives its GPU memory back, until it is woken.`,
    wake: "It takes its GPU memory again and serves.",
  }[order]);
  return sentences;
}

function unserved(order, target) {
  if (order === "release" || order === "wake") return [];
  const hit = touched(target);
  const others = replicas().filter((one) => !hit.some(({ replica }) => replica.id === one.replica.id));
  const models = new Set(hit.filter(serves).flatMap(({ replica }) => replica.models));
  return [...models].filter((name) => !others.some((one) => serves(one) && one.replica.models.includes(name)));
}

function confirm(order, target) {
  const alone = unserved(order, target);
  const dialog = el("dialog", { class: "question", "aria-labelledby": "question-heading" });
  const close = () => dialog.close();
  const go = el("button", { type: "button", class: "danger" }, `${RUNS[order]} ${target}`);
  const cancel = el("button", { type: "button", autofocus: true, onclick: close }, "Cancel");
  dialog.append(
    el("h2", { id: "question-heading" }, `${RUNS[order]} ${target}?`),
    ...consequences(order, target).map((sentence) => el("p", {}, sentence)),
    alone.length > 0 ? el("p", { class: "warning" }, `Nobody would serve ${some(alone)}.`) : "",
    el("div", { class: "orders" }, cancel, go),
  );
  go.addEventListener("click", () => {
    close();
    send(order, target);
  });
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

async function send(order, target) {
  const tell = (words) => {
    last = { target, words };
    announce(words);
  };
  try {
    last = { target, words: `Asking for it: ${order} ${target} …` };
    const { replicas: done } = await ask("/page/orders", { order, target });
    tell(`you ordered: ${order} ${some(done)}`);
  } catch (error) {
    const words = `could not ${order} ${target}: ${error.message}`;
    tell(words);
    noteEvent(words, true, Date.now());
  }
}
