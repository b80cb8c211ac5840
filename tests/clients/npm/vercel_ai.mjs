// Usage: vercel_ai.mjs URL PARROT_URL PROVIDER
import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateObject, generateText, stepCountIs, streamObject, streamText, tool } from 'ai';
import {
  callQuestion, City, model as name, objectQuestion, parrot, parrotUrl, question, report, system, url, weatherOf, weatherQuestion,
} from './common.mjs';

const providers = {
  openai: (options, id) => createOpenAI(options)(id), // over /v1/responses
  'openai-chat': (options, id) => createOpenAI(options).chat(id),
  'openai-compatible': (options, id) =>
    createOpenAICompatible({ ...options, name: 'octavo', supportsStructuredOutputs: true })(id),
  anthropic: (options, id) => createAnthropic(options)(id),
};
const connect = (base, id) => providers[process.argv[4]]({ baseURL: `${base}/v1`, apiKey: 'unused' }, id);
const model = connect(url, name);
const greedy = { model, temperature: 0, maxOutputTokens: 60, maxRetries: 0 };

const whole = await generateText({ ...greedy, system, prompt: question });
let streamed = '';
for await (const piece of streamText({ ...greedy, system, prompt: question }).textStream) streamed += piece;

const weather = { description: 'The weather in a city.', inputSchema: City };
const forced = {
  ...greedy,
  prompt: weatherQuestion,
  tools: { get_weather: tool(weather) },
  toolChoice: { type: 'tool', toolName: 'get_weather' },
};
const called = await generateText(forced);
const streamedCalls = await streamText(forced).toolCalls;

const answer = await generateText({
  model: connect(parrotUrl, parrot),
  maxOutputTokens: 200,
  maxRetries: 0,
  prompt: callQuestion,
  tools: { get_weather: tool({ ...weather, execute: async ({ city }) => weatherOf(city) }) },
  stopWhen: stepCountIs(2),
});

const structured = { ...greedy, schema: City, prompt: question };
const object = await generateObject(structured);
let streamedObject;
for await (const part of streamObject(structured).partialObjectStream) streamedObject = part;

const repeating = { model: connect(parrotUrl, parrot), maxOutputTokens: 200, maxRetries: 0 };
// For models that it does not know, the provider for Anthropic asks for a call of a tool named json.
const asCall = process.argv[4] === 'anthropic';
const said = { ...repeating, schema: City, prompt: asCall ? callQuestion.replace('get_weather', 'json') : objectQuestion };
let lastPart;
for await (const part of streamObject(said).partialObjectStream) lastPart = part;
const chosen = { ...repeating, prompt: callQuestion, tools: { get_weather: tool(weather) } };
const exact = {
  object: JSON.stringify((await generateObject(said)).object),
  streamed_object: JSON.stringify(lastPart),
  streamed_call: (await streamText(chosen).toolCalls)[0].input,
};

report({
  text: whole.text,
  streamed,
  call: called.toolCalls[0],
  streamed_call: streamedCalls[0],
  answer: answer.text,
  object: object.object,
  streamed_object: streamedObject,
  exact,
});
