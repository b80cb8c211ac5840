import Anthropic from '@anthropic-ai/sdk';
import {
  callQuestion, citySchema, model, objectQuestion, parrot, parrotUrl, question, report, system, url, weatherOf, weatherQuestion,
} from './common.mjs';

const connect = (base) => new Anthropic({ baseURL: base, apiKey: 'unused', maxRetries: 0 });
const client = connect(url);
const greedy = { model, temperature: 0, max_tokens: 60 };
const messages = [{ role: 'user', content: question }];

const whole = await client.messages.create({ ...greedy, system, messages });
const streamed = await client.messages.stream({ ...greedy, system, messages }).finalText();

const tools = [{ name: 'get_weather', description: 'The weather in a city.', input_schema: citySchema }];
const asked = { role: 'user', content: weatherQuestion };
const forced = { ...greedy, messages: [asked], tools, tool_choice: { type: 'tool', name: 'get_weather' } };
const called = await client.messages.create(forced);
const joined = await client.messages.stream(forced).finalMessage();

const chosen = { model: parrot, max_tokens: 200, tools };
const first = { role: 'user', content: callQuestion };
const turn = await connect(parrotUrl).messages.create({ ...chosen, messages: [first] });
const call = turn.content.find((block) => block.type === 'tool_use');
const answer = await connect(parrotUrl).messages.create({
  ...chosen,
  messages: [
    first,
    { role: 'assistant', content: turn.content },
    { role: 'user', content: [{ type: 'tool_result', tool_use_id: call.id, content: weatherOf(call.input.city) }] },
  ],
});

const structured = { ...greedy, messages, output_config: { format: { type: 'json_schema', schema: citySchema } } };
const object = await client.messages.create(structured);
const streamedObject = await client.messages.stream(structured).finalText();
const said = { ...structured, model: parrot, messages: [{ role: 'user', content: objectQuestion }] };
const exact = {
  object: (await connect(parrotUrl).messages.create(said)).content[0].text,
  streamed_object: await connect(parrotUrl).messages.stream(said).finalText(),
  streamed_call: (await connect(parrotUrl).messages.stream({ ...chosen, messages: [first] }).finalMessage()).content[0].input,
};
const counted = await client.messages.countTokens({ model, system, messages });

report({
  text: whole.content[0].text,
  streamed,
  call: called.content[0],
  streamed_call: joined.content[0],
  answer: answer.content[0].text,
  object: JSON.parse(object.content[0].text),
  streamed_object: JSON.parse(streamedObject),
  exact,
  counted: counted.input_tokens,
  input: whole.usage.input_tokens + (whole.usage.cache_read_input_tokens ?? 0),
});
