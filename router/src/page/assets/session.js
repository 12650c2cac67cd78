// How the page is let in, and how it hears of the fleet. The session stays in this tab: it is shown in a header, so no other page, and no other
// program on another port of this host, ever gets it, as it would get a cookie.

const STORED = "hostler-session";
/** The router speaks each second. */
const SILENCE_MS = 5000;
const RETRY_MS = [1000, 2000, 4000, 8000];

let session = null;

export class Refused extends Error {}

/** Takes the token out of the address, or goes on with the session of this tab. */
export async function restore() {
  const stored = JSON.parse(sessionStorage.getItem(STORED) ?? "null");
  const token = new URLSearchParams(location.hash.slice(1)).get("token");
  if (token) {
    history.replaceState(null, "", location.pathname);
    try {
      return await signIn({ token });
    } catch (error) {
      // A used address, opened again in a tab that is signed in.
      if (!stored) throw error;
    }
  }
  session = stored;
  return session;
}

export async function signIn(shown) {
  const answer = await fetch("/page/session", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(shown),
  });
  if (!answer.ok) throw new Refused((await answer.text()).trim());
  session = await answer.json();
  sessionStorage.setItem(STORED, JSON.stringify(session));
  return session;
}

function forget() {
  session = null;
  sessionStorage.removeItem(STORED);
}

/** Asks the router; the answer is parsed JSON, and an error has its words. */
export async function ask(path, body) {
  const answer = await fetch(path, {
    method: body ? "POST" : "GET",
    headers: { authorization: `Bearer ${session.session}`, "content-type": "application/json" },
    body: body && JSON.stringify(body),
  });
  if (!answer.ok) throw new Error((await answer.text()).trim());
  return answer.json();
}

/** A replica's id as a part of a path: its slashes stay. */
export const idPath = (id) => id.split("/").map(encodeURIComponent).join("/");

/** Asks a model through the edge; the answer streams. `key` is of the edge, where the session has none of its own. */
export function askEdge(body, key, signal) {
  const headers = { authorization: `Bearer ${session.session}`, "content-type": "application/json" };
  if (key) headers["x-api-key"] = key;
  return reached(fetch("/page/chat", { method: "POST", headers, body: JSON.stringify(body), signal }));
}

const pause = (millis) => new Promise((resolve) => setTimeout(resolve, millis));

/**
 * Hands each event to `take`, for as long as the session lasts; tries again by itself where the router is not there. `tell` hears how the connection
 * is: "live", or what is the matter. Raises `Refused` when the session is over.
 */
export async function watch(take, tell) {
  for (let failed = 0; ; failed += 1) {
    try {
      await read((event) => {
        failed = 0;
        tell("live");
        take(event);
      });
      tell("The router has ended the connection");
    } catch (error) {
      if (error instanceof Refused) throw error;
      tell(error.message);
    }
    await pause(RETRY_MS[Math.min(failed, RETRY_MS.length - 1)]);
  }
}

async function read(take) {
  const left = new AbortController();
  let silence;
  const listen = () => {
    clearTimeout(silence);
    silence = setTimeout(() => left.abort(), SILENCE_MS);
  };
  listen();
  try {
    const asked = fetch("/page/events", { headers: { authorization: `Bearer ${session.session}` }, signal: left.signal });
    const answer = await reached(asked);
    if (answer.status === 401) {
      forget();
      throw new Refused("The session is over: it has lasted 12 hours, its key was revoked, or the router was started anew.");
    }
    if (!answer.ok) throw new Error((await answer.text()).trim());
    let text = "";
    for await (const piece of pieces(answer.body.pipeThrough(new TextDecoderStream()))) {
      listen();
      const events = (text + piece).split("\n\n");
      text = events.pop();
      for (const event of events) take(JSON.parse(event.slice("data: ".length)));
    }
  } finally {
    clearTimeout(silence);
    left.abort();
  }
}

/** What the network gives, or what is the matter with it. */
function reached(promise) {
  return promise.catch((error) => {
    throw new Error(error.name === "AbortError" ? "The router is silent" : "The router is not reached");
  });
}

export async function* pieces(stream) {
  const reader = stream.getReader();
  for (;;) {
    const { done, value } = await reached(reader.read());
    if (done) return;
    yield value;
  }
}
