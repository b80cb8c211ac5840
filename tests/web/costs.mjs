// Reads streams, which are separated by empty lines, and compares what the page says about shortages, preemptions and loaded blocks with
// what the engine decided afterwards. Prints what differs, and how much was compared.

import { readFileSync } from "node:fs";

import { History } from "../../octavo/web/history.js";
import { Spans } from "../../octavo/web/spans.js";
import { cachedOf, countBlocks, countReusable, decisionOf, TOO_FEW_BLOCKS } from "../../octavo/web/state.js";

// The modules with words ask the browser for colours when they are loaded.
const nothing = { matches: false, addEventListener() {}, getPropertyValue: () => "" };
Object.assign(globalThis, {
  document: { getElementById: () => nothing, documentElement: {} },
  addEventListener() {},
  getComputedStyle: () => nothing,
  matchMedia: () => nothing,
  ResizeObserver: class {},
});
const { Names, wordsOfReturn } = await import("../../octavo/web/words.js");

const found = [];
const counted = { used: 0, shortages: 0, resumed: 0, reused: 0, fromHost: 0, loaded: 0, byAnother: 0 };
const check = (holds, name, ...facts) => holds || found.push(`${name}: ${JSON.stringify(facts)}`);

// The state before an event: what could be reused by each preempted sequence.
function reusableBefore(state) {
  const waiting = [...state.sequences.values()].filter((seq) => seq.state === "waiting" && seq.preemptions);
  return new Map(waiting.map((seq) => [seq.id, countReusable(seq, state)]));
}

function checkEvent(event, state, before) {
  counted.used += 1;
  check(countBlocks(state).used === state.used, "used", countBlocks(state).used, state.used);
  if (event.kind === "planned" || event.kind === "waiting") {
    for (const seq of state.sequences.values()) {
      const { waits } = seq;
      if (seq.state !== "waiting" || waits?.reason !== TOO_FEW_BLOCKS || !waits.needed) continue;
      counted.shortages += 1;
      const { used } = decisionOf(seq, state);
      check(waits.needed > state.about.num_blocks - used, "shortage", waits, used);
    }
  }
  if (event.kind !== "admitted" || !before.has(event.seq)) return;
  const seq = state.sequences.get(event.seq);
  check(cachedOf(seq) === event.cached, "the latest admission", event.cached, cachedOf(seq));
  const reusable = before.get(event.seq);
  if (!reusable) return;
  counted.resumed += 1;
  const most = (reusable.device + reusable.host) * state.about.block_size;
  // The engine may find less, because it computes the last token, or if computing is faster than loading. It finds more on disk, or if
  // another request has computed the same tokens.
  if (event.cached && event.cached <= most) counted.reused += 1;
  check(event.cached <= most || state.about.has_disk || event.cached > [...seq.preempted.contents, 0].indexOf(0) * state.about.block_size, "reuse", event.cached, most);
}

// Who computed a content for the first time, and for whom it was loaded, read off the lines alone.
function checkOrigins(lines, history, names) {
  const owners = new Map(), loads = new Map(), writers = new Map();
  lines.forEach((line, i) => {
    const event = history.event(history.first + i);
    if (event.kind === "allocated") for (const block of event.blocks) owners.set(block, event.seq), loads.delete(block);
    else if (event.kind === "copied") owners.set(event.target, event.seq), loads.delete(event.target);
    else if (event.kind === "loaded" && event.tier === "host") loads.set(event.block, event);
    if (event.kind !== "published") return;
    const { about } = history.end;
    const [first, second] = names.originOf(event.content, { about, number: event.number });
    const load = loads.get(event.block);
    if (!load) {
      writers.set(event.content, owners.get(event.block));
      check(first === `computed by ${names.letters(owners.get(event.block))}`, "origin", first);
      return;
    }
    counted.loaded += 1;
    const seq = owners.get(event.block), writer = writers.get(event.content);
    const whom = seq ? `loaded from host memory for ${names.letters(seq)}` : "read from disk";
    counted.byAnother += Boolean(writer) && writer !== seq;
    const words = `${whom} in step ${load.step.toLocaleString("en")}`;
    const expected = writer ? [`computed by ${names.letters(writer)}`, words] : [words, undefined];
    check(JSON.stringify([first, second]) === JSON.stringify(expected), "origin of a loaded block", [first, second], expected);
  });
}

for (const stream of readFileSync(0, "utf8").trim().split("\n\n")) {
  const lines = stream.split("\n").map((line) => JSON.parse(line));
  const spans = new Spans(), names = new Names();
  let before = new Map();
  const history = new History((event, state, index) => {
    spans.add(event, state, index);
    names.add(event, state, index);
    checkEvent(event, state, before);
    before = reusableBefore(state);
  });
  history.add(lines);
  checkOrigins(history.lines, history, names);
  for (const { marks, spans: parts } of spans.allLanes) {
    check(parts.every(({ kind }) => ["waiting", "preempted", "prefill", "decode"].includes(kind)), "kinds", parts);
    marks.forEach((mark, i) => (counted.fromHost += mark.kind === "admitted" && marks[i - 1]?.kind === "preempted" && mark.loads.length > 0));
  }
  const { step } = history.end;
  const nearest = history.nearestStep(step + 1000, 1);
  check(nearest.last === step && history.line(history.steps[nearest.stepIndex])[2] === step, "nearest step", nearest, step);
  check(history.nearestStep(0, 1).first === lines[0][2] && history.nearestStep(1, 2) === null, "first step");
}

const words = [
  { positions: 161, cached: 160, recomputed: 1, loads: 10 },
  { positions: 161, cached: 160, recomputed: 1, loads: 0 },
  { positions: 40, cached: 32, recomputed: 8, loads: 1 },
  { positions: 40, cached: 0, recomputed: 40, loads: 0 },
  { positions: 32, cached: 32, recomputed: 0, loads: 2 },
].map((each) => wordsOfReturn({ ...each, blockSize: 16 }));
console.log(JSON.stringify({ found: found.slice(0, 6), counted, words }));
