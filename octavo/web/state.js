// The state of an engine, derived from its event stream (octavo/core/event_stream.py). The same
// code runs on the live page, on a recording and in an exported file. It holds what the events say
// and simulates nothing.
//
//   const state = stateFrom(about, snapshot);   // the first line of a stream
//   apply(state, event);                        // each following line, as an object (nameFields)

export const MAX_ENDED = 400; // Finished, failed and refused requests that stay listed.
export const NO_FREE_SLOT = "every batch slot is in use"; // octavo/core/reasons.py
// These are in octavo/core/reasons.py.
export const NO_BLOCK_AVAILABLE = "no block was available";
export const TOO_FEW_BLOCKS = "too few blocks are available for it";
export const BEHIND_ANOTHER = "a sequence before it did not fit into this step";

// A request has no sequence while its structured output is compiled, and none if it is refused. Such
// requests have negative ids: refused ones are above -COMPILING.
const COMPILING = 2 ** 40;

// The fields of lines that the page adds to the history itself.
const OWN_FIELDS = {
  gap: ["missed"],
  reopened: ["missed"],
  restarted: ["after", "lost"], // The last step of the engine process before, and its requests.
};
const NO_FIELDS = [];

// Turns a line of the stream into an object. `fields` are those of the snapshot.
export function nameFields(line, fields) {
  const names = fields[line[0]] ?? OWN_FIELDS[line[0]] ?? NO_FIELDS;
  const event = { kind: line[0], number: line[1], step: line[2], time: line[3] };
  for (let i = 0; i < names.length; i += 1) event[names[i]] = line[i + 4];
  return event;
}

export function stateFrom(about, snapshot, number = 0, step = 0, time = 0) {
  const blocks = about.num_blocks + 1;
  const state = {
    about,
    settings: snapshot.settings,
    engine: 1, // The engine processes that the page knows are counted from 1.
    // The first step that the page knows, if requests had started before it; else 0. The page counts
    // ended requests from there on.
    since: snapshot.counters.queried_tokens ? step : 0,
    number,
    step,
    time,
    sequences: new Map(), // Live sequences by id.
    ended: [], // The latest requests that have ended or were refused, oldest first.
    compiling: new Map(), // Requests whose structured output is being compiled, by request id.
    // Device blocks. Arrays are indexed by block; block 0 is padding.
    references: new Uint16Array(blocks),
    used: 0, // Blocks with references.
    contents: new Uint32Array(blocks), // The number of the content; 0: none.
    parents: new Uint32Array(blocks), // The number of the content before it.
    // A free block with a smaller number is reused earlier.
    freeOrder: new Float64Array(blocks).fill(Infinity),
    front: 0,
    back: 0,
    // Host blocks.
    hostContents: new Uint32Array(about.host_blocks),
    hostReady: new Uint8Array(about.host_blocks),
    onDisk: snapshot.disk,
    decode: [], // The sequences that decode in the latest plan.
    inFlight: new Map(), // Steps that are launched and not committed, by number.
    plan: null, // The latest plan.
    counters: {
      ...snapshot.counters,
      evictions: 0,
      finished: 0,
      failed: 0,
      refused: 0,
      drafted: 0,
      accepted: 0,
    },
  };
  for (const { seq, waits, ...fields } of snapshot.sequences) {
    const [, reason, needed, waits_for, ahead] = waits ?? [];
    const wait = waits ? { reason, needed, waits_for, ahead, step } : null;
    state.sequences.set(
      seq,
      newSequence({ ...fields, id: seq, table: fields.table.slice(), waits: wait }),
    );
    for (const block of fields.table) state.references[block] += 1;
  }
  for (const block of [...snapshot.promoted, ...snapshot.withheld]) state.references[block] += 1;
  for (const references of state.references.subarray(1)) state.used += references > 0;
  for (const [block, content, parent] of snapshot.contents) {
    state.contents[block] = content;
    state.parents[block] = parent;
  }
  for (const [first, count] of snapshot.free) {
    for (let block = first; block < first + count; block += 1)
      state.freeOrder[block] = state.back += 1;
  }
  for (const [block, content, ready] of snapshot.host) {
    state.hostContents[block] = content;
    state.hostReady[block] = ready === "ready" ? 1 : 0;
  }
  for (const { step: number, items, sampled } of snapshot.in_flight) {
    const named = items.map(([id, epoch, tokens, drafts], i) => ({
      id,
      epoch,
      tokens,
      drafts,
      samples: sampled[i],
    }));
    state.inFlight.set(number, { step: number, items: named });
  }
  return state;
}

const newSequence = (fields) => ({
  index: 0,
  // A small number that no other live sequence has, for its colour; -1 before its first admission.
  label: -1,
  state: "waiting",
  generated: 0,
  dropped: 0,
  computed: 0, // Positions whose KV is there.
  planned: 0, // Positions after all steps in flight.
  cached: 0,
  preemptions: 0,
  epoch: 0, // Raised by a preemption: results of earlier steps no longer count.
  inherited: 0,
  first_token: null,
  table: [], // Its blocks, in the order of its text.
  // Why it waits: reason, blocks needed, the sequence it waits for, how many are ahead; and the step
  // of the first plan that decided so, and the blocks that were in use then.
  waits: null,
  unplanned: null, // Why it was not part of a step: reason, blocks needed, step.
  // The last preemption: reason, beneficiary, positions, blocks, contents of its full blocks, step,
  // time.
  preempted: null,
  // The last admission: cached and recomputed tokens, why the match ended, step, time.
  admitted: null,
  drafted: 0,
  accepted: 0,
  reply: "",
  ...fields,
});

// Returns an independent copy, from which the state can be continued later.
export function cloneState(state) {
  const copy = {
    ...state,
    counters: { ...state.counters },
    ended: state.ended.slice(),
    compiling: new Map(state.compiling),
  };
  for (const name of [
    "references",
    "contents",
    "parents",
    "freeOrder",
    "hostContents",
    "hostReady",
  ])
    copy[name] = state[name].slice();
  copy.sequences = new Map(
    [...state.sequences].map(([id, seq]) => [id, { ...seq, table: seq.table.slice() }]),
  );
  copy.inFlight = new Map(state.inFlight);
  return copy;
}

export function apply(state, event) {
  state.number = event.number;
  state.step = event.step;
  state.time = event.time;
  handlers[event.kind]?.(state, event, state.sequences.get(event.seq));
}

function takeBlock(state, block) {
  if (!state.references[block]) state.used += 1;
  state.references[block] += 1;
  state.freeOrder[block] = Infinity;
}

// A block without content is reused next; a cached block is reused last.
function releaseBlock(state, block) {
  state.references[block] -= 1;
  if (state.references[block]) return;
  state.used -= 1;
  state.freeOrder[block] = state.contents[block] ? (state.back += 1) : (state.front -= 1);
}

// Returns the content of a full block. Of two blocks with the same content, only one has its number.
// For the other, the parent of the sequence's next block is the content, if that block is full.
const contentOf = (state, block, next) =>
  state.contents[block] || (next && state.contents[next] ? state.parents[next] : 0);

function end(state, seq, event, reason, error = "") {
  if (!seq) return;
  state.sequences.delete(seq.id);
  const blocks = seq.table.length;
  addEnded(state, {
    ...seq,
    generated: event.generated,
    state: error ? "failed" : reason === "abort" ? "aborted" : "done",
    reason,
    error,
    ended: event.time,
    step: event.step,
    blocks,
    table: [],
  });
}

function addEnded(state, entry) {
  state.ended.push(entry);
  if (state.ended.length > MAX_ENDED) state.ended.shift();
}

const handlers = {
  arrived(state, event) {
    const {
      seq,
      name,
      request,
      prompt,
      limit,
      priority,
      tenant,
      deadline,
      arrival,
      text,
      time,
      step,
    } = event;
    state.compiling.delete(request);
    state.sequences.set(
      seq,
      newSequence({
        id: seq,
        name,
        request,
        prompt,
        limit,
        priority,
        tenant,
        deadline,
        arrival,
        text,
        queued: time,
        queuedStep: step,
      }),
    );
  },
  forked(state, event) {
    const parent = state.sequences.get(event.parent);
    if (!parent) return;
    if (parent.state === "prefill") parent.state = "decode";
    state.sequences.set(event.seq, {
      ...parent,
      id: event.seq,
      label: event.label,
      index: event.index,
      parent: event.parent,
      state: "waiting",
      table: [],
      computed: 0,
      planned: 0,
      epoch: 0,
      preemptions: 0,
      inherited: 1,
      first_token: null,
      waits: null,
      unplanned: null,
      preempted: null,
      admitted: null,
    });
  },
  compiling(state, { request, prompt, time, step, number }) {
    const entry = newSequence({
      id: -(COMPILING + number),
      name: 0,
      request,
      state: "compiling",
      prompt,
      limit: prompt,
      priority: 0,
      tenant: "",
      arrival: time,
      step,
    });
    state.compiling.set(request, entry);
  },
  refused(state, { request, reason, time, step }) {
    state.compiling.delete(request);
    // A request that had been queued has ended already, or is about to. `answer` is the reason that its
    // client received.
    const queued = [...state.sequences.values(), ...state.ended].filter(
      (seq) => seq.request === request || seq.request.startsWith(`${request}-`),
    );
    if (queued.length) {
      for (const seq of queued) seq.answer = reason;
      return;
    }
    state.counters.refused += 1;
    addEnded(
      state,
      newSequence({
        id: -state.counters.refused,
        label: -1,
        name: 0,
        request,
        state: "refused",
        reason,
        error: reason,
        ended: time,
        step,
        blocks: 0,
        prompt: 0,
        limit: 0,
        priority: 0,
        tenant: "",
        arrival: time,
      }),
    );
  },
  admitted(state, event, seq) {
    seq.state = "prefill";
    seq.label = event.label;
    seq.computed = seq.planned = event.cached;
    seq.dropped = event.dropped;
    seq.waits = null;
    seq.admitted = {
      cached: event.cached,
      tokens: event.tokens,
      match_end: event.match_end,
      missing: event.missing,
      recomputed: event.recomputed,
      step: event.step,
      time: event.time,
    };
    if (!seq.preemptions && !seq.inherited) {
      seq.cached = event.cached;
      state.counters.queried_tokens += event.tokens;
      state.counters.cached_tokens += event.cached;
    } else state.counters.recomputed_tokens += event.recomputed;
  },
  waiting(state, { reason, needed, waits_for, ahead, step }, seq) {
    seq.waits = { reason, needed, waits_for, ahead, step, used: state.used };
  },
  unplanned(state, { reason, needed, step }, seq) {
    seq.unplanned = { reason, needed, step };
  },
  recomputes(state, event, seq) {
    state.counters.recomputed_tokens += seq.computed;
    seq.computed = seq.planned = 0;
    seq.state = "prefill";
  },
  preempted(state, { reason, beneficiary, positions, step, time }, seq) {
    seq.state = "waiting";
    const contents = seq.table.map((block, i) => contentOf(state, block, seq.table[i + 1]));
    const blocks = seq.table.length;
    seq.preempted = { reason, beneficiary, positions, blocks, contents, step, time };
    seq.waits = null;
    seq.computed = seq.planned = 0;
    seq.epoch += 1;
    seq.preemptions += 1;
    state.counters.preemptions += 1;
  },
  finished(state, event, seq) {
    state.counters.finished += 1;
    end(state, seq, event, event.reason);
  },
  failed(state, event, seq) {
    state.counters.failed += 1;
    end(state, seq, event, "error", event.error);
  },

  planned(state, event) {
    const items = event.chunks.map(([id, start, tokens, isLast, samples]) => {
      const seq = state.sequences.get(id);
      seq.planned = start + tokens;
      if (isLast) seq.state = "decode";
      return { id, epoch: seq.epoch, tokens, drafts: 0, samples, start };
    });
    state.decode = event.decode ?? state.decode;
    const decodes = state.decode.map((id, i) => {
      const seq = state.sequences.get(id);
      const drafts = event.drafts?.[i] ?? 0;
      seq.planned += 1 + drafts;
      return { id, epoch: seq.epoch, tokens: 1 + drafts, drafts, samples: 1 };
    });
    // The engine lists decoding sequences first.
    state.plan = {
      step: event.step,
      items: [...decodes, ...items],
      budget: event.budget,
      urgent: event.urgent,
      used: state.used, // Blocks that were in use when the plan was made.
    };
    state.inFlight.set(event.step, state.plan);
    for (const id of event.untried ?? []) {
      const seq = state.sequences.get(id);
      if (seq) seq.waits = null;
    }
  },
  landed(state, event) {
    const plan = state.inFlight.get(event.of);
    state.inFlight.delete(event.of);
    plan?.items.forEach((item, i) => {
      const seq = state.sequences.get(item.id);
      if (!seq || seq.epoch !== item.epoch) return;
      const sampled = event.tokens ? event.tokens[i] : item.samples;
      const accepted = item.drafts ? sampled - 1 : 0;
      seq.computed += item.tokens - item.drafts + accepted;
      seq.planned -= item.drafts - accepted;
      seq.generated += sampled;
      seq.drafted += item.drafts;
      seq.accepted += accepted;
      state.counters.drafted += item.drafts;
      state.counters.accepted += accepted;
      state.counters.computed_tokens += item.tokens;
      state.counters.generated_tokens += sampled;
      if (sampled && seq.first_token === null) seq.first_token = event.time;
    });
    for (const [id, piece] of event.text ?? []) {
      const seq = state.sequences.get(id);
      if (seq) seq.reply += piece;
    }
  },
  committed(state, event) {
    for (const [id, generated, computed] of event.beams ?? []) {
      const seq = state.sequences.get(id);
      if (!seq) continue;
      seq.generated = generated;
      if (seq.state === "decode") seq.computed = computed;
    }
  },
  stepfailed(state, event) {
    state.inFlight.delete(event.of);
  },

  shared(state, event, seq) {
    seq.table = event.blocks.slice();
    for (const block of event.blocks) if (block) takeBlock(state, block);
    if (seq.state !== "waiting") return;
    seq.state = "decode"; // A fork starts with the blocks of its parent.
    seq.computed = seq.planned = state.sequences.get(seq.parent)?.computed ?? 0;
  },
  allocated(state, event, seq) {
    event.blocks.forEach((block, i) => {
      takeBlock(state, block);
      if (seq) seq.table[event.first + i] = block;
    });
  },
  copied(state, event, seq) {
    seq.table[seq.table.indexOf(event.source)] = event.target;
    takeBlock(state, event.target);
    releaseBlock(state, event.source);
    state.counters.copies += 1;
  },
  dropped(state, event, seq) {
    seq.table.splice(seq.table.indexOf(event.block), 1);
    releaseBlock(state, event.block);
    seq.planned -= state.about.block_size;
    seq.computed = seq.planned;
    seq.dropped += state.about.block_size;
  },
  released(state, event, seq) {
    for (const block of event.blocks) {
      releaseBlock(state, block);
      if (seq) seq.table.splice(seq.table.lastIndexOf(block), 1);
    }
  },
  published(state, event) {
    state.contents[event.block] = event.content;
    state.parents[event.block] = event.parent;
  },
  evicted(state, event) {
    state.contents[event.block] = 0;
    state.counters.evictions += 1;
  },
  cleared(state) {
    state.contents.fill(0);
  },

  stored(state, event) {
    state.onDisk = event.on_disk;
    if (event.tier !== "host") return;
    state.hostContents[event.host_block] = event.content;
    state.hostReady[event.host_block] = 0;
  },
  requested(state, event) {
    state.hostContents[event.host_block] = event.content;
    state.hostReady[event.host_block] = 0;
  },
  ready(state, event) {
    state.hostReady[event.host_block] = 1;
  },
  forgotten(state, event) {
    state.onDisk = event.on_disk;
    if (event.tier === "host")
      state.hostContents[event.host_block] = state.hostReady[event.host_block] = 0;
  },
  listed(state, event) {
    state.onDisk = event.contents;
  },
  settings(state, event) {
    state.settings = event.settings;
  },
};

// ---- questions about a state --------------------------------------------------------------------

// Counts blocks. The sum of used, cached and free must be the total.
export function countBlocks(state) {
  let used = 0;
  let shared = 0;
  let cached = 0;
  let free = 0;
  for (let block = 1; block < state.references.length; block += 1) {
    const isListed = state.freeOrder[block] !== Infinity;
    if (state.references[block] && !isListed) {
      used += 1;
      if (state.references[block] > 1) shared += 1;
    } else if (!state.references[block] && isListed) {
      if (state.contents[block]) cached += 1;
      else free += 1;
    }
  }
  return { used, shared, cached, free, total: state.about.num_blocks };
}

export function countStates(state) {
  const counts = { decode: 0, prefill: 0, waiting: state.compiling.size };
  for (const seq of state.sequences.values()) counts[seq.state] += 1;
  return counts;
}

// Whether a reason to wait belongs to a request before this one.
export const isOfAnother = ({ reason }) => reason === BEHIND_ANOTHER;

// Returns the waiting sequence at which the latest plan stopped, or null. Those behind it were not
// tried.
export function lastTried(state) {
  let last = null;
  for (const seq of state.sequences.values()) {
    if (seq.state !== "waiting" || !seq.waits || isOfAnother(seq.waits)) continue;
    if (seq.waits.ahead >= (last?.waits.ahead ?? 0)) last = seq;
  }
  return last;
}

// Returns the waiting sequence whose reason explains why this one waits: itself, one before it, or
// null if no plan has come to a decision.
export const blockerOf = (seq, state) =>
  seq.waits && !isOfAnother(seq.waits) ? seq : (lastTried(state) ?? (seq.waits ? seq : null));

// Returns how many blocks the setting "block limit" keeps out of use.
export const countWithheld = ({ about, settings }) => about.num_blocks - settings.block_limit;

// Whether fewer sequences run than there are batch slots.
export function hasFreeSlot(state) {
  const { decode, prefill } = countStates(state);
  return decode + prefill < state.about.max_num_seqs;
}

// Returns the latest plan that left a sequence waiting: { step, used }, the blocks that were in use;
// null if the page has not seen it. An empty plan is not reported, but its decisions are.
export function decisionOf({ waits }, { plan }) {
  if (plan && plan.step >= waits.step) return plan;
  return waits.used === undefined ? null : waits;
}

// Returns how many blocks could be taken now: free ones, and cached ones that would be evicted.
export const countAvailable = ({ about, used }) => about.num_blocks - used;

// Returns a reason for waiting in words. A plan decides at the start of a step, and a sequence may
// end before the end of it. `needed` is the number of blocks that the sequence needs to start.
export function wordsOfReason(reason, state, needed = 0) {
  if (reason === NO_FREE_SLOT && hasFreeSlot(state))
    return "every batch slot was in use at the start of this step";
  if (reason === TOO_FEW_BLOCKS && needed && needed <= countAvailable(state))
    return "too few blocks were available for it at the start of this step";
  return reason;
}

// Returns the tokens that the latest admission of a sequence found in the prefix cache or in host
// memory. The page may not have seen that admission.
export const cachedOf = ({ admitted, cached }) => admitted?.cached ?? cached;

// Returns how many blocks of a preempted sequence could be reused now, from its beginning to the
// first that is missing: { device, host }; null if the page has not seen the preemption.
export function countReusable({ preempted }, state) {
  if (!preempted) return null;
  const onDevice = new Set(state.contents);
  const onHost = new Set(state.hostContents);
  const reusable = { device: 0, host: 0 };
  for (const content of preempted.contents) {
    if (!content || !(onDevice.has(content) || onHost.has(content))) break;
    reusable[onDevice.has(content) ? "device" : "host"] += 1;
  }
  return reusable;
}

// Returns block -> ids of the sequences that hold it.
export function findOwners(state) {
  const owners = new Map();
  for (const seq of state.sequences.values()) {
    for (const block of seq.table) {
      if (owners.has(block)) owners.get(block).push(seq.id);
      else owners.set(block, [seq.id]);
    }
  }
  return owners;
}

// Returns blocks without references in the order in which they are reused.
export function freeList(state) {
  const blocks = [];
  for (let block = 1; block < state.freeOrder.length; block += 1)
    if (state.freeOrder[block] !== Infinity) blocks.push(block);
  return blocks.sort((a, b) => state.freeOrder[a] - state.freeOrder[b]);
}

const COMPARED = [
  "state",
  "label",
  "name",
  "request",
  "index",
  "prompt",
  "limit",
  "computed",
  "planned",
  "cached",
  "preemptions",
  "priority",
  "tenant",
  "deadline",
  "arrival",
  "epoch",
];
const COUNTED = ["preemptions", "copies", "queried_tokens", "cached_tokens", "recomputed_tokens"];

// Compares a state with the engine's own, from a snapshot at the same place of the stream. Returns
// what differs, in words.
export function compareWithEngine(state, about, snapshot) {
  const engine = stateFrom(about, snapshot);
  const differences = [];
  const compare = (what, mine, theirs) => {
    if (JSON.stringify(mine) !== JSON.stringify(theirs))
      differences.push(`${what}: page ${JSON.stringify(mine)}, engine ${JSON.stringify(theirs)}`);
  };
  compare("live sequences", [...state.sequences.keys()].sort(), [...engine.sequences.keys()].sort());
  for (const [id, theirs] of engine.sequences) {
    const mine = state.sequences.get(id);
    if (!mine) continue;
    for (const name of COMPARED)
      compare(`${name} of sequence ${id}`, mine[name] ?? null, theirs[name] ?? null);
    if (theirs.state !== "waiting")
      compare(`tokens of sequence ${id}`, mine.generated, theirs.generated);
    compare(`blocks of sequence ${id}`, mine.table, theirs.table);
    const [why, whyOfEngine] = [mine, theirs].map(({ waits }) => waits && { ...waits, step: 0, used: 0 });
    compare(`reason why sequence ${id} waits`, why, whyOfEngine);
  }
  compare("contents", [...state.contents], [...engine.contents]);
  compare("references", [...state.references], [...engine.references]);
  compare("free list", freeList(state), freeList(engine));
  compare("host contents", [...state.hostContents], [...engine.hostContents]);
  compare("host blocks that are ready", [...state.hostReady], [...engine.hostReady]);
  compare("contents on disk", state.onDisk, engine.onDisk);
  compare("steps in flight", [...state.inFlight.keys()], [...engine.inFlight.keys()]);
  for (const name of COUNTED) compare(name, state.counters[name], engine.counters[name]);
  return differences;
}
