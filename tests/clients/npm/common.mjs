// What every program here asks: the same questions, tool and schema.
import { z } from 'zod';

export const url = process.argv[2];
export const model = 'smollm2';
// A server whose model repeats the last message, so that a message can hold the call of a tool.
export const parrotUrl = process.argv[3];
export const parrot = 'tiny';
export const callQuestion = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>';
export const objectQuestion = '{"city":"Paris"}';
export const weatherOf = (city) => `It rains in ${city}.`;
export const system = 'Answer in one word.';
export const question = 'What is the capital of France?';
export const weatherQuestion = 'Is it raining in Paris?';
export const citySchema = {
  type: 'object',
  properties: { city: { type: 'string', maxLength: 20 } },
  required: ['city'],
  additionalProperties: false,
};
export const City = z.object({ city: z.string().max(20) });

// Prints what a program found. tests/clients/test_npm.py reads it.
export function report(found) {
  console.log(JSON.stringify(found));
}
