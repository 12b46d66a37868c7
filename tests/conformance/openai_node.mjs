// The official JavaScript client against a running server: base URL, key and models are all that it is told.
// OPENAI_NODE names the folder that `npm install openai zod` was run in. Prints one JSON line per check.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const { BASE, KEY, MODEL, EMBEDDING_MODEL, OPENAI_NODE } = process.env;
const require = createRequire(`${OPENAI_NODE}/`);
const load = (name) => import(pathToFileURL(require.resolve(name)).href);
const { default: OpenAI } = await load("openai");
const { zodResponseFormat } = await load("openai/helpers/zod");
const { z } = await load("zod");

const ai = new OpenAI({ baseURL: BASE, apiKey: KEY, maxRetries: 0, timeout: 240_000 });
const model = MODEL;
const messages = [{ role: "user", content: "What is the weather in Paris?" }];
const tools = [
  {
    type: "function",
    function: {
      name: "get_weather",
      strict: true,
      parameters: {
        type: "object",
        properties: { city: { type: "string", enum: ["Paris", "Rome"] } },
        required: ["city"],
        additionalProperties: false,
      },
    },
  },
];

/** A client whose attempts are counted, and answered by `answer` as long as that gives something. */
function counted(options, answer = () => undefined) {
  const attempts = [];
  const wrapped = async (url, init) => {
    const response = answer(attempts.length) ?? (await fetch(url, init));
    attempts.push({ status: response.status, at: Date.now() });
    return response;
  };
  return [new OpenAI({ baseURL: BASE, apiKey: KEY, fetch: wrapped, ...options }), attempts];
}

const checks = {
  async chat() {
    const answer = await ai.chat.completions.create({ model, messages, max_tokens: 8, seed: 1 });
    assert.ok(answer.choices[0].message.content);
    assert.ok(answer.usage.completion_tokens <= 8);
    assert.ok(answer.id.endsWith(answer._request_id));
  },
  async stream() {
    const request = { model, messages, max_tokens: 8, seed: 1 };
    const whole = await ai.chat.completions.create(request);
    const stream = await ai.chat.completions.create({ ...request, stream: true, stream_options: { include_usage: true } });
    let text = "", usage = null;
    for await (const chunk of stream) {
      text += chunk.choices[0]?.delta?.content ?? "";
      usage = chunk.usage ?? usage;
    }
    assert.ok(text);
    assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
  },
  async "stream helper"() {
    const deltas = [];
    const runner = ai.chat.completions.stream({ model, messages, max_tokens: 8 }).on("content", (d) => deltas.push(d));
    const whole = await runner.finalContent();
    assert.ok(whole);
    assert.equal(deltas.join(""), whole);
  },
  async "stream stopped by the client"() {
    const stream = await ai.chat.completions.create({ model, messages, max_tokens: 400, stream: true });
    for await (const _ of stream) break;
    assert.ok(stream.controller.signal.aborted);
  },
  async completions() {
    const answer = await ai.completions.create({ model, prompt: ["The sea is", "The sky is"], max_tokens: 4 });
    assert.deepEqual(answer.choices.map((c) => c.index), [0, 1]);
  },
  async "structured output"() {
    const Weather = z.object({ city: z.enum(["Paris", "Rome"]), clear: z.boolean() });
    const answer = await ai.chat.completions.parse({ model, messages, response_format: zodResponseFormat(Weather, "weather") });
    Weather.parse(answer.choices[0].message.parsed);
  },
  async tools() {
    const answer = await ai.chat.completions.create({ model, messages, tools, tool_choice: "required", parallel_tool_calls: false });
    const [call] = answer.choices[0].message.tool_calls;
    assert.equal(answer.choices[0].finish_reason, "tool_calls");
    assert.equal(call.function.name, "get_weather");
    assert.ok(["Paris", "Rome"].includes(JSON.parse(call.function.arguments).city));
  },
  async "tools, streamed"() {
    const choice = { type: "function", function: { name: "get_weather" } };
    const final = await ai.chat.completions.stream({ model, messages, tools, tool_choice: choice }).finalChatCompletion();
    JSON.parse(final.choices[0].message.tool_calls[0].function.arguments);
  },
  async embeddings() {
    const packed = await ai.embeddings.create({ model: EMBEDDING_MODEL, input: ["a cat", "a kitten"] });
    const plain = await ai.embeddings.create({ model: EMBEDDING_MODEL, input: ["a cat", "a kitten"], encoding_format: "float" });
    plain.data[0].embedding.forEach((x, i) => assert.ok(Math.abs(x - packed.data[0].embedding[i]) < 1e-6));
  },
  async models() {
    const ids = [];
    for await (const each of ai.models.list()) ids.push(each.id);
    assert.ok(ids.includes(model));
    assert.equal((await ai.models.retrieve(model)).id, model);
  },
  async errors() {
    const bad = ai.chat.completions.create({ model, messages, temperature: 9 });
    await assert.rejects(bad, (e) => e instanceof OpenAI.BadRequestError && e.param === "temperature" && !!e.requestID);
    const missing = ai.chat.completions.create({ model: "none", messages });
    await assert.rejects(missing, (e) => e instanceof OpenAI.NotFoundError && e.code === "model_not_found");
    const stranger = new OpenAI({ baseURL: BASE, apiKey: "sk-wrong", maxRetries: 0 });
    await assert.rejects(stranger.models.list().then(), OpenAI.AuthenticationError);
    await assert.rejects(ai.chat.completions.create({ model, messages, max_tokens: 400 }, { timeout: 1 }), OpenAI.APIConnectionTimeoutError);
  },
  async "no retry where it can't help"() {
    const [client, attempts] = counted({ maxRetries: 3 });
    await assert.rejects(client.chat.completions.create({ model: "none", messages }), OpenAI.NotFoundError);
    assert.equal(attempts.length, 1);
  },
  async "retries after a 503 with its wait"() {
    const busy = () => new Response('{"error":{"message":"busy"}}', { status: 503, headers: { "retry-after": "1", "x-should-retry": "true" } });
    const [client, attempts] = counted({ maxRetries: 2 }, (n) => (n === 0 ? busy() : undefined));
    await client.chat.completions.create({ model, messages, max_tokens: 1 });
    assert.deepEqual(attempts.map((a) => a.status), [503, 200]);
    assert.ok(attempts[1].at - attempts[0].at >= 950);
  },
};

let failed = 0;
for (const [name, check] of Object.entries(checks)) {
  try {
    await check();
    console.log(JSON.stringify({ name, passed: true }));
  } catch (error) {
    failed += 1;
    console.log(JSON.stringify({ name, passed: false, error: String(error?.stack ?? error).slice(0, 800) }));
  }
}
process.exit(failed ? 1 : 0);
