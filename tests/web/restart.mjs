// Reads two streams, separated by an empty line: as those of two engine processes, and the first one with a part that the page has not
// seen. Prints the names, the steps of both engine processes, and what is not as it must be.

import { readFileSync } from "node:fs";

import { History } from "../../octavo/web/history.js";
import { Spans } from "../../octavo/web/spans.js";

// The module with words asks the browser for colours when it is loaded.
const nothing = { matches: false, addEventListener() {}, getPropertyValue: () => "" };
Object.assign(globalThis, {
  document: { getElementById: () => nothing, documentElement: {} },
  addEventListener() {},
  getComputedStyle: () => nothing,
  matchMedia: () => nothing,
  ResizeObserver: class {},
});
const { describe, nameOfStep } = await import("../../octavo/web/words.js");

const [first, second] = readFileSync(0, "utf8").trim().split("\n\n");
const parse = (text, about = {}) => {
  const lines = text.trim().split("\n").map((line) => JSON.parse(line));
  for (const line of lines) if (line[0] === "snapshot") Object.assign(line[4], about);
  return lines;
};
console.error = () => {}; // Differences are printed below.

function open(lines) {
  const spans = new Spans(), arrivals = [], ids = new Set(), reused = [];
  const history = new History((event, state, index) => {
    spans.add(event, state, index);
    if (event.kind !== "arrived") return;
    arrivals.push(event.name);
    if (ids.has(event.seq)) reused.push(event.seq);
    ids.add(event.seq);
  });
  history.add(lines);
  return { history, spans, arrivals, reused };
}

function wrongIn({ history, spans }) {
  const wrong = history.checks.flatMap(({ differences }) => differences);
  const open = spans.allLanes.filter((lane) => lane.end === Infinity).map(({ id }) => id);
  const live = [...history.end.sequences.keys()];
  const sorted = (ids) => JSON.stringify([...ids].sort((a, b) => a - b));
  if (sorted(open) !== sorted(live)) wrong.push(`lanes ${open} are open, sequences ${live} are live`);
  return wrong;
}

// The first engine ends in the middle of its run.
const half = parse(first, { engine: "one" }).slice(0, Math.floor(first.split("\n").length / 2));
const whole = open([...half, ...parse(second, { engine: "two", stream: "two" })]);
const again = open(parse(whole.history.text()));
const lost = whole.history.stateAt(whole.history.last).ended.filter(({ reason }) => reason === "lost");

// What the page says about the restart, and where the steps with one number are that both engine processes have.
function stepsOf({ history, spans }) {
  const index = history.restarts[0];
  const { number } = spans.steps.findLast((each) => each.engine === 2 && history.stepIndexOfNumber(each.number, 1) >= 0);
  const places = [1, 2].map((engine) => history.stepIndexOfNumber(number, engine));
  const ends = places.map((place) => history.endOfStep(place));
  return {
    restarts: history.restarts.length, marks: spans.marks.filter(({ kind }) => kind === "restarted").map(({ at }) => at), last: index,
    words: describe(history.event(index), () => ""), before: history.line(index - 1)[2], number,
    numbers: ends.map((end) => history.line(end)[2]),
    names: ends.map((end) => nameOfStep(history.stateAt(end).step, history.stateAt(end).engine)),
    order: ends[0] < index && index < ends[1],
    latest: history.stepIndexOfNumber(number) === places[1],
    // Any line of a step leads to the end of the step.
    ends: places.every((place, i) => [history.steps[place], ends[i]].every((line) => history.endOfStepWith(line) === ends[i])),
  };
}

// Without the lines between two snapshots, which are the same stream or a new one of the same engine.
function withoutMiddle(about) {
  const lines = parse(first);
  const places = lines.flatMap((line, i) => (line[0] === "snapshot" ? [i] : []));
  const [from, to] = [places[places.length >> 2], places[(3 * places.length) >> 2]];
  const rest = lines.slice(to);
  for (const line of rest) if (line[0] === "snapshot") Object.assign(line[4], about);
  const page = open([...lines.slice(0, from + 1), ...rest]);
  const opening = page.history.lines.find((line) => ["gap", "reopened", "restarted"].includes(line[0]));
  return { wrong: wrongIn(page), opening: opening[0], missed: page.history.event(page.history.first + page.history.lines.indexOf(opening)).missed,
    expected: lines[to][1] - lines[from][1], unseen: page.history.end.ended.filter(({ reason }) => reason === "unseen").length };
}

console.log(JSON.stringify({
  wrong: wrongIn(whole),
  names: [open(half).arrivals, open(parse(second)).arrivals, whole.arrivals],
  again: again.arrivals,
  againWrong: wrongIn(again),
  reused: whole.reused,
  lost: lost.length,
  steps: stepsOf(whole),
  stepsAgain: stepsOf(again),
  gap: withoutMiddle({}),
  reopened: withoutMiddle({ stream: "other" }),
}));
