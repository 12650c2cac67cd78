// What the OpenAI SDK for Node and the AI SDK may rely on, asked of `hostler up` with two simulated engines. The questions
// are fewer than in tests/python: this suite is about the other SDKs' ways of reading answers, above all streams.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { after, before, test } from "node:test";
import { setTimeout as sleep } from "node:timers/promises";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, streamObject, tool } from "ai";
import OpenAI from "openai";
import { z } from "zod";
import { Hostler, binary } from "./hostler.mjs";

const MODEL = "tiny";
const MESSAGES = [{ role: "user", content: "Say something about locomotives" }];
let hostler;
let client;

/** Requests that some engine has not finished yet. */
async function inFlight() {
  const child = spawn(binary(), ["ps", "--admin", hostler.socket, "--json"], { stdio: ["ignore", "pipe", "inherit"] });
  let text = "";
  for await (const piece of child.stdout) text += piece;
  return JSON.parse(text)
    .nodes.flatMap((node) => node.replicas)
    .reduce((sum, replica) => sum + replica.in_flight, 0);
}

async function waitUntil(condition, what) {
  const deadline = Date.now() + 5_000;
  while (!(await condition())) {
    assert.ok(Date.now() < deadline, `${what}: not within 5 s`);
    await sleep(20);
  }
}

before(async () => {
  hostler = await Hostler.start([], ["--served-model-name", MODEL, "--sim-step-ms", "5"]);
  client = new OpenAI({ baseURL: hostler.edge, apiKey: "unused", maxRetries: 0, timeout: 30_000 });
});

after(() => hostler?.stop());

test("a chat answers with text, a reason and usage", async () => {
  const answer = await client.chat.completions.create({ model: MODEL, messages: MESSAGES, max_tokens: 8 });
  assert.ok(answer.choices[0].message.content);
  assert.equal(answer.choices[0].finish_reason, "length");
  assert.equal(answer.usage.completion_tokens, 8);
});

test("a streamed chat adds up to the whole one and ends with usage", async () => {
  const asked = { model: MODEL, messages: MESSAGES, max_tokens: 12, temperature: 0, seed: 1 };
  const whole = await client.chat.completions.create(asked);
  const stream = await client.chat.completions.create({ ...asked, stream: true, stream_options: { include_usage: true } });
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  const last = chunks.pop();
  assert.deepEqual(last.choices, []);
  assert.equal(last.usage.completion_tokens, 12);
  assert.equal(chunks.map((chunk) => chunk.choices[0].delta.content ?? "").join(""), whole.choices[0].message.content);
  assert.equal(chunks.at(-1).choices[0].finish_reason, "length");
});

test("a completion takes a prompt of tokens", async () => {
  const answer = await client.completions.create({ model: MODEL, prompt: [11, 12, 13], max_tokens: 4 });
  assert.equal(answer.usage.prompt_tokens, 3);
  assert.ok(answer.choices[0].text);
});

test("models are listed once however many engines serve them", async () => {
  const models = await client.models.list();
  assert.deepEqual(models.data.map((model) => model.id).filter((id) => id === MODEL), [MODEL]);
});

test("an unknown model is the SDK's not-found error and names those there are", async () => {
  await assert.rejects(client.chat.completions.create({ model: "no-such-model", messages: MESSAGES }), (error) => {
    assert.ok(error instanceof OpenAI.NotFoundError);
    assert.equal(error.param, "model");
    assert.match(error.message, new RegExp(`\\b${MODEL}\\b`));
    return true;
  });
});

test("an aborted stream is no longer counted", async () => {
  const stream = await client.completions.create({ model: MODEL, prompt: "never read", max_tokens: 3000, stream: true });
  for await (const chunk of stream) {
    assert.equal(chunk.object, "text_completion");
    break; // leaving the loop aborts the request
  }
  await waitUntil(async () => (await inFlight()) === 0, "in-flight back to zero");
});

test("an aborted request is no longer counted", async () => {
  const controller = new AbortController();
  const asked = { model: MODEL, prompt: "never answered", max_tokens: 3000 };
  const answer = client.completions.create(asked, { signal: controller.signal });
  const refused = assert.rejects(answer, OpenAI.APIUserAbortError);
  await waitUntil(async () => (await inFlight()) === 1, "one request in flight");
  controller.abort();
  await refused;
  await waitUntil(async () => (await inFlight()) === 0, "in-flight back to zero");
});

const WEATHER = z.object({
  city: z.string().min(2),
  degrees: z.number().int().min(-60).max(60),
  sky: z.enum(["clear", "cloudy"]),
  winds: z.array(z.object({ from: z.string(), speed: z.number().nullable() })).min(1),
});

/** The AI SDK's two ways to ask engines. */
const AI_MODELS = {
  "chat completions": () => createOpenAICompatible({ name: "hostler", baseURL: hostler.edge, supportsStructuredOutputs: true })(MODEL),
  "the Responses API": () => createOpenAI({ baseURL: hostler.edge, apiKey: "unused" }).responses(MODEL),
};

for (const [api, model] of Object.entries(AI_MODELS)) {
  test(`the AI SDK generates and streams an object over ${api}`, async () => {
    const asked = { model: model(), schema: WEATHER, prompt: "How is the weather?", maxRetries: 0 };
    const { object, finishReason } = await generateObject(asked);
    assert.deepEqual(WEATHER.parse(object), object);
    assert.equal(finishReason, "stop");
    const streamed = streamObject(asked);
    let parts = 0;
    for await (const part of streamed.partialObjectStream) parts += part ? 1 : 0;
    assert.ok(parts > 1, "it comes in parts");
    assert.deepEqual(await streamed.object, object);
  });

  test(`the AI SDK runs the tool that it demands over ${api}`, async () => {
    const seen = [];
    const report = tool({ description: "Report", inputSchema: WEATHER, execute: async (input) => seen.push(input) });
    const asked = { model: model(), tools: { report }, toolChoice: "required", prompt: "How is the weather?", maxRetries: 0 };
    const { toolCalls } = await generateText(asked);
    assert.deepEqual(seen, toolCalls.map((call) => call.input));
    assert.equal(seen.length, 1);
    WEATHER.parse(seen[0]);
  });
}
