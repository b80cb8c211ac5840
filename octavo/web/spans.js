// What requests and steps did over time, for the timeline and the percentiles. It is built from the
// same events as the state, and grows with them. Times are in microseconds.

import { countBlocks } from "./state.js";

const FIRST_INTERVAL = 2e5;
const MAX_TOTALS = 1000; // The interval doubles when there are too many totals.

// Values and when they were measured, in the order of time. Arrays of numbers hold millions of
// them.
class Samples {
  constructor() {
    this.times = new Float64Array(1024);
    this.values = new Float32Array(1024);
    this.length = 0;
  }

  add(time, value) {
    if (this.length === this.times.length) {
      for (const name of ["times", "values"]) {
        const larger = new this[name].constructor(2 * this.length);
        larger.set(this[name]);
        this[name] = larger;
      }
    }
    this.times[this.length] = time;
    this.values[this.length] = value;
    this.length += 1;
  }

  // Returns the values of the last `seconds` before a time, at most the latest 20,000, sorted.
  before(time, seconds) {
    let low = 0;
    let high = this.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.times[middle] <= time) low = middle + 1;
      else high = middle;
    }
    let first = low;
    while (first > 0 && low - first < 20000 && this.times[first - 1] > time - 1e6 * seconds)
      first -= 1;
    return this.values.slice(first, low).sort();
  }
}

// A lane is the life of one sequence. Its spans follow each other:
//   waiting    until it is admitted; `why` is the last reason
//   preempted  likewise, after a preemption
//   prefill    one chunk: tokens, step
//   decode     consecutive steps that sample: places of the first and the last step
class Lane {
  constructor(seq, time) {
    this.id = seq.id;
    this.label = seq.label;
    this.name = seq.name;
    this.index = seq.index;
    this.request = seq.request;
    this.arrival = Math.min(seq.arrival ?? time, time);
    this.end = Infinity;
    this.reason = "";
    this.spans = [];
    this.marks = []; // { kind, time, ... }: admissions with cached tokens, preemptions.
    this.lastToken = null;
    this.begin("waiting", this.arrival);
  }

  begin(kind, time, fields = {}) {
    const last = this.spans.at(-1);
    if (last && last.end === Infinity) last.end = time;
    this.spans.push({ kind, start: time, end: Infinity, ...fields });
  }

  close(time) {
    const last = this.spans.at(-1);
    if (last?.end === Infinity) last.end = time;
  }
}

export class Spans {
  constructor() {
    this.lanes = new Map(); // By sequence id of the present engine process.
    this.allLanes = []; // In the order of arrival.
    this.steps = []; // Steps that have landed, in their order.
    this.places = new Map(); // Step number -> its place in `steps`, of steps in flight and the latest ones.
    this.preemptions = []; // The places of the steps that preempted a sequence.
    this.plans = new Map(); // Step number -> its plan, while it is in flight.
    this.ttft = new Samples(); // Times to first token.
    this.itl = new Samples(); // Times between tokens.
    this.totals = []; // What the engine held and had done at regular times: { time, ... }.
    this.interval = FIRST_INTERVAL;
    // The sum and the number of the values since the last totals.
    this.recent = { ttft: [0, 0], itl: [0, 0] };
  }

  add(event, state) {
    handlers[event.kind]?.(this, event, state);
    if (
      event.kind === "committed" &&
      event.time - (this.totals.at(-1)?.time ?? -Infinity) >= this.interval
    )
      this.#addTotals(event.time, state);
  }

  addSample(name, time, value) {
    this[name].add(time, value);
    this.recent[name][0] += value;
    this.recent[name][1] += 1;
  }

  #addTotals(time, state) {
    const { used } = countBlocks(state);
    const running = state.plan?.items.length ?? 0;
    const [ttft, itl] = ["ttft", "itl"].map((name) =>
      this.recent[name][1]
        ? this.recent[name][0] / this.recent[name][1]
        : (this.totals.at(-1)?.[name] ?? 0),
    );
    this.totals.push({ ...state.counters, time, used, running, plans: state.step, ttft, itl });
    this.recent = { ttft: [0, 0], itl: [0, 0] };
    if (this.totals.length <= MAX_TOTALS) return;
    this.totals = this.totals.filter((_, i) => i % 2 === 0);
    this.interval *= 2;
  }

  laneOf(id, state) {
    let lane = this.lanes.get(id);
    const seq = state.sequences.get(id);
    if (!lane && seq) {
      lane = new Lane(seq, state.time);
      this.lanes.set(id, lane);
      this.allLanes.push(lane);
    }
    return lane;
  }
}

function addLanes(spans, state) {
  spans.lanes.clear();
  for (const seq of state.sequences.values()) {
    const lane = spans.laneOf(seq.id, state);
    lane.lastToken = seq.first_token;
    if (seq.state !== "waiting") {
      lane.begin("decode", state.time, {
        first: spans.steps.length,
        last: spans.steps.length - 1,
        tokens: 0,
        drafts: [],
      });
    }
  }
}

const handlers = {
  opened: (spans, event, state) => addLanes(spans, state),
  gap: (spans, event, state) => addLanes(spans, state),
  restarted(spans, event, state) {
    for (const lane of spans.lanes.values()) {
      lane.close(event.time);
      lane.end = event.time;
      lane.reason = "lost";
    }
    spans.plans.clear();
    addLanes(spans, state);
  },
  arrived: (spans, event, state) => spans.laneOf(event.seq, state),
  forked: (spans, event, state) => spans.laneOf(event.seq, state),
  waiting(spans, event, state) {
    const lane = spans.laneOf(event.seq, state);
    const span = lane?.spans.at(-1);
    if (span && span.end === Infinity) span.why = event.reason;
  },
  admitted(spans, event, state) {
    const lane = spans.laneOf(event.seq, state);
    lane.label = event.label;
    lane.close(event.time);
    lane.marks.push({
      kind: "admitted",
      time: event.time,
      cached: event.cached,
      recomputed: event.recomputed,
      step: event.step,
    });
  },
  loaded(spans, event, state) {
    // A preempted sequence that is admitted with blocks from a lower tier was swapped.
    if (event.tier !== "host") return;
    for (const seq of state.sequences.values()) {
      if (seq.admitted?.step !== event.step || !seq.table.includes(event.block)) continue;
      const lane = spans.lanes.get(seq.id);
      const waited = lane?.spans.findLast(
        (span) => span.kind === "preempted" || span.kind === "swapped",
      );
      if (waited && waited.end === seq.admitted.time) waited.kind = "swapped";
      const mark = lane?.marks.at(-1);
      if (mark) mark.loaded = (mark.loaded ?? 0) + 1;
    }
  },
  preempted(spans, event, state) {
    const lane = spans.laneOf(event.seq, state);
    spans.preemptions.push(spans.steps.length + spans.plans.size);
    lane.begin("preempted", event.time, {
      why: event.reason,
      beneficiary: event.beneficiary,
      positions: event.positions,
    });
    lane.marks.push({
      kind: "preempted",
      time: event.time,
      step: event.step,
      reason: event.reason,
      beneficiary: event.beneficiary,
    });
  },
  finished: (spans, event, state) => endLane(spans, event, event.reason),
  failed: (spans, event, state) => endLane(spans, event, "error"),

  planned(spans, event, state) {
    spans.plans.set(event.step, { time: event.time, plan: state.plan });
  },
  landed(spans, event, state) {
    const planned = spans.plans.get(event.of);
    spans.plans.delete(event.of);
    if (!planned) return;
    const { plan, time } = planned;
    const place = spans.steps.length;
    const start = Math.max(time, spans.steps.at(-1)?.landed ?? 0);
    const step = {
      number: event.of,
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
    spans.places.set(event.of, place);
    spans.places.delete(event.of - 64);
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
      if (item.start === undefined) addDecode(lane, place, step, item, sampled);
      else {
        lane.begin("prefill", start, {
          end: event.time,
          step: event.of,
          tokens: item.tokens,
          from: item.start,
          place,
        });
      }
      if (sampled) addToken(spans, lane, event.time, sampled);
    });
  },
  committed(spans, event, state) {
    const step = spans.steps[spans.places.get(event.of)];
    if (!step) return;
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

function addDecode(lane, place, step, item, sampled) {
  const span = lane.spans.at(-1);
  if (span.kind === "decode" && span.last === place - 1) {
    span.last = place;
    span.end = step.landed;
    span.tokens += sampled;
  } else {
    lane.begin("decode", step.start, {
      first: place,
      last: place,
      end: step.landed,
      tokens: sampled,
      drafts: [],
    });
  }
  if (item.drafts) {
    lane.spans.at(-1).drafts[place - lane.spans.at(-1).first] = {
      drafted: item.drafts,
      accepted: sampled - 1,
    };
  }
}

function addToken(spans, lane, time, sampled) {
  if (lane.lastToken === null) spans.addSample("ttft", time, time - lane.arrival);
  else spans.addSample("itl", time, (time - lane.lastToken) / sampled);
  lane.lastToken = time;
}

function endLane(spans, event, reason) {
  const lane = spans.lanes.get(event.seq);
  if (!lane) return;
  lane.close(event.time);
  lane.end = event.time;
  lane.reason = reason;
  spans.lanes.delete(event.seq);
}

export const percentile = (sorted, q) =>
  sorted.length ? sorted[Math.max(Math.ceil((sorted.length * q) / 100) - 1, 0)] : null;

// Returns the place of the last step that had landed at a time.
export function lastLanded(steps, time) {
  let low = -1;
  let high = steps.length - 1;
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    if (steps[middle].landed <= time) low = middle;
    else high = middle - 1;
  }
  return low;
}
