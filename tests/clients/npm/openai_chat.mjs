import OpenAI from 'openai';
import {
  callQuestion, citySchema, model, objectQuestion, parrot, parrotUrl, question, report, system, url, weatherOf, weatherQuestion,
} from './common.mjs';

const connect = (base) => new OpenAI({ baseURL: `${base}/v1`, apiKey: 'unused', maxRetries: 0 });
const client = connect(url);
const greedy = { model, temperature: 0, max_tokens: 60 };
const messages = [{ role: 'system', content: system }, { role: 'user', content: question }];

const whole = await client.chat.completions.create({ ...greedy, messages });
let streamed = '';
for await (const chunk of await client.chat.completions.create({ ...greedy, messages, stream: true })) {
  streamed += chunk.choices[0]?.delta.content ?? '';
}

const weather = { name: 'get_weather', description: 'The weather in a city.', parameters: citySchema };
const tools = [{ type: 'function', function: weather }];
const forced = {
  ...greedy,
  messages: [{ role: 'user', content: weatherQuestion }],
  tools,
  tool_choice: { type: 'function', function: { name: 'get_weather' } },
};
const called = await client.chat.completions.create(forced);
const joined = await client.chat.completions.stream(forced).finalChatCompletion();

const run = connect(parrotUrl).chat.completions.runTools({
  model: parrot,
  max_tokens: 200,
  messages: [{ role: 'user', content: callQuestion }],
  tools: [{ type: 'function', function: { ...weather, function: ({ city }) => weatherOf(city), parse: JSON.parse } }],
});

const schema = { name: 'answer', schema: citySchema, strict: true };
const structured = { ...greedy, messages, response_format: { type: 'json_schema', json_schema: schema } };
const object = await client.chat.completions.create(structured);
const streamedObject = await client.chat.completions.stream(structured).finalChatCompletion();
const said = { ...structured, model: parrot, messages: [{ role: 'user', content: objectQuestion }] };
const repeating = connect(parrotUrl).chat.completions;
const asked = { model: parrot, max_tokens: 200, tools, messages: [{ role: 'user', content: callQuestion }] };
const joinedCall = (await repeating.stream(asked).finalChatCompletion()).choices[0].message.tool_calls[0];
const exact = {
  object: (await repeating.create(said)).choices[0].message.content,
  streamed_object: (await repeating.stream(said).finalChatCompletion()).choices[0].message.content,
  streamed_call: JSON.parse(joinedCall.function.arguments),
};
const embedded = await client.embeddings.create({ model, input: ['a', 'b'] });

report({
  text: whole.choices[0].message.content,
  streamed,
  call: called.choices[0].message.tool_calls[0].function,
  streamed_call: joined.choices[0].message.tool_calls[0].function,
  answer: await run.finalContent(),
  object: JSON.parse(object.choices[0].message.content),
  streamed_object: JSON.parse(streamedObject.choices[0].message.content),
  exact,
  embeddings: embedded.data.map((entry) => entry.embedding.length),
});
