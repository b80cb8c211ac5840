// Applies event streams with the page's code and compares the state with every snapshot. Streams are separated by empty lines.

import { readFileSync } from "node:fs";

import { apply, compareWithEngine, countBlocks, nameFields, stateFrom } from "../../octavo/web/state.js";

const differences = [];
let events = 0, snapshots = 0;
readFileSync(0, "utf8").trim().split("\n\n").forEach((stream, index) => {
  let state = null;
  for (const text of stream.split("\n")) {
    const line = JSON.parse(text);
    if (line[0] === "snapshot") {
      const [, number, step, time, about, snapshot] = line;
      if (state) differences.push(...compareWithEngine(state, about, snapshot).map((words) => `stream ${index}, event ${number}: ${words}`));
      else state = stateFrom(about, snapshot, number, step, time);
      snapshots += 1;
    } else {
      const event = nameFields(line, state.about.fields);
      try {
        apply(state, event);
      } catch (error) {
        throw new Error(`stream ${index}, ${text}`, { cause: error });
      }
      events += 1;
    }
    const { used, cached, free, total } = countBlocks(state);
    if (used + cached + free !== total) differences.push(`stream ${index}, ${text}: ${used} + ${cached} + ${free} is not ${total}`);
    if (differences.length > 10) break;
  }
});
console.log(JSON.stringify({ differences: differences.slice(0, 10), events, snapshots }));
