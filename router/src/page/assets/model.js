// What the page knows: the last picture, put together from what has changed, the speeds that follow from counters, and what happened.

import { some } from "./figures.js";

/** Counters become speeds over this many milliseconds, and events are kept up to this many. */
const RATE_MS = 5000;
const MAX_EVENTS = 200;
/** Steps of ten seconds in an hour. */
const MAX_STEPS = 360;

export const model = {
  at: 0,
  version: "",
  totals: { in_flight: 0, queued: 0, first_tokens: null, findings: [], requests: {} },
  tenants: [],
  models: [],
  nodes: [],
  requests: [],
  /** What no replica got, the latest first. */
  refused: [],
  history: [],
  /** The latest first: `{at, words, grave}`. */
  events: [],
  mayOperate: false,
};

const nodes = new Map();
const requests = new Map();
/** The router's events, and those of this page, the latest first. */
let routersEvents = [];
const ownEvents = [];
/** For each replica and for the fleet, readings of `{at, tokens, served}`. */
const readings = new Map();

export const replicas = () => model.nodes.flatMap((node) => node.replicas.map((replica) => ({ node, replica })));

export function findReplica(id) {
  return replicas().find(({ replica }) => replica.id === id);
}

/** The word for what a replica is doing; silence counts before what was last heard. */
export function phaseOf(node, replica) {
  return replica.phase === "suspect" || !node.attached ? "silent" : replica.phase;
}

export const serves = ({ node, replica }) => phaseOf(node, replica) === "ready";

/** Takes an event in. Returns the replicas that requests have just gone to. */
export function apply(event) {
  if (event.whole) {
    nodes.clear();
    requests.clear();
    model.history = [];
    model.refused = [];
  }
  for (const node of event.nodes) nodes.set(node.name, node);
  keepOnly(nodes, event.node_names);
  const arrived = [];
  for (const request of event.requests) {
    const key = `${request.id}-${request.attempt}`;
    if (!event.whole && !requests.has(key)) arrived.push(request.replica);
    requests.set(key, request);
  }
  keepOnly(requests, event.request_keys);
  model.at = event.at;
  model.version = event.version;
  model.totals = event.totals;
  model.tenants = event.tenants;
  model.models = event.models;
  model.nodes = event.node_names.map((name) => nodes.get(name)).filter(Boolean);
  model.requests = event.request_keys.map((key) => requests.get(key)).filter(Boolean);
  if (event.refused) model.refused = event.refused;
  if (event.history) takeSteps(event.history);
  if (event.events) takeEvents(event.events, event.whole);
  read();
  readEnds();
  return arrived;
}

/** New steps, and the latest known ones, which may have changed. */
function takeSteps(steps) {
  const kept = model.history.filter((known) => known.at < steps[0]?.at);
  model.history = [...kept, ...steps].slice(-MAX_STEPS);
}

function keepOnly(map, keys) {
  const kept = new Set(keys);
  for (const key of map.keys()) if (!kept.has(key)) map.delete(key);
}

function read() {
  const seen = new Set();
  for (const { node, replica } of replicas()) {
    seen.add(replica.id);
    const known = readings.get(replica.id) ?? [];
    const last = known.at(-1);
    // Another engine begins at 0.
    const began = last && (last.epoch !== replica.epoch || last.tokens > replica.generation_tokens);
    const kept = began ? [] : known;
    kept.push({ at: model.at, epoch: replica.epoch, tokens: replica.generation_tokens, served: replica.served });
    while (kept.length > 2 && kept[1].at <= model.at - RATE_MS) kept.shift();
    readings.set(replica.id, node.attached ? kept : []);
  }
  keepOnly(readings, seen);
}

/** Readings of `{at, requests}`: this router's ended requests by verdict. */
let endReadings = [];

function readEnds() {
  const { requests } = model.totals;
  // Another router begins at 0.
  if (Object.keys(requests).some((verdict) => requests[verdict] < endReadings.at(-1)?.requests[verdict])) endReadings = [];
  endReadings.push({ at: model.at, requests });
  while (endReadings.length > 2 && endReadings[1].at <= model.at - RATE_MS) endReadings.shift();
}

/** Ended requests of this router a second, lately, by verdict. */
export function verdictSpeed() {
  const [first, last] = [endReadings[0], endReadings.at(-1)];
  const per = (verdict) => (last?.at > first?.at ? ((last.requests[verdict] - first.requests[verdict]) * 1000) / (last.at - first.at) : 0);
  return Object.fromEntries(["answered", "client_fault", "full", "error"].map((verdict) => [verdict, per(verdict)]));
}

/** Requests of a step that the fleet has failed, a second. */
export const failedPerSecond = (step) => ((step.ended.full ?? 0) + (step.ended.error ?? 0)) / step.seconds;

/** Tokens and requests a second of a replica, lately. */
export function speed(id) {
  const known = readings.get(id) ?? [];
  const [first, last] = [known[0], known.at(-1)];
  if (!first || last.at <= first.at) return { tokens: 0, requests: 0 };
  const per = (grown) => Math.max(0, (grown * 1000) / (last.at - first.at));
  return { tokens: per(last.tokens - first.tokens), requests: per(last.served - first.served) };
}

export function fleetSpeed() {
  const all = replicas().map(({ replica }) => speed(replica.id));
  return { tokens: sum(all, (one) => one.tokens), requests: sum(all, (one) => one.requests) };
}

export const sum = (items, of) => items.reduce((total, item) => total + of(item), 0);

/** What this page itself has seen of the router. */
export function noteEvent(words, grave = false, at = model.at) {
  ownEvents.unshift({ at, words, grave });
  ownEvents.length = Math.min(ownEvents.length, MAX_EVENTS);
  sortEvents();
}

function sortEvents() {
  model.events = [...routersEvents, ...ownEvents].sort((one, other) => other.at - one.at).slice(0, MAX_EVENTS);
}

function takeEvents(events, whole) {
  if (whole) routersEvents = [];
  for (const { at_ms: at, words, grave } of events) routersEvents.unshift({ at, words, grave });
  routersEvents.length = Math.min(routersEvents.length, MAX_EVENTS);
  sortEvents();
}

const FINDINGS = {
  "requests-fail": "requests fail",
  "fleet-below-half": "most replicas are down",
  "queue-wait": "requests wait long",
  "first-tokens-slow": "first tokens are slow",
  "engine-crash-loop": "an engine fails again and again",
  "request-banned": "a request crashes engines",
  "replica-quarantined": "a replica is quarantined",
  "node-lost": "a node was lost",
  "jobs-end": "most jobs end soon",
  "budget-ends": "a budget ends",
  "key-file-unusable": "the key file cannot be used",
};

export const findingName = (kind) => FINDINGS[kind] ?? kind.replaceAll("-", " ");

const capital = (words) => words[0].toUpperCase() + words.slice(1);

/** What somebody should look at: `{subject, words, remedy, grave}`, the gravest first. */
export function concerns() {
  const found = model.totals.findings.map(({ kind, evidence, advice }) => ({ subject: `${capital(findingName(kind))}:`, words: evidence, remedy: advice, grave: true }));
  for (const node of model.nodes) {
    if (!node.attached) found.push({ subject: node.name, words: "its agent is not connected", remedy: "", grave: true });
    const left = node.job?.leaves_at ? (node.job.leaves_at - model.at) / 1000 : Infinity;
    if (left < 600) found.push({ subject: node.name, words: `its job ${node.job.id} leaves soon`, remedy: "", grave: false });
    for (const replica of node.replicas) found.push(...concernsOf(node, replica));
  }
  const unserved = model.models.filter((known) => !replicas().some((one) => serves(one) && one.replica.models.includes(known.model)));
  if (unserved.length > 0 && replicas().length > 0) {
    const waiting = sum(unserved, (known) => known.waiting);
    const words = `nobody serves it now${waiting ? `, and ${waiting} wait` : ""}`;
    found.push({ subject: some(unserved.map((known) => known.model), 3), words, remedy: "", grave: true });
  }
  return found.sort((one, other) => Number(other.grave) - Number(one.grave));
}

/** What costs replicas speed, as `hostler advise` says it: `{kind, evidence, advice, replicas}`. */
export function advice() {
  const found = new Map();
  for (const { replica } of replicas()) {
    for (const { kind, evidence, advice: remedy } of replica.findings) {
      const key = `${kind} ${remedy}`;
      const known = found.get(key) ?? { kind, evidence, advice: remedy, replicas: [] };
      known.replicas.push(replica.id);
      found.set(key, known);
    }
  }
  return [...found.values()];
}

function concernsOf(node, replica) {
  const found = [];
  const phase = phaseOf(node, replica);
  if (phase === "failed" || phase === "quarantined") {
    const words = `${phase}: ${(replica.failure?.cause || replica.reason).split("\n")[0] || "no reason was given"}`;
    found.push({ subject: replica.id, words, remedy: replica.failure?.remedy ?? "", grave: true });
  } else if (phase === "silent" && node.attached) {
    found.push({ subject: replica.id, words: "its agent is silent, so its figures are old", remedy: "", grave: true });
  }
  for (const gpu of replica.gpus) {
    if (gpu.ecc_uncorrected > 0) {
      const words = `GPU ${gpu.index} counts ${gpu.ecc_uncorrected} uncorrected memory errors`;
      found.push({ subject: replica.id, words, remedy: "", grave: true });
    }
  }
  return found;
}
