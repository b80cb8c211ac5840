import OpenAI from 'openai';
import {
  callQuestion, citySchema, model, objectQuestion, parrot, parrotUrl, question, report, system, url, weatherOf, weatherQuestion,
} from './common.mjs';

const connect = (base) => new OpenAI({ baseURL: `${base}/v1`, apiKey: 'unused', maxRetries: 0 });
const client = connect(url);
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

const chosen = { model: parrot, max_output_tokens: 200, tools };
const first = await connect(parrotUrl).responses.create({ ...chosen, input: callQuestion });
const call = first.output.find((item) => item.type === 'function_call');
const answer = await connect(parrotUrl).responses.create({
  ...chosen,
  previous_response_id: first.id,
  input: [{ type: 'function_call_output', call_id: call.call_id, output: weatherOf(JSON.parse(call.arguments).city) }],
});

const format = { type: 'json_schema', name: 'answer', schema: citySchema, strict: true };
const structured = { ...greedy, input: question, text: { format } };
const object = await client.responses.create(structured);
const streamedObject = await client.responses.stream(structured).finalResponse();

const said = { model: parrot, max_output_tokens: 60, input: objectQuestion, text: { format } };
const repeating = connect(parrotUrl).responses;
const joinedCall = (await repeating.stream({ ...chosen, input: callQuestion }).finalResponse()).output[0];
const exact = {
  object: (await repeating.create(said)).output_text,
  streamed_object: (await repeating.stream(said).finalResponse()).output_text,
  streamed_call: JSON.parse(joinedCall.arguments),
};

report({
  text: whole.output_text,
  streamed,
  last_event: kinds.at(-1),
  call: called.output.find((item) => item.type === 'function_call'),
  streamed_call: joined.output.find((item) => item.type === 'function_call'),
  answer: answer.output_text,
  object: JSON.parse(object.output_text),
  streamed_object: JSON.parse(streamedObject.output_text),
  exact,
});
