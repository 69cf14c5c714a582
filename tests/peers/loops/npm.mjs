// The npm clients `openai` and `ai` against a running server. Prints one JSON object; exits non-zero on any failure.
// usage: node npm.mjs BASE_URL   (run in a folder whose node_modules holds the packages)
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const require = createRequire(process.cwd() + "/");
const load = async (name) => import(pathToFileURL(require.resolve(name)).href);
const baseURL = process.argv[2];
const { default: OpenAI } = await load("openai");
const { Output, generateText, stepCountIs, streamText, tool } = await load("ai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { z } = await load("zod");

const question = [{ role: "user", content: "What is the capital of France?" }];
const client = new OpenAI({ baseURL, apiKey: "any", maxRetries: 0 });

const whole = await client.chat.completions.create({ model: "smollm2", messages: question, temperature: 0, max_tokens: 24 });
assert.match(whole.choices[0].message.content, /Paris/);

let streamed = "";
let usage = null;
const stream = await client.chat.completions.create({
  model: "smollm2", messages: question, temperature: 0, max_tokens: 24,
  stream: true, stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(streamed, whole.choices[0].message.content);
assert.equal(usage.completion_tokens, whole.usage.completion_tokens);

const many = await client.chat.completions.create({
  model: "smollm2", messages: question, n: 2, logprobs: true, top_logprobs: 2, max_tokens: 6, stop: ["\n\n"],
});
assert.equal(many.choices.length, 2);
assert.equal(many.choices[0].logprobs.content[0].top_logprobs.length, 2);

const history = [
  { role: "user", content: "How is the weather in Paris?" },
  { role: "assistant", content: null, tool_calls: [{ id: "call_1", type: "function", function: { name: "get_weather", arguments: '{"city": "Paris"}' } }] },
  { role: "tool", tool_call_id: "call_1", content: "rain" },
];
const tools = [{ type: "function", function: { name: "get_weather", parameters: { type: "object", properties: { city: { type: "string" } } } } }];
const withTools = await client.chat.completions.create({ model: "smollm2", messages: history, tools, max_tokens: 16 });
assert.ok(withTools.usage.prompt_tokens > 60);

const abort = new AbortController();
let aborted = false;
try {
  const endless = await client.chat.completions.create(
    { model: "smollm2", messages: question, max_tokens: 2000, stream: true, ignore_eos: true },
    { signal: abort.signal },
  );
  for await (const chunk of endless) if (chunk.choices[0]?.delta?.content) abort.abort();
  aborted = abort.signal.aborted;
} catch (error) {
  aborted = error.name === "AbortError" || error instanceof OpenAI.APIUserAbortError;
}
assert.ok(aborted);

await assert.rejects(
  client.chat.completions.create({ model: "smollm2", messages: [], max_tokens: 4 }),
  (error) => error.status === 400 && error.param === "messages",
);

const provider = createOpenAICompatible({ name: "magnitude", baseURL, apiKey: "any", supportsStructuredOutputs: true, includeUsage: true });
const model = provider("smollm2");
const ai = await generateText({ model, prompt: "What is the capital of France?", temperature: 0, maxOutputTokens: 24 });
assert.equal(ai.text, whole.choices[0].message.content);
const aiStream = streamText({ model, prompt: "What is the capital of France?", temperature: 0, maxOutputTokens: 24 });
let aiText = "";
for await (const piece of aiStream.textStream) aiText += piece;
assert.equal(aiText, whole.choices[0].message.content);

// An agent: two steps must call the tool, the third one must answer.
const agent = (system, asked) => ({
  model, system, prompt: "Compare the weather of Paris and Rome. Begin with Paris.",
  temperature: 0, maxOutputTokens: 64, maxRetries: 0,
  providerOptions: { magnitude: { parallel_tool_calls: false } },
  tools: {
    getWeather: tool({
      description: "Current weather of a city",
      inputSchema: z.object({ city: z.string().max(12) }),
      execute: async ({ city }) => { asked.push(city); return `${10 + asked.length} degrees in ${city}`; },
    }),
  },
  stopWhen: stepCountIs(3),
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber < 2 ? "required" : "none" }),
});
const cities = [];
const run = await generateText(agent("You compare the weather.", cities));
assert.equal(cities.length, 2);
assert.deepEqual(run.steps.map((step) => step.finishReason).slice(0, 2), ["tool-calls", "tool-calls"]);
assert.ok(run.text);
assert.ok(run.totalUsage.outputTokens > 0);
const streamedCities = [];
const runStream = streamText(agent("You compare the weather, streamed.", streamedCities));
const kinds = new Set();
for await (const part of runStream.fullStream) {
  assert.notEqual(part.type, "error", String(part.error));
  kinds.add(part.type);
}
for (const kind of ["tool-input-delta", "tool-call", "tool-result", "text-delta"]) assert.ok(kinds.has(kind), kind);
assert.equal(streamedCities.length, 2);
assert.ok((await runStream.totalUsage).outputTokens > 0);

const typed = await generateText({
  model, prompt: "Name a town.", temperature: 0, maxOutputTokens: 64,
  output: Output.object({ schema: z.object({ name: z.string().max(12), big: z.boolean() }) }),
});
assert.equal(typeof typed.output.name, "string");
assert.equal(typeof typed.output.big, "boolean");

console.log(JSON.stringify({ loops: 2 }));
