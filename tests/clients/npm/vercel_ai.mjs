// Usage: vercel_ai.mjs URL PROVIDER
import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateObject, generateText, streamText, tool } from 'ai';
import { City, model as name, question, report, system, url, weatherQuestion } from './common.mjs';

const options = { baseURL: `${url}/v1`, apiKey: 'unused' };
const providers = {
  openai: () => createOpenAI(options)(name), // over /v1/responses
  'openai-chat': () => createOpenAI(options).chat(name),
  'openai-compatible': () =>
    createOpenAICompatible({ ...options, name: 'octavo', supportsStructuredOutputs: true })(name),
  anthropic: () => createAnthropic(options)(name),
};
const model = providers[process.argv[3]]();
const greedy = { model, temperature: 0, maxOutputTokens: 60, maxRetries: 0 };

const whole = await generateText({ ...greedy, system, prompt: question });
let streamed = '';
for await (const piece of streamText({ ...greedy, system, prompt: question }).textStream) streamed += piece;

const tools = { get_weather: tool({ description: 'The weather in a city.', inputSchema: City }) };
const forced = { ...greedy, prompt: weatherQuestion, tools, toolChoice: { type: 'tool', toolName: 'get_weather' } };
const called = await generateText(forced);
const streamedCalls = await streamText(forced).toolCalls;

const structured = await generateObject({ ...greedy, schema: City, prompt: question });

report({
  text: whole.text,
  streamed,
  call: called.toolCalls[0],
  streamed_call: streamedCalls[0],
  object: structured.object,
});
