// The lines of an event stream, and the state of the engine after any of them.
//
// Lines are kept as they come. A copy of the state is kept after every few thousand of them, so
// that the state after any line is found by continuing from the copy before it. Indices of lines are
// counted from the first line that was ever added.

import { findLast } from "./spans.js";
import { apply, cloneState, compareWithEngine, MAX_ENDED, nameFields, stateFrom } from "./state.js";

const KEYFRAME_INTERVAL = 16384; // Lines between two copies of the state.
const MAX_LINES = 1_200_000; // The older half of the lines is forgotten when there are more.

export class History {
  // `listener(event, state, index)` is called with every event in its order, once.
  constructor(
    listener = () => {},
    { keyframeInterval = KEYFRAME_INTERVAL, maxLines = MAX_LINES } = {},
  ) {
    this.listener = listener;
    this.keyframeInterval = keyframeInterval;
    this.maxLines = maxLines;
    this.lines = [];
    this.first = 0; // The index of lines[0].
    this.keyframes = []; // { index, state }: the state after the line with this index.
    this.snapshots = []; // { index, line }: the engine's own state after the line with this index.
    this.steps = []; // The index of the first line of each step.
    this.restarts = []; // The index of the first line of each engine process but the first.
    this.end = null; // The state after all lines.
    // Comparisons with snapshots: { stream, index, step, differences }.
    this.checks = [];
    this.origin = 0; // Seconds since 1970 at time 0.
    this.offset = 0; // Microseconds between the first stream and the present one.
    // `numbering` is added to the numbers of the present engine process, so that its requests do not
    // get the letters of earlier ones. `largest` has the largest numbers so far.
    this.numbering = { names: 0, ids: 0 };
    this.largest = { names: 0, ids: 0 };
    this.namesBefore = new Map(); // The name of an engine process -> numbering.names for it.
    this.streams = new Set(); // The names of all streams so far.
    this.isRepeated = false; // The lines belong to an earlier stream, and are known already.
  }

  get last() {
    return this.first + this.lines.length - 1;
  }

  line(index) {
    return this.lines[index - this.first];
  }

  event(index) {
    return nameFields(this.line(index), this.end.about.fields);
  }

  // Adds lines that were parsed from JSON. A server repeats what it has kept when a page connects
  // again; such lines are skipped.
  add(lines) {
    for (const line of lines) {
      if (line[0] === "snapshot") this.#addSnapshot(line);
      else if (this.end && !this.isRepeated && line[1] > this.end.number) this.#addEvent(line);
    }
    if (this.lines.length > this.maxLines) this.#forget();
  }

  #addEvent(line) {
    if (this.offset) shiftTimes(line, this.offset);
    renumber(line, this.end.about.fields, this.numbering);
    if (line[0] === "arrived") this.#noteLargest(line[4], line[5]);
    else if (line[0] === "forked") this.#noteLargest(line[4], 0);
    if (line[2] !== this.end.step) this.steps.push(this.last + 1);
    this.lines.push(line);
    const event = nameFields(line, this.end.about.fields);
    apply(this.end, event);
    this.listener(event, this.end, this.last);
    if (this.last - this.keyframes.at(-1).index >= this.keyframeInterval) this.#addKeyframe();
  }

  // Remembers the largest numbers of sequences and of requests.
  #noteLargest(id, name) {
    this.largest.ids = Math.max(this.largest.ids, id);
    this.largest.names = Math.max(this.largest.names, name);
  }

  #addKeyframe() {
    this.keyframes.push({ index: this.last, state: cloneState(this.end) });
  }

  // A snapshot begins a stream, or repeats the state of the engine, with which the state of the
  // page must agree.
  #addSnapshot([kind, number, step, time, about, snapshot]) {
    const before = this.end;
    if (!before) this.origin = about.unix_time;
    const isNew = before?.about.stream !== about.stream;
    this.isRepeated = isNew ? this.streams.has(about.stream) : false;
    if (this.isRepeated || (!isNew && number < before.number)) return;
    this.streams.add(about.stream);
    if (isNew) this.offset = Math.round(1e6 * (about.unix_time - this.origin));
    const opening = openingOf(before, about, isNew);
    if (opening === "restarted" && !about.renumbered) this.numbering = { ...this.largest };
    this.namesBefore.set(about.engine, this.numbering.names);
    const state = renumberSnapshot(shiftSnapshot(snapshot, this.offset), this.numbering);
    for (const { seq, name } of state.sequences) this.#noteLargest(seq, name);
    const line = [
      kind,
      number,
      step,
      time + this.offset,
      { ...about, unix_time: this.origin, renumbered: true },
      state,
    ];
    if (!isNew && before.number === number) {
      this.#check(before, about, state, step);
      this.snapshots.push({ index: this.last, line });
      return;
    }
    this.end = stateFrom(about, state, number, step, line[3]);
    if (before) continueFrom(before, this.end, opening === "restarted");
    this.lines.push([opening, number, step, line[3], ...factsOf(opening, before, this.end)]);
    this.steps.push(this.last);
    if (opening === "restarted") this.restarts.push(this.last);
    this.snapshots.push({ index: this.last, line });
    this.listener({ kind: opening, number, step, time: line[3] }, this.end, this.last);
    this.#addKeyframe();
  }

  #check(before, about, snapshot, step) {
    const differences = compareWithEngine(before, about, snapshot);
    this.checks.push({ stream: about.stream, index: this.last, step, differences });
    if (differences.length) console.error("The state of the page differs from the engine's.", differences);
  }

  // Returns the check to show for a line of a stream: a failed check of the stream, or else the
  // latest one up to this line. It is undefined if there is none.
  checkOf(stream, index) {
    const checks = this.checks.filter((check) => check.stream === stream);
    return (
      checks.find(({ differences }) => differences.length) ?? checks.findLast((check) => check.index <= index)
    );
  }

  // Forgets about half of the lines. The remaining ones begin with a snapshot.
  #forget() {
    const middle = this.first + this.lines.length / 2;
    const start = this.snapshots.find(({ index }) => index >= middle)?.index;
    if (start === undefined) return;
    const state = this.stateAt(start);
    this.lines.splice(0, start - this.first);
    this.first = start;
    this.keyframes = [
      { index: start, state: cloneState(state) },
      ...this.keyframes.filter(({ index }) => index > start),
    ];
    this.snapshots = this.snapshots.filter(({ index }) => index >= start);
    this.checks = this.checks.filter(({ index, differences }) => index >= start || differences.length);
    this.steps = this.steps.filter((index) => index >= start);
  }

  // Returns the state after the line with this index. `from` is { index, state } of a state that
  // may be changed and continued.
  stateAt(index, from = null) {
    if (index >= this.last) return this.end;
    const keyframe = this.keyframes.findLast((frame) => frame.index <= index) ?? this.keyframes[0];
    const isNear =
      from && from.state !== this.end && from.index <= index && from.index >= keyframe.index;
    const state = isNear ? from.state : cloneState(keyframe.state);
    // A line that is not an event of the engine has a keyframe of its own.
    for (let i = (isNear ? from : keyframe).index + 1; i <= index; i += 1)
      apply(state, nameFields(this.line(i), state.about.fields));
    return state;
  }

  // ---- steps: their indices are counted from the first step that is known -----------------------

  // Returns the index of the step to which a line belongs.
  stepAt(index) {
    return Math.max(
      0,
      findLast(this.steps, (first) => first <= index),
    );
  }

  // Returns the index of the last line of a step.
  endOfStep(stepIndex) {
    return stepIndex + 1 < this.steps.length ? this.steps[stepIndex + 1] - 1 : this.last;
  }

  // Returns the index of the step with this number, or -1. Each engine process counts its steps;
  // without an engine, the latest step with this number counts.
  stepIndexOfNumber(number, engine = 0) {
    return this.steps.findLastIndex(
      (index) => this.line(index)[2] === number && (!engine || this.engineAt(index) === engine),
    );
  }

  // Returns the first and the last number of the steps of an engine process, and the index of the
  // step whose number is the nearest; null if there is no step of the process.
  nearestStep(number, engine) {
    let nearest = null;
    this.steps.forEach((index, stepIndex) => {
      if (this.engineAt(index) !== engine) return;
      const step = this.line(index)[2];
      nearest ??= { first: step, last: step, stepIndex, distance: Infinity };
      const distance = Math.abs(step - number);
      if (distance <= nearest.distance) Object.assign(nearest, { stepIndex, distance });
      nearest.last = step;
    });
    return nearest;
  }

  // Returns the index of the last line of the step to which a line belongs.
  endOfStepWith(index) {
    return this.endOfStep(this.stepAt(index));
  }

  // Returns the number of the engine process to which a line belongs.
  engineAt(index) {
    return 1 + this.restarts.filter((first) => first <= index).length;
  }

  indexOfTime(time) {
    return (
      this.first +
      Math.max(
        0,
        findLast(this.lines, (line) => line[3] <= time),
      )
    );
  }

  // Returns the lines as text, as a recording has them.
  text() {
    const snapshots = new Map(this.snapshots.map(({ index, line }) => [index, line]));
    const parts = [];
    this.lines.forEach((line, i) => {
      const snapshot = snapshots.get(this.first + i);
      const isEvent = !OPENINGS.includes(line[0]) && i > 0;
      if (isEvent) parts.push(JSON.stringify(line));
      if (snapshot && (!isEvent || i === 0)) parts.push(JSON.stringify(snapshot));
    });
    return `${parts.join("\n")}\n`;
  }
}

// The kinds of snapshots that begin a stream: the first one; one of a new engine process; one of the
// same process, after no page was open for a while; and one after lines were skipped.
const OPENINGS = ["opened", "restarted", "reopened", "gap"];

function openingOf(before, about, isNew) {
  if (!before) return "opened";
  if (!isNew) return "gap";
  return about.engine && about.engine === before.about.engine ? "reopened" : "restarted";
}

// Returns the fields of the line with which a snapshot begins: OWN_FIELDS of state.js.
function factsOf(opening, before, state) {
  if (opening === "opened") return [];
  if (opening !== "restarted") return [state.number - before.number];
  return [before.step, state.counters.failed - before.counters.failed];
}

// Keeps what a snapshot does not have: requests that have ended, and texts.
function continueFrom(before, state, isNewEngine) {
  state.ended = before.ended;
  state.since = before.since;
  state.engine = before.engine + (isNewEngine ? 1 : 0);
  for (const name of ["finished", "failed", "refused", "evictions", "drafted", "accepted"])
    state.counters[name] = before.counters[name];
  const ending = isNewEngine
    ? { state: "failed", reason: "lost", error: "the engine process ended" }
    : { state: "ended", reason: "unseen", error: "" };
  const lost = [...before.sequences.values()].filter((seq) => !state.sequences.has(seq.id));
  if (isNewEngine) state.counters.failed += lost.length;
  state.ended = [
    ...before.ended,
    ...lost.map((seq) => ({
      ...seq,
      ...ending,
      ended: state.time,
      step: before.step,
      table: [],
      blocks: seq.table.length,
    })),
  ].slice(-MAX_ENDED);
  for (const [id, seq] of state.sequences) {
    const { text, reply, admitted, preempted } = before.sequences.get(id) ?? {};
    if (text !== undefined) Object.assign(seq, { text, reply, admitted, preempted });
  }
}

// Fields of events with the id of a sequence, with ids, and with lists that begin with an id.
const ID = new Set(["seq", "parent", "beneficiary", "waits_for"]);
const IDS = new Set(["decode", "untried"]);
const LISTS = new Set(["chunks", "beams", "text"]);

// Adds to the numbers of sequences, and to those from which requests are named. No sequence has
// the number 0.
export function renumber(line, fields, { names, ids }) {
  if (!names && !ids) return;
  const shiftId = (id) => (id ? id + ids : id);
  (fields[line[0]] ?? []).forEach((field, i) => {
    const value = line[i + 4];
    if (field === "name") line[i + 4] = value + names;
    else if (ID.has(field)) line[i + 4] = shiftId(value);
    else if (!Array.isArray(value)) return;
    else if (IDS.has(field)) line[i + 4] = value.map(shiftId);
    else if (LISTS.has(field)) line[i + 4] = value.map(([id, ...rest]) => [shiftId(id), ...rest]);
  });
}

function renumberSnapshot(snapshot, { names, ids }) {
  if (!names && !ids) return snapshot;
  const shiftId = (id) => (id ? id + ids : id);
  return {
    ...snapshot,
    sequences: snapshot.sequences.map((seq) => ({
      ...seq,
      seq: shiftId(seq.seq),
      name: seq.name + names,
      waits: seq.waits && seq.waits.map((value, i) => (i === 0 || i === 3 ? shiftId(value) : value)),
    })),
    in_flight: snapshot.in_flight.map((plan) => ({
      ...plan,
      items: plan.items.map(([id, ...rest]) => [shiftId(id), ...rest]),
    })),
  };
}

// Adds `offset` to the number from which each request is named, in events and in snapshots.
export function renameRequests(lines, offset) {
  const numbering = { names: offset, ids: 0 };
  let fields = {};
  lines.forEach((line, i) => {
    if (line[0] === "snapshot") {
      fields = line[4].fields;
      lines[i] = [...line.slice(0, 5), renumberSnapshot(line[5], numbering)];
    } else renumber(line, fields, numbering);
  });
}

const shiftTime = (time, offset) => (time === null || time === undefined ? time : time + offset);

// Shifts the times in a line. octavo/core/event_stream.py names its fields.
function shiftTimes(line, offset) {
  const indices = { arrived: [11, 12], committed: [5, 6, 7, 8, 9, 10] }[line[0]] ?? [];
  for (const index of [3, ...indices]) line[index] = shiftTime(line[index], offset);
}

function shiftSnapshot(snapshot, offset) {
  if (!offset) return snapshot;
  const sequences = snapshot.sequences.map((seq) => ({
    ...seq,
    arrival: shiftTime(seq.arrival, offset),
    deadline: shiftTime(seq.deadline, offset),
    first_token: shiftTime(seq.first_token, offset),
  }));
  return { ...snapshot, sequences };
}
