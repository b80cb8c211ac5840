// Prints the check that the page shows at several places: of a run, of the run after a restart, and of a run with a wrong snapshot.

import { readFileSync } from "node:fs";

import { History } from "../../octavo/web/history.js";

const text = readFileSync(0, "utf8").trim();
const parse = (stream) => {
  const lines = text.split("\n").map((line) => JSON.parse(line));
  for (const line of lines) if (line[0] === "snapshot") line[4].stream = stream;
  return lines;
};
const history = new History();
history.add(parse("first"));
const end = history.last;
const viewed = history.checks[history.checks.length >> 1].index;
const shown = (stream, index) => history.checkOf(stream, index) ?? null;
const result = {
  viewed,
  before: shown("first", history.first),
  middle: shown("first", viewed),
  last: shown("first", end),
};
const [start] = parse("second");
history.add([start]);
result.restarted = shown("second", history.last);
result.earlier = shown("first", end);

const wrong = new History();
const lines = parse("wrong");
lines.findLast((line) => line[0] === "snapshot")[5].disk += 1;
console.error = () => {}; // The difference is part of the result.
wrong.add(lines);
result.failed = wrong.checkOf("wrong", wrong.first);
console.log(JSON.stringify(result));
