// The spans of requests and the steps over time, for the timeline and the percentiles. It is built from the
// same events as the state, and grows with them. Times are in microseconds.
//
// The views show one moment, the cursor. Later events may be known already, because the page stands
// still or shows a recording. Therefore everything here has the index of the line with which it became
// known (`at`), and laneUpTo, stepUpTo, lastLanded and Samples.before leave out what is later. Times
// are not enough for this, because several events may have the same time.

import { countBlocks } from "./state.js";

const INTERVAL = 2e5; // Between two totals.
const MAX_TOTALS = 40_000; // The older half is forgotten when there are more.

// Measured values, each with its time and the index of its line, in the order of the lines. Typed
// arrays hold millions of them.
class Samples {
  constructor() {
    this.indices = new Uint32Array(1024);
    this.times = new Float64Array(1024);
    this.values = new Float32Array(1024);
    this.length = 0;
  }

  add(at, time, value) {
    if (this.length === this.times.length) {
      for (const name of ["indices", "times", "values"]) {
        const larger = new this[name].constructor(2 * this.length);
        larger.set(this[name]);
        this[name] = larger;
      }
    }
    this.indices[this.length] = at;
    this.times[this.length] = time;
    this.values[this.length] = value;
    this.length += 1;
  }

  // Returns the values of the last `seconds` before the cursor, at most the latest 20,000, sorted.
  before({ index, now }, seconds) {
    let low = 0;
    let high = this.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.indices[middle] <= index) low = middle + 1;
      else high = middle;
    }
    let first = low;
    while (first > 0 && low - first < 20000 && this.times[first - 1] > now - 1e6 * seconds)
      first -= 1;
    return this.values.slice(first, low).sort();
  }
}

// A lane is the life of one sequence. Its spans follow each other:
//   waiting    until it is admitted; `reasons` say why it waits
//   preempted  until it is admitted again; `reasons` begin with that of the preemption
//   prefill    one chunk: tokens, step
//   decode     consecutive steps that sample: indices of the first and the last step
class Lane {
  constructor(seq, { time, engine }, at) {
    this.at = at;
    this.endAt = Infinity; // The line with which it ended.
    this.changedAt = at; // The last line that changed it.
    this.labelledAt = seq.label < 0 ? Infinity : at;
    this.id = seq.id;
    this.label = seq.label;
    this.name = seq.name;
    this.index = seq.index;
    this.request = seq.request;
    this.arrival = Math.min(seq.arrival ?? time, time);
    this.engine = engine; // The number of its engine process.
    this.end = Infinity;
    this.reason = "";
    this.spans = [];
    this.marks = []; // { kind, time, ... }: admissions with cached tokens, preemptions.
    this.lastToken = null;
    this.begin("waiting", at, this.arrival);
  }

  begin(kind, at, time, fields = {}) {
    this.close(at, time);
    this.spans.push({ kind, at, start: time, end: Infinity, endAt: Infinity, ...fields });
  }

  close(at, time) {
    this.changedAt = at;
    const last = this.spans.at(-1);
    if (last?.end === Infinity) Object.assign(last, { end: time, endAt: at });
  }

  finish(at, time, reason) {
    this.close(at, time);
    Object.assign(this, { end: time, endAt: at, reason });
  }
}

// Returns a lane as it was known after the line with this index.
export function laneUpTo(lane, index, { steps }) {
  if (lane.changedAt <= index) return lane;
  const hasEnded = lane.endAt <= index;
  const isKnown = ({ at }) => at <= index;
  return {
    ...lane,
    label: lane.labelledAt <= index ? lane.label : -1,
    end: hasEnded ? lane.end : Infinity,
    endAt: hasEnded ? lane.endAt : Infinity,
    reason: hasEnded ? lane.reason : "",
    spans: lane.spans.filter(isKnown).map((span) => spanUpTo(span, index, steps)),
    marks: lane.marks
      .filter(isKnown)
      .map((mark) => (mark.loads ? { ...mark, loads: mark.loads.filter((at) => at <= index) } : mark)),
  };
}

function spanUpTo(span, index, steps) {
  const known = { ...span };
  if (span.kind === "decode" && span.last >= span.first) {
    known.last = Math.min(span.last, lastLanded(steps, index));
    known.end = steps[known.last].landed;
    known.drafts = span.drafts.slice(0, known.last - span.first + 1);
  } else if (span.endAt > index) Object.assign(known, { end: Infinity, endAt: Infinity });
  if (span.reasons) known.reasons = span.reasons.filter(({ at }) => at <= index);
  return known;
}

// Returns a step that has landed as it was known after the line with this index: its times come
// when it is committed.
export const stepUpTo = (step, index) =>
  step.committedAt > index
    ? { ...step, ...step.uncommitted, times: undefined, device: undefined, isOnHost: undefined }
    : step;

export class Spans {
  constructor() {
    this.lanes = new Map(); // By sequence id of the present engine process.
    this.allLanes = []; // In the order of arrival.
    this.steps = []; // Steps that have landed, in their order.
    this.stepIndices = new Map(); // Step number -> its index in `steps`, of the latest steps.
    // What the slider marks: { kind, at }. A preemption names the sequence.
    this.marks = [];
    this.sharings = []; // The lines with which a request got blocks that others hold.
    this.plans = new Map(); // Step number -> its plan, while it is in flight.
    this.ttft = new Samples(); // Times to first token.
    this.itl = new Samples(); // Times between tokens.
    this.totals = []; // What the engine held and had done at regular times: { time, ... }.
    // The sum and the number of the values since the last totals.
    this.recent = { ttft: [0, 0], itl: [0, 0] };
  }

  // Adds an event, whose line has the index `at`.
  add(event, state, at) {
    handlers[event.kind]?.(this, event, state, at);
    if (
      event.kind === "committed" &&
      event.time - (this.totals.at(-1)?.time ?? -Infinity) >= INTERVAL
    )
      this.#addTotals(at, event.time, state);
  }

  addSample(name, at, time, value) {
    this[name].add(at, time, value);
    this.recent[name][0] += value;
    this.recent[name][1] += 1;
  }

  #addTotals(at, time, state) {
    const { used } = countBlocks(state);
    const running = state.plan?.items.length ?? 0;
    const [ttft, itl] = ["ttft", "itl"].map((name) =>
      this.recent[name][1]
        ? this.recent[name][0] / this.recent[name][1]
        : (this.totals.at(-1)?.[name] ?? 0),
    );
    this.totals.push({ ...state.counters, at, time, used, running, plans: state.step, ttft, itl });
    this.recent = { ttft: [0, 0], itl: [0, 0] };
    if (this.totals.length > MAX_TOTALS) this.totals.splice(0, MAX_TOTALS / 2);
  }

  laneOf(id, state, at) {
    let lane = this.lanes.get(id);
    const seq = state.sequences.get(id);
    if (!lane && seq) {
      lane = new Lane(seq, state, at);
      this.lanes.set(id, lane);
      this.allLanes.push(lane);
    }
    return lane;
  }
}

// Begins anew with the state of a snapshot. Lanes of sequences that are gone end for a reason.
function addLanes(spans, state, at, reason = "unseen") {
  spans.plans.clear();
  for (const [id, lane] of spans.lanes) {
    if (state.sequences.has(id)) continue;
    lane.finish(at, state.time, reason);
    spans.lanes.delete(id);
  }
  for (const seq of state.sequences.values()) {
    const lane = spans.laneOf(seq.id, state, at);
    lane.lastToken = seq.first_token;
    if (seq.label >= 0 && lane.label < 0) Object.assign(lane, { label: seq.label, labelledAt: at });
    if (seq.state === "waiting") {
      const isOpen = lane.spans.at(-1).end === Infinity;
      if (!isOpen) lane.begin(seq.preemptions ? "preempted" : "waiting", at, state.time);
    } else {
      lane.begin("decode", at, state.time, {
        first: spans.steps.length,
        last: spans.steps.length - 1,
        tokens: 0,
        drafts: [],
      });
    }
  }
}

function addAfterGap(spans, state, at) {
  spans.marks.push({ kind: "gap", at });
  addLanes(spans, state, at);
}

const handlers = {
  opened: (spans, event, state, at) => addLanes(spans, state, at),
  gap: (spans, event, state, at) => addAfterGap(spans, state, at),
  reopened: (spans, event, state, at) => addAfterGap(spans, state, at),
  restarted(spans, event, state, at) {
    spans.marks.push({ kind: "restarted", at });
    addLanes(spans, state, at, "lost");
  },
  arrived: (spans, event, state, at) => spans.laneOf(event.seq, state, at),
  forked: (spans, event, state, at) => spans.laneOf(event.seq, state, at),
  waiting(spans, event, state, at) {
    const lane = spans.laneOf(event.seq, state, at);
    const span = lane?.spans.at(-1);
    if (!span || span.end !== Infinity) return;
    lane.changedAt = at;
    (span.reasons ??= []).push({ at, step: event.step, reason: event.reason, needed: event.needed });
  },
  admitted(spans, event, state, at) {
    const lane = spans.laneOf(event.seq, state, at);
    if (lane.labelledAt === Infinity) lane.labelledAt = at;
    lane.label = event.label;
    lane.close(at, event.time);
    lane.marks.push({
      kind: "admitted",
      at,
      loads: [], // The lines with which blocks of it came from host memory.
      time: event.time,
      cached: event.cached,
      recomputed: event.recomputed,
      blockSize: state.about.block_size,
      step: event.step,
    });
  },
  loaded(spans, event, state, at) {
    if (event.tier !== "host") return;
    for (const seq of state.sequences.values()) {
      if (seq.admitted?.step !== event.step || !seq.table.includes(event.block)) continue;
      const lane = spans.lanes.get(seq.id);
      lane?.marks.at(-1)?.loads?.push(at);
      if (lane) lane.changedAt = at;
    }
  },
  preempted(spans, event, state, at) {
    const lane = spans.laneOf(event.seq, state, at);
    spans.marks.push({ kind: "preempted", at, seq: event.seq });
    lane.begin("preempted", at, event.time, {
      reasons: [{ at, step: event.step, reason: event.reason }],
      beneficiary: event.beneficiary,
      positions: event.positions,
    });
    lane.marks.push({
      kind: "preempted",
      at,
      time: event.time,
      step: event.step,
      reason: event.reason,
      beneficiary: event.beneficiary,
      policy: state.settings.policy,
    });
  },
  shared(spans, event, state, at) {
    if (event.blocks.some((block) => block && state.references[block] > 1)) spans.sharings.push(at);
  },
  finished: (spans, event, state, at) => endLane(spans, event, at, event.reason),
  failed: (spans, event, state, at) => endLane(spans, event, at, "error"),

  planned(spans, event, state) {
    spans.plans.set(event.step, { time: event.time, plan: state.plan });
  },
  landed(spans, event, state, at) {
    const planned = spans.plans.get(event.of);
    spans.plans.delete(event.of);
    if (!planned) return;
    const { plan, time } = planned;
    const stepIndex = spans.steps.length;
    const start = Math.max(time, spans.steps.at(-1)?.landed ?? 0);
    const step = {
      at,
      committedAt: 0, // The line with which its times became known.
      number: event.of,
      engine: state.engine,
      start,
      planned: time,
      landed: event.time,
      budget: plan.budget,
      prefill: 0,
      decode: 0,
      drafted: 0,
      accepted: 0,
      sampled: 0,
      urgent: plan.urgent,
    };
    spans.steps.push(step);
    spans.stepIndices.set(event.of, stepIndex);
    spans.stepIndices.delete(event.of - 64);
    plan.items.forEach((item, i) => {
      const sampled = event.tokens ? event.tokens[i] : item.samples;
      if (item.start === undefined) step.decode += 1;
      else step.prefill += item.tokens;
      step.drafted += item.drafts;
      step.sampled += sampled;
      step.accepted += item.drafts ? sampled - 1 : 0;
      const lane = spans.lanes.get(item.id);
      // The results of a sequence that was preempted since do not count.
      if (!lane || (lane.spans.at(-1).start > time && lane.spans.at(-1).kind === "preempted"))
        return;
      lane.changedAt = at;
      if (item.start === undefined) addDecode(lane, stepIndex, step, item, sampled);
      else {
        lane.begin("prefill", at, start, {
          end: event.time,
          endAt: at,
          step: event.of,
          tokens: item.tokens,
          from: item.start,
          stepIndex,
        });
      }
      if (sampled) addToken(spans, lane, at, event.time, sampled);
    });
  },
  committed(spans, event, state, at) {
    const step = spans.steps[spans.stepIndices.get(event.of)];
    if (!step) return;
    step.committedAt = at;
    step.uncommitted = { start: step.start };
    const { started, planned, launched, wait_began, landed, done, device } = event;
    Object.assign(step, {
      times: { started, planned, launched, wait_began, landed, done },
      device,
      isOnHost: state.about.device === "cpu", // The launch computes and returns afterwards.
    });
    step.start = Math.max(started, step.start - (step.planned - started));
  },
  stepfailed(spans, event) {
    spans.plans.delete(event.of);
  },
};

function addDecode(lane, stepIndex, step, item, sampled) {
  const span = lane.spans.at(-1);
  if (span.kind === "decode" && span.last === stepIndex - 1) {
    span.last = stepIndex;
    span.end = step.landed;
    span.tokens += sampled;
  } else {
    lane.begin("decode", step.at, step.start, {
      first: stepIndex,
      last: stepIndex,
      end: step.landed,
      tokens: sampled,
      drafts: [],
    });
  }
  if (item.drafts) {
    lane.spans.at(-1).drafts[stepIndex - lane.spans.at(-1).first] = {
      drafted: item.drafts,
      accepted: sampled - 1,
    };
  }
}

function addToken(spans, lane, at, time, sampled) {
  if (lane.lastToken === null) spans.addSample("ttft", at, time, time - lane.arrival);
  else spans.addSample("itl", at, time, (time - lane.lastToken) / sampled);
  lane.lastToken = time;
}

function endLane(spans, event, at, reason) {
  const lane = spans.lanes.get(event.seq);
  if (!lane) return;
  lane.finish(at, event.time, reason);
  spans.lanes.delete(event.seq);
}

export const percentile = (sorted, q) =>
  sorted.length ? sorted[Math.max(Math.ceil((sorted.length * q) / 100) - 1, 0)] : null;

// Returns the index of the last entry for which `holds` is true, or -1. It must be true up to some
// entry and false after it.
export function findLast(list, holds) {
  let low = -1;
  let high = list.length - 1;
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    if (holds(list[middle])) low = middle;
    else high = middle - 1;
  }
  return low;
}

// Returns the index of the last step that had landed at the line with this index, or -1.
export const lastLanded = (steps, index) => findLast(steps, (step) => step.at <= index);
