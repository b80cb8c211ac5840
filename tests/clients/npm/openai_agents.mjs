import { Agent, OpenAIProvider, Runner, setTracingDisabled, tool } from '@openai/agents';
import {
  callQuestion, City, model, objectQuestion, parrot, parrotUrl, question, report, system, url, weatherOf, weatherQuestion,
} from './common.mjs';

setTracingDisabled(true);
// Over /v1/responses, as the library does by default.
const connect = (base) => new Runner({ modelProvider: new OpenAIProvider({ baseURL: `${base}/v1`, apiKey: 'unused', useResponses: true }) });
const runner = connect(url);
const repeating = connect(parrotUrl);
const greedy = { temperature: 0, maxTokens: 60 };
const agent = (options) => new Agent({ name: 'helper', model, modelSettings: greedy, ...options });
const agentThatRepeats = (options) => agent({ model: parrot, modelSettings: { maxTokens: 200 }, ...options });

async function streamedOutput(from, helper, input) {
  const run = await from.run(helper, input, { stream: true });
  for await (const event of run) void event;
  await run.completed;
  return run.finalOutput;
}

const helper = agent({ instructions: system });
const whole = await runner.run(helper, question);
let streamed = '';
for await (const piece of (await runner.run(helper, question, { stream: true })).toTextStream()) streamed += piece;

const calls = [];
const weather = tool({
  name: 'get_weather',
  description: 'The weather in a city.',
  parameters: City,
  execute: async ({ city }) => {
    calls.push({ city });
    return weatherOf(city);
  },
});
const forced = agent({
  tools: [weather],
  toolUseBehavior: 'stop_on_first_tool',
  modelSettings: { ...greedy, toolChoice: 'get_weather' },
});
const forcedOutput = (await runner.run(forced, weatherQuestion)).finalOutput;
const streamedForced = await streamedOutput(runner, forced, weatherQuestion);
const [call, streamedCall] = calls;

const chosen = agentThatRepeats({ tools: [weather] });
const answer = (await repeating.run(chosen, callQuestion)).finalOutput;
const streamedAnswer = await streamedOutput(repeating, chosen, callQuestion);

const structured = agent({ outputType: City });
const exactly = agentThatRepeats({ outputType: City });
report({
  text: whole.finalOutput,
  streamed,
  call,
  streamed_call: streamedCall,
  outputs: [forcedOutput, streamedForced],
  answer,
  streamed_answer: streamedAnswer,
  object: (await runner.run(structured, question)).finalOutput,
  streamed_object: await streamedOutput(runner, structured, question),
  exact: {
    object: JSON.stringify((await repeating.run(exactly, objectQuestion)).finalOutput),
    streamed_object: JSON.stringify(await streamedOutput(repeating, exactly, objectQuestion)),
    streamed_call: calls.at(-1),
  },
});
