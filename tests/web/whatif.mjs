// Reads the result of octavo/bench/what_if.py, and prints the table that the page makes of it, and the letters of the requests.

import { readFileSync } from "node:fs";

// The modules of the page ask the browser for much when they are loaded.
const nothing = { matches: false, addEventListener() {}, getPropertyValue: () => "", append() {} };
Object.assign(globalThis, {
  document: { getElementById: () => nothing, documentElement: {}, body: { dataset: {} } },
  sessionStorage: { getItem: () => null },
  window: {},
  addEventListener() {},
  getComputedStyle: () => nothing,
  matchMedia: () => nothing,
  ResizeObserver: class {},
});
const { isSameRun, readRuns, rowsOf } = await import("../../octavo/web/whatif.js");

const result = JSON.parse(readFileSync(0, "utf8"));
const runs = readRuns(result, 100);
const labelsOf = ({ spans }) =>
  Object.fromEntries(spans.allLanes.map(({ name, label }) => [name, label]));
const namesOf = ({ spans }) => spans.allLanes.map(({ name }) => name);
console.log(JSON.stringify({
  rows: rowsOf(runs, "policy shortest"),
  unchanged: rowsOf(runs, "the same settings").map(([name]) => name),
  names: Object.values(runs).map(namesOf),
  isSame: isSameRun(result),
  labels: Object.values(runs).map(labelsOf),
}));
