// A node or a replica looked at closely: a dialog with its figures, what troubles it, and what can be ordered.

import { openDialog } from "./dialog.js";
import { el, setText } from "./dom.js";
import { clock, count, duration, percent, seconds, short } from "./figures.js";
import { cachedShare, gpuWords } from "./fleet.js";
import { replicaHour } from "./hour.js";
import { engineLog } from "./log.js";
import { findReplica, model, phaseOf, speed } from "./model.js";
import { orderButtons, orderNotice } from "./orders.js";

let shown = null;

/** Opens the dialog about a replica's id or a node's name. */
export function openDetail(name) {
  const body = el("div", { class: "detail-body" });
  const orders = el("div", {});
  const notice = el("p", { class: "notice" });
  const past = findReplica(name) ? [replicaHour(name), engineLog(name)] : [];
  // What is loaded later comes below the buttons, which must not move under a pointer.
  const heading = openDialog("", [body, orders, notice, ...past], () => {
    shown = null;
  });
  shown = { name, heading, body, notice, orders };
  updateDetail();
}

export function updateDetail() {
  if (!shown) return;
  const found = findReplica(shown.name);
  const node = model.nodes.find((one) => one.name === shown.name);
  setText(shown.heading, found ? `Replica ${shown.name}` : `Node ${shown.name}`);
  const content = found ? replicaContent(found) : node ? nodeContent(node) : [el("p", {}, "It is gone.")];
  shown.body.replaceChildren(...content);
  setText(shown.notice, orderNotice(shown.name));
  const buttons = found || node ? orderButtons(shown.name) : null;
  const words = (element) => element?.textContent ?? "";
  // A button that is about to be pressed stays where it is.
  if (words(shown.orders.firstChild) !== words(buttons)) shown.orders.replaceChildren(...(buttons ? [buttons] : []));
}

function facts(pairs) {
  const known = pairs.filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return el("dl", { class: "facts" }, ...known.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

function nodeContent(node) {
  const { job } = node;
  const until = (at) => (at ? `${clock(at)}, in ${duration((at - model.at) / 1000)}` : "not known");
  return [
    facts([
      ["Agent", `${node.agent_version}, ${node.attached ? "connected" : "not connected"}`],
      ["Job", job ? `${job.id} (${job.scheduler})${job.run > 1 ? `, run ${job.run}` : ""}` : "none"],
      ["Job ends", job && until(job.ends_at)],
      ["Agent begins to leave", job && until(job.leaves_at)],
      ["Replicas", node.replicas.map((replica) => `${replica.id} ${phaseOf(node, replica)}`).join(", ")],
    ]),
  ];
}

function replicaContent({ node, replica }) {
  const content = [el("p", { class: "lead", "data-phase": phaseOf(node, replica) }, el("span", { class: "phase" }, phaseOf(node, replica)), ` ${replica.reason}`)];
  if (replica.failure) content.push(trouble("Its last engine died", replica.failure.cause, replica.failure.remedy));
  for (const finding of replica.findings) content.push(trouble(`Costs it speed: ${finding.kind}`, finding.evidence, finding.advice));
  const tokens = replica.kv_blocks * replica.block_size;
  const { cache, launch, rates } = replica;
  content.push(
    facts([
      ["Models", replica.models.join(", ") || "none yet"],
      ["Running, waiting", `${replica.running}, ${replica.waiting}`],
      ["In flight, of this router", `${replica.in_flight}, ${replica.local_in_flight}`],
      ["Served", count(replica.served)],
      ["Tokens/s", short(speed(replica.id).tokens)],
      ["First token, 99 %", replica.first_tokens ? `${seconds(replica.first_tokens.p50)}, ${seconds(replica.first_tokens.p99)}` : "none lately"],
      ["KV cache", tokens ? `${percent(replica.kv_use)} in use of ${count(tokens)} tokens` : "not known"],
      ["Cached", cache.exact ? `${percent(cachedShare(replica))}, known exactly` : cache.reason || "placed by text"],
      ["Prefix cache hits", replica.prefix_queries ? percent(replica.prefix_hits / replica.prefix_queries) : "none yet"],
      ["Reads prompts at", `${short(1 / Math.max(rates.prefill, 1e-9))} tokens/s, as learned`],
      ["Slowness lately", `${rates.slowness.toFixed(2)} ×`],
      ["Preemptions", count(replica.preemptions)],
      ["Streams moved away", count(replica.streams_moved)],
      ["Starts after the first", String(replica.restarts)],
      ["Engine", [replica.engine_version, replica.is_simulated && "simulated: its words mean nothing", launch?.profile].filter(Boolean).join(", ")],
      ["Started", startWords(replica.start)],
      ["Longest context", launch?.max_model_len ? `${count(launch.max_model_len)} tokens` : ""],
      ["Runs on", replica.gpus.map((gpu) => `${gpu.name}: ${gpuWords(gpu)}`).join("; ") || replica.gpu || "CPU"],
      ["Other nodes", replica.members.map(({ host, gpus, state }) => `${host || "?"}${gpus.length ? ` (${gpus.join(", ")})` : ""}: ${state}`).join("; ")],
    ]),
  );
  return content;
}

function startWords(start) {
  if (!start) return "";
  const total = start.stages.reduce((sum, part) => sum + part.seconds, 0);
  const parts = start.stages.filter((part) => part.seconds >= 0.1).map((part) => `${part.stage} ${seconds(part.seconds)}`);
  const origin = { spare: " from a spare", fork: ", imported once" }[start.origin] ?? "";
  return `in ${seconds(total)}${origin}: ${parts.join(", ")}`;
}

function trouble(title, words, remedy) {
  return el("div", { class: "trouble" }, el("h3", {}, title), el("p", {}, words), remedy ? el("p", { class: "remedy" }, remedy) : "");
}
