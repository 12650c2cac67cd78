// `hostler up` as the suites of this folder start it: one process with simulated engines, ready when `start` returns.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { existsSync } from "node:fs";
import { createInterface } from "node:readline";

// From the start of the process to engines that serve, and from SIGTERM to its end, in milliseconds.
const START_MS = 30_000;
const STOP_MS = 20_000;

export function binary() {
  if (process.env.HOSTLER_BIN) return process.env.HOSTLER_BIN;
  const builds = ["release", "debug"].map((build) => new URL(`../../target/${build}/hostler`, import.meta.url).pathname);
  const found = builds.find(existsSync);
  assert.ok(found, "no hostler binary: run `cargo build --release`, or set HOSTLER_BIN");
  return found;
}

/** What the process printed behind each first word, once it has printed `ready`. */
function printedUntilReady(child) {
  return new Promise((resolve, reject) => {
    const printed = {};
    const log = [];
    const fail = (why) => reject(new Error(`${why}\n${log.join("")}`));
    const deadline = setTimeout(() => fail(`hostler was not ready within ${START_MS} ms`), START_MS);
    child.stderr.on("data", (text) => log.push(text));
    child.on("error", reject);
    child.on("exit", (code) => fail(`hostler exited ${code}`));
    createInterface({ input: child.stdout }).on("line", (line) => {
      const [word, value] = line.split(/\s+/, 2);
      printed[word] = value;
      if (word !== "ready") return;
      clearTimeout(deadline);
      resolve(printed);
    });
  });
}

export class Hostler {
  /** Starts it with two simulated engines; `options` are more of its own, `flags` are theirs. */
  static async start(options, flags) {
    const usual = ["--engine", "simulated", "--replicas", "2", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"];
    const child = spawn(binary(), ["up", ...usual, ...options, "--", ...flags], { stdio: ["ignore", "pipe", "pipe"] });
    return Object.assign(new Hostler(), { child }, await printedUntilReady(child));
  }

  async stop() {
    if (this.child.exitCode !== null) return;
    this.child.removeAllListeners("exit");
    const ended = new Promise((resolve) => this.child.once("exit", resolve));
    this.child.kill("SIGTERM");
    const insist = setTimeout(() => this.child.kill("SIGKILL"), STOP_MS);
    const code = await ended;
    clearTimeout(insist);
    assert.equal(code, 0, "hostler ends cleanly after SIGTERM");
  }
}
