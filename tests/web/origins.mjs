// Compares who computed each content as the page knows it while events arrive, and as it knows it later when it goes back.

import { readFileSync } from "node:fs";

import { History } from "../../octavo/web/history.js";

// The modules with words ask the browser for colours when they are loaded.
const nothing = { matches: false, addEventListener() {}, getPropertyValue: () => "" };
Object.assign(globalThis, {
  document: { getElementById: () => nothing, documentElement: {} },
  addEventListener() {},
  getComputedStyle: () => nothing,
  matchMedia: () => nothing,
  ResizeObserver: class {},
});
const { Names } = await import("../../octavo/web/words.js");

const names = new Names(), seen = [];
const history = new History((event, state, index) => {
  names.add(event, state, index);
  if (event.kind !== "committed") return;
  const origins = [...new Set(state.contents)].filter(Boolean).map((content) => [content, names.originOf(content, state)]);
  seen.push({ index: history.last, origins: JSON.stringify(origins) });
});
history.add(readFileSync(0, "utf8").trim().split("\n").map((line) => JSON.parse(line)));
const differences = [];
let compared = 0;
for (const { index, origins } of seen) {
  const state = history.stateAt(index);
  for (const [content, lines] of JSON.parse(origins)) {
    compared += 1;
    if (JSON.stringify(names.originOf(content, state)) !== JSON.stringify(lines)) differences.push([index, content]);
  }
}
const changed = [...names.contents.values()].filter((all) => new Set(all.map(({ writer }) => writer?.id)).size > 1).length;
console.log(JSON.stringify({ differences, compared, changed }));
