import OpenAI from 'openai';
import { citySchema, model, question, report, system, url, weatherQuestion } from './common.mjs';

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: 'unused', maxRetries: 0 });
const greedy = { model, temperature: 0, max_output_tokens: 60 };

const whole = await client.responses.create({ ...greedy, instructions: system, input: question });
let streamed = '';
const kinds = [];
for await (const event of await client.responses.create({ ...greedy, instructions: system, input: question, stream: true })) {
  kinds.push(event.type);
  if (event.type === 'response.output_text.delta') streamed += event.delta;
}

const tools = [{ type: 'function', name: 'get_weather', description: 'The weather in a city.', parameters: citySchema, strict: true }];
const forced = { ...greedy, input: weatherQuestion, tools, tool_choice: { type: 'function', name: 'get_weather' } };
const called = await client.responses.create(forced);
const joined = await client.responses.stream(forced).finalResponse();
const call = called.output.find((item) => item.type === 'function_call');
const answer = await client.responses.create({
  ...greedy,
  tools,
  previous_response_id: called.id,
  input: [{ type: 'function_call_output', call_id: call.call_id, output: 'It rains.' }],
});

const structured = await client.responses.create({
  ...greedy,
  input: question,
  text: { format: { type: 'json_schema', name: 'answer', schema: citySchema, strict: true } },
});

report({
  text: whole.output_text,
  streamed,
  last_event: kinds.at(-1),
  call,
  streamed_call: joined.output.find((item) => item.type === 'function_call'),
  answered: answer.status,
  object: JSON.parse(structured.output_text),
});
