// Why? Explains the chosen request, block or step: the rule that decided, its numbers, what it
// cost, and the line of the source.

import { chip, nameOf } from "./colours.js";
import {
  byId,
  capitalised,
  changeDetector,
  count,
  element,
  fewDigits,
  plural,
  shortId,
  formatDuration,
  updateChildren,
} from "./draw.js";
import { findLast, laneUpTo, lastLanded, percentile, stepUpTo } from "./spans.js";
import {
  blockerOf,
  countAvailable,
  countReusable,
  countWithheld,
  decisionOf,
  findOwners,
  freeList,
  hasFreeSlot,
  isOfAnother,
  NO_BLOCK_AVAILABLE,
  NO_FREE_SLOT,
  TOO_FEW_BLOCKS,
  wordsOfReason,
} from "./state.js";
import { describeStep } from "./timeline.js";
import { isDemonstration, trafficButton } from "./traffic.js";
import { describeBlock } from "./wall.js";
import {
  FINISH_REASONS,
  KINDS,
  describe,
  nameOfStep,
  readRefusal,
  wordsOfRefusal,
  wordsOfReturn,
} from "./words.js";

const panel = byId("why");
const MAX_CHIPS = 40;
const MAX_GROUPS = 8; // Groups of requests that share blocks.
const MAX_EVENTS = 400; // Events of a request that are read.
const MAX_LINES = 40; // Lines of the history of a request.
const THRASHING = 3; // A request that was preempted this often is pointed out.
const isOtherSelection = changeDetector();
let drawn = "";
let isPressed = false; // A pointer is pressed, so that buttons must stay where they are.
let go = () => {};
let select = () => {};
let selectBlock = () => {};
let hoverBlock = () => {};
let redraw = () => {};

export function onWhy(listeners) {
  ({ go, select, selectBlock, hoverBlock, redraw } = listeners);
}

// A block whose number the pointer is at is marked on the wall.
for (const name of ["pointerover", "focusin"]) {
  panel.addEventListener(name, ({ target }) => {
    hoverBlock(Number(target.closest(".block-numbers button")?.textContent ?? 0));
  });
}
for (const name of ["pointerleave", "focusout"]) panel.addEventListener(name, () => hoverBlock(0));

panel.addEventListener("pointerdown", () => (isPressed = true));
for (const name of ["pointerup", "pointercancel"]) {
  addEventListener(name, () => {
    if (!isPressed) return;
    setTimeout(() => {
      isPressed = false;
      redraw();
    });
  });
}

const heading = (text) => element("h3", "", text);
const areOf = (n) => `${count(n)} ${n === 1 ? "is" : "are"}`;
const wereOf = (n) => `${count(n)} ${n === 1 ? "was" : "were"}`;
const blocksAre = (n, verb) => `${plural(n, "block")} ${n === 1 ? verb[0] : verb[1]}`;
const paragraph = (...content) => element("p", "", ...content);

// ---- parts --------------------------------------------------------------------------------------

// A bar for each sequence that holds blocks, longest first.
function holders(state) {
  const tables = [...state.sequences.values()]
    .filter((seq) => seq.table.length)
    .sort((a, b) => b.table.length - a.table.length);
  const list = element("ul", "holders");
  const most = tables[0]?.table.length ?? 1;
  for (const seq of tables.slice(0, 8)) {
    const bar = element("i");
    bar.style.width = `${(100 * seq.table.length) / most}%`;
    const item = element(
      "li",
      "",
      chip(seq),
      element("span", "bar", bar),
      element("b", "", count(seq.table.length)),
    );
    item.addEventListener("click", () => select(seq.id));
    list.append(item);
  }
  if (tables.length > 8)
    list.append(element("li", "others", `and ${plural(tables.length - 8, "request")} more`));
  const withheld = countWithheld(state);
  if (withheld)
    list.append(
      element("li", "others", `${plural(withheld, "block")} withheld by the setting “block limit”`),
    );
  return list;
}

// Returns which blocks are held by which sequences together: { blocks, owners }, the largest group
// first. With `only`, the groups of one sequence.
function groupShared(state, only = null) {
  const groups = new Map(); // The ids of the owners, as text -> a group
  for (const [block, ids] of findOwners(state)) {
    if (ids.length < 2 || (only && !ids.includes(only.id)) || !block) continue;
    const key = [...ids].sort((a, b) => a - b).join();
    if (!groups.has(key))
      groups.set(key, { blocks: [], owners: ids.map((id) => state.sequences.get(id)) });
    groups.get(key).blocks.push(block);
  }
  return [...groups.values()].sort((a, b) => b.blocks.length - a.blocks.length);
}

// Which blocks are shared, and by whom.
function listOfShared(groups) {
  const list = element("ul", "shared-blocks");
  for (const { blocks, owners } of groups.slice(0, MAX_GROUPS)) {
    const numbers = element("span", "block-numbers", blocks.length === 1 ? "block" : "blocks");
    for (const block of blocks.slice(0, MAX_CHIPS)) {
      const button = element("button", "link", String(block));
      button.type = "button";
      button.addEventListener("click", () => selectBlock(block));
      numbers.append(button);
    }
    if (blocks.length > MAX_CHIPS) numbers.append(`and ${count(blocks.length - MAX_CHIPS)} more`);
    list.append(element("li", "", chips(owners), numbers));
  }
  if (groups.length > MAX_GROUPS)
    list.append(element("li", "", `and ${plural(groups.length - MAX_GROUPS, "group")} more`));
  return list;
}

const numberOfBlocks = (groups) => groups.reduce((all, { blocks }) => all + blocks.length, 0);

function explainSharing({ state, spans, history, index }) {
  const groups = groupShared(state);
  if (!groups.length) {
    const last = spans.sharings[findLast(spans.sharings, (at) => at <= index)];
    if (last === undefined || last < history.first) return [];
    return [
      heading("Shared blocks"),
      paragraph(
        "No block is shared now. ",
        // At the end of this step, the other owners may have ended.
        link("Show when a request shared blocks last", last),
        ". The page pauses there.",
      ),
    ];
  }
  const number = numberOfBlocks(groups);
  const saved = groups.reduce((all, { blocks, owners }) => all + blocks.length * (owners.length - 1), 0);
  return [
    heading("Shared blocks"),
    paragraph(
      `${plural(number, "block")} ${number === 1 ? "is" : "are"} held by several requests at once. Without sharing, the same requests would need ${plural(saved, "more block")}.`,
    ),
    listOfShared(groups),
  ];
}

function explainSharingOf(seq, state) {
  if (!seq.table.length) return [];
  const groups = groupShared(state, seq);
  const number = numberOfBlocks(groups);
  const numHeld = seq.table.filter((block) => block).length;
  const words = number
    ? `${count(number)} of its ${plural(numHeld, "block")}. These requests hold them together:`
    : `None of its ${plural(numHeld, "block")}.`;
  return [
    heading("Which blocks does it share?"),
    paragraph(words),
    number ? listOfShared(groups) : null,
  ];
}

const sourceOf = (state, reason) => sourceLine(state.about.sources[reason]?.[0]);

function sourceLine(source) {
  if (!source) return null;
  const code = element("pre", "code");
  source.code.split("\n").forEach((text, i) => {
    const line = element(
      "span",
      source.first + i === source.line ? "here" : "",
      `${String(source.first + i).padStart(4)}  ${text}`,
    );
    code.append(line);
  });
  return element(
    "details",
    "source",
    element("summary", "", `${source.path}:${source.line}`),
    code,
  );
}

// Goes to another moment, whose explanation begins at the top.
function goToMoment(index) {
  panel.scrollTop = 0;
  go(index);
}

const link = (words, index) => {
  const button = element("button", "link", words);
  button.type = "button";
  button.addEventListener("click", () => goToMoment(index));
  return button;
};

// A link to the step to which a line belongs. It leads to the end of the step, like ‹ and ›.
const stepLink = (number, index, { history }) => {
  const button = element("button", "link", nameOfStep(number, history.engineAt(index)));
  button.type = "button";
  button.addEventListener("click", () => goToMoment(history.endOfStepWith(index)));
  return button;
};

// ---- rules --------------------------------------------------------------------------------------

// A preempted request computes again what it had generated.
const firstChunkOf = (seq) =>
  seq.preemptions && seq.generated
    ? `The chunk is what the token budget of the step allows of its prompt (${plural(seq.prompt, "token")}) and of the ${plural(seq.generated, "token")} that it had generated.`
    : `The chunk is what the token budget of the step allows of its prompt (${plural(seq.prompt, "token")}).`;

// The plan decides at the beginning of a step. The end of the step, which the page shows, may have
// other numbers.
function wordsOfShortage(seq, needed, state) {
  const plan = decisionOf(seq, state);
  const available = countAvailable(state);
  const then = plan && state.about.num_blocks - plan.used;
  const decision = plan
    ? `At the beginning of ${nameOfStep(plan.step, state.engine)}, when the scheduler decided, ${wereOf(then)} available, so ${blocksAre(needed - then, ["was", "were"])} missing.`
    : "";
  if (needed <= available)
    return `${decision} ${areOf(available)} available now, so the next step can start it.`;
  return available === then ? decision : `${decision} ${areOf(available)} available now.`;
}

// Reason -> the rule with its numbers. Reasons are those of octavo/core/scheduler.py.
const RULES = {
  [TOO_FEW_BLOCKS]: (seq, state) => {
    const needed = seq.waits?.needed || 0;
    return [
      paragraph(
        `A request starts only if there are enough blocks for its cached tokens and for its first chunk. ${firstChunkOf(seq)} Besides blocks that it can share with running requests, it needs ${plural(needed, "block")}. ${wordsOfShortage(seq, needed, state)}`,
      ),
      state.used ? paragraph(`${blocksAre(state.used, ["is", "are"])} held now by:`) : null,
      state.used ? holders(state) : null,
    ];
  },
  [NO_FREE_SLOT]: (seq, state) => {
    const running = [...state.sequences.values()].filter((other) => other.state !== "waiting");
    const since = "A slot has become free since then, and the next step can give it away.";
    const words = !hasFreeSlot(state)
      ? "A slot is free as soon as one of these ends:"
      : running.length
        ? `${since} These hold one now:`
        : since;
    return [
      paragraph(
        `The batch has ${plural(state.about.max_num_seqs, "slot")}, and each running sequence holds one. ${placeInQueue(seq, state)} ${words}`,
      ),
      chips(running),
    ];
  },
  "the token budget of the step is used up": (seq, state) => {
    const items = state.plan?.items ?? [];
    const prompts = items.filter((item) => item.start !== undefined);
    const tokens = prompts.reduce((all, item) => all + item.tokens, 0);
    return [
      paragraph(
        `A step computes at most ${plural(state.plan?.budget ?? 0, "token")}. Decoding sequences come first: they take ${count(items.length - prompts.length)}. Prompts that rank before this one take ${count(tokens)}. ${placeInQueue(seq, state)}`,
      ),
      chips(prompts.map((item) => state.sequences.get(item.id)).filter(Boolean)),
    ];
  },
  "this step has no room for its whole prompt": (seq, state) => [
    paragraph(
      `Prompts are not cut into chunks here, so this one waits for a step that has room for all of it. ${placeInQueue(seq, state)}`,
    ),
  ],
  "a sequence was preempted in this step": (seq, state) => [
    paragraph(
      `In a step that preempts a sequence, no request is admitted. Otherwise the preempted sequence could be admitted at once and take the blocks back. ${placeInQueue(seq, state)}`,
    ),
  ],
  "a more urgent request goes first": (seq, state) => [
    paragraph(
      `Requests that rank after a preempted sequence wait until the urgent prompt is computed. ${placeInQueue(seq, state)}`,
    ),
  ],
  "another sequence computes a prefix that it shares": (seq, state) => {
    const other = state.sequences.get(seq.waits?.waits_for);
    return [
      paragraph(
        `Another request is computing most of the same prompt. It is cheaper to wait for those blocks and share them than to compute them twice.${other ? " It waits for:" : ""}`,
      ),
      chips(other ? [other] : []),
    ];
  },
  "its prefix is being read from disk": () => [
    paragraph(
      "Part of this prompt is on disk. Reading it is estimated to be faster than computing it. Requests behind this one need not wait.",
    ),
  ],
  "its batch has not formed yet": (seq, state) => [
    paragraph(
      `With batching “${state.about.batching}”, requests start together as a batch. The next batch is not complete, or the present one still runs.`,
    ),
  ],
  "it waits for its sibling beams": () => [
    paragraph(
      "The beams of a search advance together. This one has reported its candidates and waits for the others.",
    ),
  ],
  "it pauses for a more urgent prompt": () => [
    paragraph(
      "A more urgent prompt is computed in this step. This sequence keeps its batch slot and its blocks, and continues when the prompt is computed.",
    ),
  ],
  "it skips a step for an equally urgent prompt": () => [
    paragraph(
      "An urgent prompt is computed alone, because one more sequence may make the step slower. Sequences of the same priority skip one step, and never two in a row.",
    ),
  ],
  "too few blocks are available for its next chunk": (seq, state) => [
    paragraph(
      `The prompt is computed in chunks, and the next one needs ${plural(seq.unplanned?.needed ?? 0, "block")}. It takes blocks only from prompts that rank after it, and there is none.${state.used ? ` ${blocksAre(state.used, ["is", "are"])} held now by:` : ""}`,
    ),
    state.used ? holders(state) : null,
  ],
};

const chips = (sequences) => {
  const list = element("p", "chips");
  for (const seq of sequences.slice(0, MAX_CHIPS)) {
    const button = element("button", "chip-button", chip(seq));
    button.type = "button";
    button.addEventListener("click", () => select(seq.id));
    list.append(button);
  }
  if (sequences.length > MAX_CHIPS) list.append(`and ${count(sequences.length - MAX_CHIPS)} more`);
  return list;
};

function placeInQueue(seq, state) {
  const ahead = seq.waits?.ahead ?? 0;
  const others =
    [...state.sequences.values()].filter((other) => other.state === "waiting").length - 1;
  return ahead
    ? `${plural(ahead, "waiting request")} ${ahead === 1 ? "ranks" : "rank"} before it (policy ${state.settings.policy}).`
    : others > 0
      ? `It is the first of ${plural(others + 1, "waiting request")} (policy ${state.settings.policy}).`
      : "No other request waits.";
}

// ---- requests -----------------------------------------------------------------------------------

function explainState(seq, state, page) {
  if (seq.ended !== undefined) return explainEnd(seq, state);
  if (seq.state === "compiling") return explainCompilation(state);
  if (seq.state === "waiting") {
    const title = seq.preemptions ? "Why does it wait again?" : "Why does it wait?";
    return [heading(title), ...explainWait(seq, state)];
  }
  const inPlan = state.plan?.items.find((item) => item.id === seq.id);
  if (!inPlan && seq.unplanned && seq.unplanned.step === state.step) {
    const { reason } = seq.unplanned;
    return [heading("Why is it not part of this step?"), ...explainRule(reason, seq, state)];
  }
  if (seq.state === "prefill") return explainPrefill(seq, state, inPlan);
  return explainDecode(seq, state, page);
}

const explainCompilation = ({ about }) => [
  heading("Why does it wait?"),
  element("p", "rule", "Its structured output is being compiled."),
  paragraph(
    "A schema, grammar or regular expression is compiled before its request is queued. A thread of its own does this, so that other requests go on. The result is kept for later requests with the same one.",
  ),
  sourceLine(about.server_sources?.compiling),
];

const explainRule = (reason, seq, state) => [
  element("p", "rule", `${capitalised(wordsOfReason(reason, state, seq.waits?.needed))}.`),
  ...(RULES[reason]?.(seq, state) ?? []),
  sourceOf(state, reason),
];

// A plan tries waiting requests in the order of their ranks, and stops at the first that it cannot
// admit. The reason of that one holds for all behind it.
function explainWait(seq, state) {
  const ahead = blockerOf(seq, state);
  if (ahead === seq) return explainRule(seq.waits.reason, seq, state);
  if (!ahead) {
    return [
      paragraph(
        seq.preempted
          ? `It was preempted in ${nameOfStep(seq.preempted.step, state.engine)} and is back in the queue. The scheduler decides in the next step whether it starts again.`
          : "It has just arrived. The scheduler decides in the next step whether it starts.",
      ),
    ];
  }
  return [
    element("p", "rule", `It is behind ${nameOf(ahead)} in the queue.`),
    paragraph(
      `The scheduler tries waiting requests in the order of the policy “${state.settings.policy}”, and stops at the first that cannot start. That is ${nameOf(ahead)}, so the scheduler did not come to this request.`,
    ),
    heading(`Why does ${nameOf(ahead)} wait?`),
    ...explainRule(ahead.waits.reason, ahead, state),
  ];
}

function explainPrefill(seq, state, inPlan) {
  const left = seq.prompt + seq.generated - seq.dropped - seq.planned;
  const budget = state.plan?.budget ?? 0;
  const words = inPlan
    ? `This step computes ${plural(inPlan.tokens, "token")} of its prompt; ${count(left)} are left.`
    : "This step computes none of its prompt.";
  const why =
    left > 0
      ? ` A step has a budget of ${plural(budget, "token")}: decoding sequences take one each, and prompts get the rest, in the order of their ranks. A prompt that does not fit is computed in chunks, so that others keep generating meanwhile.`
      : "";
  return [heading("What does it do?"), paragraph(words + why)];
}

function explainDecode(seq, state, page) {
  const allSteps = page.spans.steps;
  const last = lastLanded(allSteps, page.index);
  const steps = allSteps
    .slice(Math.max(0, last - 60), last + 1)
    .map((each) => stepUpTo(each, page.index));
  const step = steps.at(-1);
  const parts = [
    heading("What does it do?"),
    paragraph(
      `It generates one token per step${seq.drafted ? `, and more if drafts are accepted (${count(seq.accepted)} of ${count(seq.drafted)} so far)` : ""}.`,
    ),
  ];
  if (!step) return parts;
  const usual = percentile(
    steps.map((each) => each.landed - each.start).sort((a, b) => a - b),
    50,
  );
  const took = step.landed - step.start;
  if (took > 1.8 * usual && step.prefill && !hasPrefillIn(step, seq, page)) {
    parts.push(
      element(
        "p",
        "callout",
        `Its last token took ${formatDuration(took)}, ${fewDigits(took / usual)} times as long as usual: ${nameOfStep(step.number, step.engine)} also computed ${plural(step.prefill, "prompt token")} of other requests. A smaller token budget makes such steps shorter.`,
      ),
    );
  }
  return parts;
}

// Whether a step has computed prompt tokens of this sequence, and given its first token.
function hasPrefillIn(step, seq, page) {
  const lane = page.spans.allLanes.findLast((each) => each.id === seq.id);
  return lane?.spans.some((span) => span.kind === "prefill" && span.step === step.number) ?? false;
}

function explainEnd(seq, state) {
  const answer = seq.answer ?? (seq.error || FINISH_REASONS[seq.reason] || seq.reason);
  if (seq.state === "refused") return explainRefusal(answer, state);
  const reason = wordsOfRefusal(answer);
  const words = {
    done: "It has finished",
    aborted: "It was aborted",
    failed: "It has failed",
  }[seq.state];
  return [
    heading("How did it end?"),
    paragraph(
      `${words}: ${reason}. It generated ${plural(seq.generated, "token")}${seq.first_token ? `, the first after ${formatDuration(seq.first_token - seq.arrival)}` : ""}, and ended ${formatDuration(seq.ended - seq.arrival)} after its arrival.`,
    ),
    ruleOfRefusal(readRefusal(answer)?.code, state),
    sourceOf(state, seq.error) ?? sourceOfRefusal(readRefusal(answer)?.code, state),
  ];
}

// The code of an error -> the rule. Codes are those of the API server.
const REFUSALS = {
  context_length_exceeded: ({ about }) =>
    `The prompt and at least one token of the reply must fit into the context, which has ${plural(about.max_model_len, "token")} (--max-model-len).`,
  kv_capacity_exceeded: ({ about }) =>
    `A request must fit into the KV cache even if it runs alone. The pool has ${plural(about.num_blocks, "block")} of ${plural(about.block_size, "token")}.`,
  queue_full: () =>
    "The queue is bounded, because a request that waits too long is of no use to its client. A request is refused if the queue has no room for it, or if it would probably wait longer than --queue-timeout allows. The reply says when to try again.",
  queue_timeout: () =>
    "A request that has not started within --queue-timeout is refused, so that its client can try elsewhere.",
  deadline_exceeded: () => "The request did not finish within its timeout.",
  rate_limit_exceeded: () => "The API key of the request has a limit, and the limit is reached.",
};

function explainRefusal(reason, state) {
  const refusal = readRefusal(reason);
  const title = heading("Why was it refused?");
  if (!refusal) return [title, element("p", "rule", `${capitalised(reason)}.`)];
  const { status, code, field, message } = refusal;
  const about = field
    ? `The value of the field “${field}” is not valid. The reply names the reason. It may quote the request, so it is shown here only with --show-text.`
    : "The reply names the reason. It may quote the request, so it is shown here only with --show-text.";
  return [
    title,
    element("p", "rule", message ? `${message}.` : `${status} ${code}`),
    ruleOfRefusal(code, state) ?? (message ? null : paragraph(about)),
    paragraph(
      `The client received the HTTP status ${status} with the code “${code}”. The request was not queued.`,
    ),
    sourceOfRefusal(code, state),
  ];
}

const ruleOfRefusal = (code, state) => (REFUSALS[code] ? paragraph(REFUSALS[code](state)) : null);
const sourceOfRefusal = (code, state) => sourceLine(state.about.server_sources?.[code]);

// ---- the first wait -----------------------------------------------------------------------------

const BEHIND = "it was behind other requests in the queue";

// Merges decisions that repeat a reason: { at, step, reason }.
function mergeWaits(decisions) {
  const merged = [];
  for (const { at, step, reason, needed } of decisions) {
    const words = isOfAnother({ reason, needed }) ? BEHIND : reason;
    if (merged.at(-1)?.reason !== words) merged.push({ at, step, reason: words });
  }
  return merged;
}

// Explains why a request that has started by now had to wait. A wait may be over before its
// explanation has been read.
function explainFirstWait(seq, page) {
  const fullLane = page.spans.allLanes.findLast((each) => each.id === seq.id);
  if (!fullLane) return [];
  const lane = laneUpTo(fullLane, page.index, page.spans);
  const [wait] = lane.spans;
  const start = lane.marks.find((mark) => mark.kind === "admitted");
  if (!start || wait.kind !== "waiting") return [];
  const reasons = mergeWaits(wait.reasons ?? []);
  const queued = seq.queuedStep ?? start.step;
  // The next plan after the arrival could have admitted it.
  const isBehind = (reasons[0]?.step ?? start.step) - queued > 1;
  if (isBehind && reasons[0]?.reason !== BEHIND)
    reasons.unshift({ at: lane.at, step: queued, reason: BEHIND });
  if (!reasons.length) return [];
  const { history } = page;
  const list = element("ul", "plain");
  for (const { at, step, reason } of reasons)
    list.append(element("li", "", "from ", stepLink(step, at, page), `: ${reason}`));
  const last = reasons.at(-1);
  const shown =
    last.reason === BEHIND
      ? history.endOfStep(Math.max(0, history.stepAt(start.at) - 1))
      : history.endOfStepWith(last.at);
  return [
    heading("Why did it wait before it started?"),
    element("p", "rule", `It waited ${formatDuration(start.time - lane.arrival)} in the queue.`),
    list,
    last.at >= history.first
      ? paragraph(
          link("Show the page as it was then", shown),
          ", with the numbers of the decision. The page pauses there.",
        )
      : null,
    sourceOf(page.state, last.reason),
  ];
}

// ---- cache and preemptions ----------------------------------------------------------------------

function explainCache(seq, state, page) {
  const { admitted } = seq;
  if (!admitted) return [];
  const { engine } = page.spans.allLanes.findLast((lane) => lane.id === seq.id) ?? state;
  const isShort = admitted.tokens <= state.about.block_size;
  const reason = isShort ? "only full blocks are cached, and it is shorter" : admitted.match_end;
  const parts = [
    heading("What was cached?"),
    paragraph(
      `At its ${seq.preemptions ? "last " : ""}admission, in ${nameOfStep(admitted.step, engine)}, ${count(admitted.cached)} of its ${plural(admitted.tokens, "token")} were found in the prefix cache${state.about.host_blocks ? " or in host memory" : ""}: ${reason}.`,
    ),
  ];
  if (admitted.missing) {
    const evicted = page.findEvent(
      (line) => line[0] === "evicted" && line[5] === admitted.missing,
      admitted.step,
      engine,
    );
    if (evicted !== null) {
      parts.push(
        paragraph(
          `That block had been computed before, and was evicted in ${nameOfStep(page.history.line(evicted)[2], engine)}. `,
          link("Show that moment", evicted),
        ),
      );
    }
  }
  return parts;
}

// Which of the running requests is preempted: Policy.victim in octavo/core/policy.py.
const VICTIMS = {
  priority:
    "the least urgent one and, of several such ones, the one with the fewest computed positions",
};
const wordsOfVictim = (policy) =>
  `A running request that needs a block takes it from those that rank after it. Under the policy “${policy}”, this is ${VICTIMS[policy] ?? "the one that ranks last"}.`;

const wordsOfBeneficiary = (seq, other) => {
  if (!other) return [": it was preempted"];
  if (other.id === seq.id) return [", and no running request ranks after it: it gave up its own blocks"];
  return [": it was preempted to make room for ", chip(other)];
};

function addReturnCosts(all, { positions, cached, recomputed, loads, blockSize }) {
  all.positions += positions;
  all.cached += Math.min(cached, positions);
  all.recomputed += recomputed;
  all.loads += loads;
  all.blockSize = blockSize;
}

// Returns what the preemptions of a request have cost. `all` is the sum of those after which it resumed.
function wordsOfCost(seq, waited, all, number) {
  const time = `${number === 1 ? "It" : "They"} cost ${formatDuration(waited)} of waiting${seq.state === "waiting" ? " so far" : ""}.`;
  if (!all.positions) return time;
  return `${time} ${wordsOfReturn(all, number === 1 ? "" : " in all")}`;
}

// Returns which blocks of a preempted request could be reused if it resumed now.
function wordsOfReusable(seq, state) {
  const resumption = "When it resumes, it computes again what is not cached then.";
  const reusable = countReusable(seq, state);
  if (!reusable) return resumption;
  const { block_size, has_disk } = state.about;
  const tokens = (blocks) => `${count(blocks * block_size)} (${plural(blocks, "block")})`;
  const { device, host } = reusable;
  const places = [
    device && `${tokens(device)} are cached on the device`,
    host && `${tokens(host)} are in host memory`,
  ].filter(Boolean);
  const disk = has_disk ? " Others may be on disk." : "";
  return `Of its ${plural(seq.preempted.positions, "position")}, ${places.join(", and ") || "none is cached on the device or in host memory"} now.${disk} ${resumption}`;
}

// Lists the preemptions of a request: for whom it was preempted, and what that cost.
function explainPreemptions(seq, page) {
  const fullLane = page.spans.allLanes.findLast((each) => each.id === seq.id);
  if (!fullLane) return [];
  const lane = laneUpTo(fullLane, page.index, page.spans);
  const { marks } = lane;
  const items = [];
  let waited = 0;
  const all = { positions: 0, cached: 0, recomputed: 0, loads: 0, blockSize: 0 }; // After which it resumed.
  marks.forEach((mark, i) => {
    if (mark.kind !== "preempted") return;
    const nextAdmission = marks.slice(i + 1).find((other) => other.kind === "admitted");
    const span = lane.spans.find((each) => each.at === mark.at);
    const other = page.names.at(mark.beneficiary, page.index);
    waited += (nextAdmission?.time ?? Math.min(page.now, lane.end)) - mark.time;
    const positions = span?.positions ?? 0;
    const costs = nextAdmission && { ...nextAdmission, positions, loads: nextAdmission.loads.length };
    if (costs) addReturnCosts(all, costs);
    const cost = costs
      ? `It waited ${formatDuration(nextAdmission.time - mark.time)}. ${wordsOfReturn(costs)}`
      : seq.state === "waiting"
        ? `It had ${plural(positions, "position")}, and still waits.`
        : `It had ${plural(positions, "position")}, and has not resumed.`;
    items.push(
      element(
        "li",
        "",
        stepLink(mark.step, mark.at, page),
        ` · ${capitalised(mark.reason)}`,
        ...wordsOfBeneficiary(seq, other),
        `. ${cost}`,
      ),
    );
  });
  if (!items.length) return [];
  const lastMark = marks.findLast((mark) => mark.kind === "preempted");
  const many =
    items.length >= THRASHING
      ? element(
          "p",
          "callout",
          `It was preempted ${items.length} times. This is thrashing: requests take blocks from each other again and again. More blocks or fewer requests at once (--max-num-seqs) avoid it.${page.state.about.host_blocks ? "" : " A host tier (--kv-host-gib) makes it cheaper."}`,
        )
      : null;
  return [
    heading(items.length === 1 ? "What did its preemption cost?" : "What did its preemptions cost?"),
    element("p", "rule", wordsOfCost(seq, waited, all, items.length)),
    seq.state === "waiting" ? paragraph(wordsOfReusable(seq, page.state)) : null,
    many,
    element("ul", "plain", ...items),
    lastMark.reason === NO_BLOCK_AVAILABLE && lastMark.beneficiary !== seq.id
      ? paragraph(wordsOfVictim(lastMark.policy))
      : null,
    sourceOf(page.state, lastMark.reason),
  ];
}

// Merges plans that give the same reason, which differ only in the blocks that they lack.
function mergeEvents(events) {
  const merged = [];
  for (const { event, index } of events) {
    const last = merged.at(-1);
    const isSame =
      event.kind === "waiting" &&
      last?.event.kind === "waiting" &&
      last.event.reason === event.reason &&
      !last.event.needed === !event.needed &&
      last.event.waits_for === event.waits_for;
    if (isSame) last.repeated.push({ event, index });
    else merged.push({ event, index, repeated: [] });
  }
  return merged;
}

function wordsOfMerged({ event, repeated }, name) {
  const needed = [event, ...repeated.map((each) => each.event)].map((each) => each.needed ?? 0);
  const [least, most] = [Math.min(...needed), Math.max(...needed)];
  if (least === most) return describe(event, name);
  return `${event.reason} (needs ${least} to ${most})`;
}

function explainHistory(seq, page) {
  if (seq.id < 0) return []; // It has no sequence, and so no events of one.
  const list = element("ul", "plain life");
  const events = mergeEvents(page.eventsOf(seq.id, MAX_EVENTS));
  for (const merged of events.slice(-MAX_LINES)) {
    const { event, index, repeated } = merged;
    const words = wordsOfMerged(merged, (id) => page.names.letters(id));
    const item = element("li", "", stepLink(event.step, index, page));
    if (repeated.length) {
      const last = repeated.at(-1);
      item.append(" to ", stepLink(last.event.step, last.index, page));
    }
    item.append(` ${KINDS[event.kind][1]}: ${words}`);
    list.append(item);
  }
  return events.length ? [heading("History of this request"), list] : [];
}

function explainSequence(seq, page) {
  const { state } = page;
  const title = element(
    "h2",
    "title",
    chip(seq),
    ` ${shortId(seq.request)} `,
    element(
      "small",
      "",
      seq.ended === undefined
        ? seq.preemptions && seq.state === "waiting"
          ? "preempted"
          : seq.state
        : seq.state,
    ),
  );
  return [
    title,
    ...explainState(seq, state, page),
    ...explainPreemptions(seq, page),
    ...explainFirstWait(seq, page),
    ...explainCache(seq, state, page),
    ...explainSharingOf(seq, state),
    ...explainHistory(seq, page),
  ];
}

// ---- blocks, steps, and nothing -----------------------------------------------------------------

function explainBlock(block, page) {
  const { state } = page;
  const owners = findOwners(state);
  const order = new Map(
    freeList(state)
      .filter((each) => state.contents[each])
      .map((each, i) => [each, i + 1]),
  );
  const [first, ...otherLines] = describeBlock(state, block, { owners, order, names: page.names });
  const holding = (owners.get(block) ?? []).map((id) => state.sequences.get(id));
  const parts = [
    element("h2", "title", `Block ${block}`),
    // The first line begins with the number of the block, which the title has already.
    paragraph(`${capitalised(first.slice(first.indexOf(": ") + 2))}.`),
    ...otherLines.map((words) => paragraph(words[0] === "“" ? words : `${capitalised(words)}.`)),
  ];
  if (holding.length > 1) {
    parts.push(
      element(
        "p",
        "callout",
        `${holding.length} requests share this block. It is kept once. A request that must write to it copies it first (copy-on-write).`,
      ),
    );
  }
  if (holding.length) parts.push(chips(holding));
  else if (state.contents[block]) {
    parts.push(
      paragraph(
        "No request holds it. A request whose text begins the same way can reuse it, until its memory is needed: then the cached block that was used least recently is evicted first.",
      ),
    );
  } else if (!state.references[block])
    parts.push(paragraph("No request holds it, and it has no content that a request could reuse."));
  return parts;
}

function explainStep(step, page) {
  const [first, ...otherLines] = describeStep(step);
  return [
    element("h2", "title", capitalised(nameOfStep(step.number, step.engine))),
    paragraph(`${first}.`),
    ...otherLines.map((words) => paragraph(words)),
    linkToStep(step, page),
  ];
}

// The results of a step may come while later steps are planned. The link leads to the step itself.
function linkToStep({ number, engine, at }, { history }) {
  const stepIndex = history.stepIndexOfNumber(number, engine);
  return link("Go to this step", stepIndex < 0 ? at : history.endOfStep(stepIndex));
}

// Returns what explainNothing depends on.
function summaryOf({ state, spans, index }) {
  const live = [...state.sequences.values()];
  return {
    sharing: findLast(spans.sharings, (at) => at <= index),
    isDemonstration: isDemonstration(),
    waiting: live
      .filter((seq) => seq.state === "waiting")
      .slice(0, MAX_CHIPS + 1)
      .map((seq) => seq.id),
    preempted: [...live, ...state.ended]
      .filter((seq) => seq.preemptions)
      .slice(-12)
      .map((seq) => seq.id),
    shared: groupShared(state).map(({ blocks, owners }) => [blocks, owners.map(({ id }) => id)]),
  };
}

// For a first visit: a question, the traffic that raises it, and where its answer is.
const GUIDE = [
  [
    "Why does a request wait?",
    "burst",
    "Click a waiting request. This panel names the rule, its numbers and the line of code. A request that has finished explains its waits, too.",
  ],
  [
    "What does a preemption cost?",
    "long replies",
    "The blocks run out after some seconds. Click a request that is marked “preempted”, also after it has finished.",
  ],
  [
    "Which blocks are shared?",
    "shared prefix",
    "In “KV blocks”, a shared block has a frame and the colours of its owners. This panel lists them below, or leads to the step at which blocks were shared last.",
  ],
];

function guide() {
  const list = element("ol", "guide");
  for (const [question, traffic, words] of GUIDE) {
    const title = element("p", "question", question);
    list.append(element("li", "", title, trafficButton(traffic), element("p", "", words)));
  }
  return [
    heading("Three questions to start with"),
    list,
    paragraph(
      "“Pause” stops all panels, ‹ and › go from step to step, and “Esc” leads back here. The tab “Try” has more traffic and settings.",
    ),
  ];
}

function explainNothing(page) {
  const { waiting: waitingIds, preempted: preemptedIds } = summaryOf(page);
  const find = (id) => page.findSequence(id);
  const waiting = waitingIds.map(find).filter(Boolean);
  const preempted = preemptedIds.map(find).filter(Boolean);
  const parts = [
    paragraph(
      "Choose a request, a block or a step, and this panel explains what happens to it and why.",
    ),
  ];
  if (isDemonstration()) parts.push(...guide());
  if (waiting.length) parts.push(heading("Waiting requests"), chips(waiting));
  if (preempted.length) parts.push(heading("Preempted requests"), chips(preempted));
  parts.push(...explainSharing(page));
  parts.push(heading("Terms"), terms());
  return parts;
}

const TERMS = [
  ["step", "One forward pass of the model for all sequences in the batch."],
  ["prefill", "The computation of tokens that are already known, mostly of a prompt."],
  [
    "decode",
    "A step of a sequence after its prefill: it computes the last token and samples the next.",
  ],
  ["chunk", "The part of a prompt that one step computes."],
  ["token budget", "The number of tokens that a step may compute."],
  ["batch slot", "The place of a running sequence in the batch."],
  ["block", "A fixed number of positions of the KV cache. A sequence has a table of its blocks."],
  [
    "cached",
    "No sequence holds the block, but its content can be found by a request that begins the same way.",
  ],
  ["preempted", "A running sequence lost its slot and blocks, and waits again."],
  [
    "host memory",
    "A second place for blocks. A preempted sequence gets its blocks back from there, if they are there, instead of computing them again.",
  ],
];

const terms = () => {
  const list = element("dl");
  for (const [term, words] of TERMS) list.append(element("dt", "", term), element("dd", "", words));
  return list;
};

export function drawWhy(page) {
  if (panel.hidden || !page.state || isPressed) return;
  const { selection } = page;
  const seq = selection.kind === "sequence" ? page.findSequence(selection.id) : null;
  const key = JSON.stringify(
    selection.kind === "none" ? summaryOf(page) : [selection, page.index, page.spans.steps.length],
  );
  if (key === drawn) return;
  drawn = key;
  const opened = [...panel.querySelectorAll("details[open] summary")].map(
    (node) => node.textContent,
  );
  const content = seq
    ? explainSequence(seq, page)
    : selection.kind === "block"
      ? explainBlock(selection.block, page)
      : selection.kind === "step"
        ? explainStep(selection.step, page)
        : explainNothing(page);
  const nodes = content.filter(Boolean);
  for (const node of nodes)
    if (node.matches("details"))
      node.open = opened.includes(node.querySelector("summary").textContent);
  // For another selection, an equal button may do something else, so all nodes are replaced.
  if (isOtherSelection(page.names, JSON.stringify(selection))) {
    panel.replaceChildren(...nodes);
    panel.scrollTop = 0;
  } else updateChildren(panel, nodes);
}
