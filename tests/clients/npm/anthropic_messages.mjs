import Anthropic from '@anthropic-ai/sdk';
import { citySchema, model, question, report, system, url, weatherQuestion } from './common.mjs';

const client = new Anthropic({ baseURL: url, apiKey: 'unused', maxRetries: 0 });
const greedy = { model, temperature: 0, max_tokens: 60 };
const messages = [{ role: 'user', content: question }];

const whole = await client.messages.create({ ...greedy, system, messages });
const streamed = await client.messages.stream({ ...greedy, system, messages }).finalText();

const tools = [{ name: 'get_weather', description: 'The weather in a city.', input_schema: citySchema }];
const asked = { role: 'user', content: weatherQuestion };
const forced = { ...greedy, messages: [asked], tools, tool_choice: { type: 'tool', name: 'get_weather' } };
const called = await client.messages.create(forced);
const joined = await client.messages.stream(forced).finalMessage();
const answer = await client.messages.create({
  ...greedy,
  tools,
  messages: [
    asked,
    { role: 'assistant', content: called.content },
    { role: 'user', content: [{ type: 'tool_result', tool_use_id: called.content[0].id, content: 'It rains.' }] },
  ],
});

const structured = await client.messages.create({
  ...greedy,
  messages,
  output_config: { format: { type: 'json_schema', schema: citySchema } },
});
const counted = await client.messages.countTokens({ model, system, messages });

report({
  text: whole.content[0].text,
  streamed,
  call: called.content[0],
  streamed_call: joined.content[0],
  answered: answer.content.length > 0,
  object: JSON.parse(structured.content[0].text),
  counted: counted.input_tokens,
  input: whole.usage.input_tokens + (whole.usage.cache_read_input_tokens ?? 0),
});
