import OpenAI from 'openai';
import { citySchema, model, question, report, system, url, weatherQuestion } from './common.mjs';

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: 'unused', maxRetries: 0 });
const greedy = { model, temperature: 0, max_tokens: 60 };
const messages = [{ role: 'system', content: system }, { role: 'user', content: question }];

const whole = await client.chat.completions.create({ ...greedy, messages });
let streamed = '';
for await (const chunk of await client.chat.completions.create({ ...greedy, messages, stream: true })) {
  streamed += chunk.choices[0]?.delta.content ?? '';
}

const weather = { name: 'get_weather', description: 'The weather in a city.', parameters: citySchema };
const forced = {
  ...greedy,
  messages: [{ role: 'user', content: weatherQuestion }],
  tools: [{ type: 'function', function: weather }],
  tool_choice: { type: 'function', function: { name: 'get_weather' } },
};
const called = await client.chat.completions.create(forced);
const joined = await client.chat.completions.stream(forced).finalChatCompletion();

const structured = await client.chat.completions.create({
  ...greedy,
  messages,
  response_format: { type: 'json_schema', json_schema: { name: 'answer', schema: citySchema, strict: true } },
});
const embedded = await client.embeddings.create({ model, input: ['a', 'b'] });

report({
  text: whole.choices[0].message.content,
  streamed,
  call: called.choices[0].message.tool_calls[0].function,
  streamed_call: joined.choices[0].message.tool_calls[0].function,
  object: JSON.parse(structured.choices[0].message.content),
  embeddings: embedded.data.map((entry) => entry.embedding.length),
});
