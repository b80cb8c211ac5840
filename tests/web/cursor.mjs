// Reads streams, which are separated by empty lines, up to several places, and compares what the views show there with what they show
// of the whole stream when the cursor is at that place.

import { readFileSync } from "node:fs";

import { History } from "../../octavo/web/history.js";
import { laneUpTo, lastLanded, Spans, stepUpTo } from "../../octavo/web/spans.js";

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

function newPage() {
  const spans = new Spans(), names = new Names();
  const history = new History((event, state, index) => {
    spans.add(event, state, index);
    names.add(event, state, index);
  });
  return { spans, names, history };
}

const viewOfLane = ({ id, name, index, label, request, arrival, end, reason, spans, marks }) => ({
  id, name, index, label, request, arrival, end, reason,
  spans: spans.map(({ kind, start, end: until, reasons, first, last, drafts, from, step, positions }) => ({
    kind, start, until, whys: reasons ?? [], first, last, drafts: Object.entries(drafts ?? []).filter(([, each]) => each), from, step,
    positions,
  })),
  marks,
});

// What the views derive from the spans and the names at a line of the history.
function viewsAt({ spans, names, history }, index) {
  const now = history.line(index)[3];
  const lanes = spans.allLanes.filter((lane) => lane.at <= index);
  return {
    lanes: lanes.map((lane) => viewOfLane(laneUpTo(lane, index, spans))),
    steps: spans.steps.slice(0, lastLanded(spans.steps, index) + 1)
      .map((step) => stepUpTo(step, index))
      .map(({ number, start, landed, budget, prefill, decode, drafted, accepted, sampled, times, device }) => ({
        number, start, landed, budget, prefill, decode, drafted, accepted, sampled, times, device,
      })),
    totals: spans.totals.filter((each) => each.at <= index),
    samples: ["ttft", "itl"].map((name) => [...spans[name].before({ index, now }, 30)]),
    names: lanes.map(({ id }) => {
      const { name, index: which, label } = names.at(id, index);
      return { id, name, which, label };
    }),
  };
}

const differences = [];
let compared = 0;
readFileSync(0, "utf8").trim().split("\n\n").forEach((stream, place) => {
  const lines = () => stream.split("\n").map((line) => JSON.parse(line));
  const whole = newPage(), growing = newPage();
  whole.history.add(lines());
  lines().forEach((line, i) => {
    growing.history.add([line]);
    if (i % 23) return;
    const index = growing.history.last;
    const [one, other] = [growing, whole].map((page) => viewsAt(page, index));
    for (const name of Object.keys(one)) {
      compared += 1;
      if (JSON.stringify(one[name]) === JSON.stringify(other[name])) continue;
      const at = Array.isArray(one[name]) ? one[name].findIndex((each, k) => JSON.stringify(each) !== JSON.stringify(other[name][k])) : 0;
      differences.push(JSON.stringify({ place, index, name, then: one[name][at], now: other[name][at] }));
    }
  });
});
console.log(JSON.stringify({ differences: differences.slice(0, 4), number: differences.length, compared }));
