// Reads a stream with the page's history, and compares jumps to places with a walk through all of them.

import { readFileSync } from "node:fs";

import { History } from "../../octavo/web/history.js";

const text = readFileSync(0, "utf8").trim();
const read = (options) => {
  const history = new History(() => {}, options);
  for (const line of text.split("\n")) history.add([JSON.parse(line)]);
  return history;
};
const plain = (state) => JSON.stringify(state, (key, value) => (value instanceof Map ? [...value] : ArrayBuffer.isView(value) ? [...value] : value));

const history = read({ keyframeInterval: 40 }), walked = [], differences = [];
let at = { index: history.first, state: history.stateAt(history.first) };
for (let index = history.first; index < history.last; index += 1) {
  at = { index, state: history.stateAt(index, at) };
  if (index % 7 === 0) walked.push([index, plain(at.state)]);
}
for (const [index, state] of walked.reverse()) if (plain(history.stateAt(index)) !== state) differences.push(index);
const events = (all) => all.split("\n").filter((line) => line && !line.startsWith('["snapshot"'));
const isSame = JSON.stringify(events(read().text())) === JSON.stringify(events(text));
// Forgetting old lines changes nothing that is still there.
const shorter = read({ keyframeInterval: 40, maxLines: 200 });
const isKept = shorter.first > 0 && plain(shorter.stateAt(shorter.first + 20)) === plain(history.stateAt(shorter.first + 20));
// A server repeats what it has kept when a page connects again.
const again = read();
again.add(text.split("\n").map((line) => JSON.parse(line)));
const isOnce = again.last === read().last && plain(again.end) === plain(read().end);
// A page that was opened late counts from its first step on, and says so.
const all = text.split("\n").map((line) => JSON.parse(line));
const middle = all.findIndex((line, i) => i > all.length / 2 && line[0] === "snapshot");
const late = new History();
late.add(all.slice(middle));
const since = { early: read().end.since, late: late.end.since, first: all[middle][2] };
console.log(JSON.stringify({ since, differences, places: walked.length, text: isSame, kept: isKept, once: isOnce }));
