// A web page in a real browser: of an origin that `router.allowed_origins` lists it reads every answer, and of another
// none. Left out where there is no Chromium (Debian's package is `chromium`; HOSTLER_CHROMIUM names another one).

import assert from "node:assert/strict";
import { spawn, spawnSync } from "node:child_process";
import { existsSync, mkdtempSync, readFileSync, rmSync } from "node:fs";
import { createServer } from "node:http";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { Hostler, binary } from "./hostler.mjs";

const MODEL = "tiny";
// For a browser that starts on a busy machine, in milliseconds.
const BROWSER_MS = 60_000;
const chromium = [process.env.HOSTLER_CHROMIUM, "/usr/bin/chromium"].find((path) => path && existsSync(path));
const missing = chromium ? false : "there is no Chromium here: apt-get install chromium";

/** What the page does, in the browser; it says what it saw. */
async function page({ edge, key, model }) {
  const headers = { authorization: `Bearer ${key}`, "content-type": "application/json" };
  const chat = { model, messages: [{ role: "user", content: "Say something about locomotives" }], max_tokens: 8, stream: true };
  const ask = () => fetch(`${edge}/chat/completions`, { method: "POST", headers, body: JSON.stringify(chat) });
  const seen = {};
  try {
    seen.models = (await (await fetch(`${edge}/models`, { headers })).json()).data.map((known) => known.id);
    const streamed = await ask();
    seen.id = streamed.headers.get("x-hostler-id");
    seen.events = (await streamed.text()).split("\n\n").filter((event) => event.startsWith("data: "));
    const limited = await ask();
    seen.limited = {
      status: limited.status,
      message: (await limited.json()).error.message,
      retryAfter: limited.headers.get("retry-after"),
      limit: limited.headers.get("x-ratelimit-limit-requests"),
    };
    const unknown = await fetch(`${edge}/models`);
    seen.unknown = { status: unknown.status, message: (await unknown.json()).error.message };
    const nothing = await fetch(new URL("/nothing", edge), { method: "DELETE", headers });
    seen.nothing = { status: nothing.status, detail: (await nothing.json()).detail };
  } catch (error) {
    seen.error = String(error);
  }
  await fetch("/seen", { method: "POST", body: JSON.stringify(seen) });
}

let folder;
let pages;
let hostler;
let key;
let told;

before(async () => {
  if (missing) return;
  folder = mkdtempSync(join(tmpdir(), "hostler-browser-"));
  pages = createServer(async (request, response) => {
    if (request.method === "POST") {
      let text = "";
      for await (const piece of request) text += piece;
      told(JSON.parse(text));
      return response.end();
    }
    const asked = JSON.stringify({ edge: hostler.edge, key, model: MODEL });
    response.setHeader("content-type", "text/html");
    return response.end(`<!doctype html><script>(${page})(${asked})</script>`);
  });
  await new Promise((resolve) => pages.listen(0, "127.0.0.1", resolve));
  const keys = join(folder, "keys.toml");
  const made = spawnSync(binary(), ["keys", "create", "--name", "page", "--requests-per-minute", "1", "--file", keys], { encoding: "utf8" });
  assert.equal(made.status, 0, made.stderr);
  key = made.stdout.trim();
  // The same server by two names is two origins to a browser, and one of them is allowed.
  const origin = `http://127.0.0.1:${pages.address().port}`;
  hostler = await Hostler.start(["--keys-file", keys, "--allowed-origins", origin], ["--served-model-name", MODEL]);
});

after(async () => {
  if (missing) return;
  pages.closeAllConnections();
  pages.close();
  await hostler.stop();
  rmSync(folder, { recursive: true, force: true, maxRetries: 5 });
});

/** What the page has seen, opened by this host's name. */
async function open(host) {
  const seen = new Promise((resolve) => {
    told = resolve;
  });
  const log = join(folder, "chromium.log");
  const flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", `--user-data-dir=${folder}/${host}`];
  const url = `http://${host}:${pages.address().port}/`;
  const browser = spawn("/bin/sh", ["-c", 'exec "$0" "$@" 2>"$LOG"', chromium, ...flags, url], {
    stdio: "ignore",
    detached: true,
    env: { ...process.env, LOG: log },
  });
  const ended = new Promise((resolve) => browser.once("exit", resolve));
  let deadline;
  const late = new Promise((_, reject) => {
    deadline = setTimeout(() => reject(new Error(`the page has said nothing\n${readFileSync(log, "utf8")}`)), BROWSER_MS);
  });
  try {
    return await Promise.race([seen, late]);
  } finally {
    clearTimeout(deadline);
    process.kill(-browser.pid, "SIGKILL");
    await ended;
  }
}

test("a page of an allowed origin lists models, streams a chat with a key and reads refusals", { skip: missing }, async () => {
  const seen = await open("127.0.0.1");
  assert.equal(seen.error, undefined);
  assert.deepEqual(seen.models, [MODEL]);
  assert.match(seen.id, /^[0-9a-f]{16}$/);
  assert.equal(seen.events.at(-1), "data: [DONE]");
  assert.ok(seen.events.length > 8, seen.events.join("\n"));
  assert.deepEqual([seen.limited.status, seen.limited.limit], [429, "1"]);
  assert.match(seen.limited.message, /minute/);
  assert.ok(Number(seen.limited.retryAfter) >= 1, seen.limited.retryAfter);
  assert.equal(seen.unknown.status, 401);
  assert.match(seen.unknown.message, /key/);
  assert.deepEqual(seen.nothing, { status: 404, detail: "Not Found" });
});

test("a page of another origin reads nothing", { skip: missing }, async () => {
  assert.deepEqual(await open("localhost"), { error: "TypeError: Failed to fetch" });
});
