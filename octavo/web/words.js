// Events in words, for the log and for the life of a request.

import { nameOf } from "./colours.js";
import { count, plural, shortId } from "./draw.js";

// Kind -> the group that the log can hide, and the word in front of the event.
export const KINDS = {
  opened: ["server", "opened"],
  restarted: ["server", "restarted"],
  reopened: ["server", "reopened"],
  gap: ["server", "skipped"],
  settings: ["server", "settings"],
  arrived: ["requests", "arrived"],
  forked: ["requests", "forked"],
  compiling: ["requests", "compiling"],
  refused: ["requests", "refused"],
  admitted: ["requests", "admitted"],
  waiting: ["requests", "waits"],
  unplanned: ["requests", "skipped"],
  preempted: ["requests", "preempted"],
  recomputes: ["requests", "recomputes"],
  finished: ["requests", "finished"],
  failed: ["requests", "failed"],
  planned: ["steps", "planned"],
  committed: ["steps", "committed"],
  stepfailed: ["steps", "failed"],
  shared: ["blocks", "shared"],
  allocated: ["blocks", "allocated"],
  copied: ["blocks", "copied"],
  dropped: ["blocks", "dropped"],
  released: ["blocks", "released"],
  published: ["blocks", "published"],
  evicted: ["blocks", "evicted"],
  cleared: ["blocks", "cleared"],
  stored: ["tiers", "stored"],
  requested: ["tiers", "requested"],
  loaded: ["tiers", "loaded"],
  ready: ["tiers", "ready"],
  forgotten: ["tiers", "dropped"],
  listed: ["tiers", "listed"],
};
export const GROUPS = ["requests", "steps", "blocks", "tiers", "server"];

export const FINISH_REASONS = {
  stop: "end of text or stop string",
  length: "max_tokens reached",
  abort: "aborted",
  error: "failed",
  lost: "the engine process ended",
  unseen: "this page was not connected when it ended",
  pruned: "beam search continued with better beams",
  search_over: "beam search finished",
};

// Returns the status, the code, the field and the message that the client of a refused request got from
// the API server, or null for other reasons. There may be no field and no message.
export function readRefusal(reason) {
  const [, status, code, field, message] =
    /^(\d{3}) (\w+)(?: \(([^)]*)\))?(?:: ([^]*))?$/.exec(reason) ?? [];
  return status ? { status, code, field, message } : null;
}

export function wordsOfRefusal(reason) {
  const { status, code, message } = readRefusal(reason) ?? {};
  return message ? `${message} (${status} ${code})` : reason;
}

// Names a step. Each engine process counts its own steps, so that the process is named after a
// restart.
export const nameOfStep = (number, engine = 1) => wordsOfStep(number, engine).join("");
export const wordsOfStep = (number, engine) => [
  `step ${count(number)}`,
  engine > 1 ? ` of engine ${engine}` : "",
];

const blockList = (blocks) => {
  const shown = blocks.filter((block) => block);
  return shown.length > 6 ? `${shown.slice(0, 5).join(", ")} … ${shown.at(-1)}` : shown.join(", ");
};

// Returns an event as words. `name(id)` returns the letters of a sequence. The name of the event's
// own sequence is left out.
export function describe(event, name) {
  return writers[event.kind]?.(event, name) ?? "";
}

const writers = {
  opened: () => "the page is connected and has the state of the engine",
  restarted: (e) =>
    `the engine process ended after step ${count(e.after ?? 0)}${e.lost ? `, and ${plural(e.lost, "request")} failed` : ""}; a new one starts with an empty cache`,
  reopened: (e) =>
    `${plural(e.missed ?? 0, "event")} not seen, because no page was connected for a while`,
  gap: (e) => `${plural(e.missed ?? 0, "event")} skipped, because this page was too slow`,
  settings: (e) =>
    Object.entries(e.settings)
      .map(([key, value]) => `${key} ${value}`)
      .join(", "),
  arrived: (e) =>
    `${plural(e.prompt, "prompt token")}${e.priority ? `, priority ${e.priority}` : ""}${e.tenant ? `, tenant ${e.tenant}` : ""}`,
  forked: (e, name) => `continues the prompt of ${name(e.parent)}`,
  compiling: (e) => `${shortId(e.request)}: its structured output is compiled`,
  refused: (e) => `${shortId(e.request)}: ${wordsOfRefusal(e.reason)}`,
  admitted: (e) =>
    `${count(e.cached)} of ${plural(e.tokens, "token")} cached${e.recomputed ? `, ${count(e.recomputed)} to be recomputed` : ""}`,
  waiting: (e, name) =>
    `${e.reason}${e.needed ? ` (needs ${e.needed})` : ""}${e.waits_for ? ` (${name(e.waits_for)})` : ""}`,
  unplanned: (e) => `${e.reason}`,
  recomputes: (e) => `the KV cache is off, so all tokens are computed again`,
  preempted: (e, name) =>
    `${e.reason}${e.beneficiary && e.beneficiary !== e.seq ? `, for ${name(e.beneficiary)}` : ""}; it gives up the blocks of its ${plural(e.positions, "position")}`,
  finished: (e) => `${FINISH_REASONS[e.reason] ?? e.reason}, ${plural(e.generated, "token")}`,
  failed: (e) => `${e.error}`,
  planned: (e, name) => {
    const prefill = e.chunks
      .map(([id, start, tokens]) => `${name(id)} ${start}–${start + tokens}`)
      .join(", ");
    const decodes = e.decode ? e.decode.length : null;
    return (
      [
        decodes === null ? "the same sequences decode as before" : decodes && `${decodes} decode`,
        prefill && `prefill ${prefill}`,
      ]
        .filter(Boolean)
        .join(" + ") || "no tokens: the step only moves blocks"
    );
  },
  committed: (e) => `step ${e.of}: ${count((e.landed - e.started) / 1000)} ms`,
  stepfailed: (e) => `step ${e.of}: ${e.error}`,
  shared: (e) => `shares ${blockList(e.blocks)}`,
  allocated: (e) => `${e.seq ? "" : "a promotion "}gets ${blockList(e.blocks)}`,
  copied: (e) => `copies ${e.source} to ${e.target} before it writes`,
  dropped: (e) => `drops ${e.block}`,
  released: (e) => `${e.seq ? "" : "a promotion "}releases ${blockList(e.blocks)}`,
  published: (e) =>
    `block ${e.block} has content #${e.content}${e.parent ? ` after #${e.parent}` : ""}`,
  evicted: (e) => `block ${e.block} loses content #${e.content}`,
  cleared: () => "the prefix cache of the device was cleared",
  stored: (e) =>
    e.tier === "host"
      ? `content #${e.content}: block ${e.block} to host block ${e.host_block}`
      : `content #${e.content} is on disk`,
  requested: (e) => `content #${e.content} from disk`,
  loaded: (e) =>
    e.tier === "host"
      ? `content #${e.content}: host block ${e.host_block} to block ${e.block}`
      : `content #${e.content} read from disk`,
  ready: (e) => `host block ${e.host_block} holds content #${e.content}`,
  forgotten: (e) =>
    `content #${e.content} was dropped from ${e.tier === "host" ? "host memory" : "the disk"}`,
  listed: (e) => `${plural(e.contents, "content")} on disk`,
};

// Returns in words where the positions of a preempted sequence came from when it resumed: `cached`
// tokens were found in the cache, and `loads` blocks of them came from host memory.
export function wordsOfReturn({ positions, cached, recomputed, loads, blockSize }, inAll = "") {
  const fromHost = Math.min(loads * blockSize, cached, positions);
  const onDevice = Math.min(cached, positions) - fromHost;
  const parts = [
    fromHost && `${count(fromHost)} came back from host memory (${plural(loads, "block")})`,
    onDevice && `${count(onDevice)} ${onDevice === 1 ? "was" : "were"} still cached on the device`,
    recomputed && `${count(recomputed)} ${recomputed === 1 ? "was" : "were"} computed again`,
  ].filter(Boolean);
  const last = parts.pop() ?? "none had to be computed again";
  const words = parts.length ? `${parts.join(", ")}, and ${last}` : last;
  return `Of its ${plural(positions, "position")}${inAll}, ${words}.`;
}

// Remembers the letters of every sequence and who computed or loaded each content, so that events of
// the past can be described.
export class Names {
  constructor() {
    // Sequence id -> { id, name, index, label, request, labelled: index of the line with the label }
    this.seen = new Map();
    // Number of a content -> its origins, one for each time that it was computed or loaded: { stream,
    // number, text, writer: the sequence that computed it, load: an entry of `loads`, or null }
    this.contents = new Map();
    this.writers = []; // Block -> the sequence that it was allocated for last.
    // Block -> how its content comes from host memory: { step, engine, seq }, until it is published.
    this.loads = new Map();
  }

  // Adds an event, whose line has this index.
  add(event, state, index) {
    if (event.kind === "allocated") for (const block of event.blocks) this.#setWriter(block, event.seq);
    else if (event.kind === "copied") this.#setWriter(event.target, event.seq);
    else if (event.kind === "loaded") this.#addLoad(event, state);
    else if (event.kind === "published") this.#addContent(event, state);
    else if (event.kind === "arrived" || event.kind === "forked" || event.kind === "admitted")
      this.#remember(state.sequences.get(event.seq), index);
    else if (["opened", "restarted", "reopened", "gap"].includes(event.kind)) {
      for (const seq of state.sequences.values()) {
        this.#remember(seq, index);
        seq.table.forEach((block, logicalBlock) => {
          this.#setWriter(block, seq.id);
          // A block that holds computed positions and is not published yet is being loaded.
          const isComputed = (logicalBlock + 1) * state.about.block_size <= seq.computed;
          if (isComputed && !state.contents[block]) this.loads.set(block, { step: 0, seq: seq.id });
        });
      }
    }
  }

  #setWriter(block, id) {
    this.writers[block] = id;
    this.loads.delete(block);
  }

  #addLoad({ tier, block, step }, { engine }) {
    if (tier === "host") this.loads.set(block, { step, engine, seq: this.writers[block] });
  }

  #addContent({ content, block, text, number }, state) {
    const load = this.loads.get(block) ?? null;
    this.loads.delete(block);
    const writer = load ? this.#findOrigin(content, state)?.writer : this.seen.get(this.writers[block]);
    const origin = { stream: state.about.stream, number, writer, load, text };
    if (this.contents.has(content)) this.contents.get(content).push(origin);
    else this.contents.set(content, [origin]);
  }

  // Returns how a content was computed or loaded last, as far as that is known in a state.
  #findOrigin(content, state) {
    return this.contents
      .get(content)
      ?.findLast(({ stream, number }) => stream === state.about.stream && number <= state.number);
  }

  // Returns lines that say who computed a content, and for whom it was loaded last, as far as that
  // is known in a state.
  originOf(content, state) {
    const origin = this.#findOrigin(content, state);
    if (!origin) return [];
    const { writer, load, text } = origin;
    const lines = [];
    if (writer) lines.push(`computed by ${nameOf(writer)}`);
    else if (!load) lines.push("computed by an earlier request");
    if (load) lines.push(this.#wordsOfLoad(load));
    if (text) lines.push(`“${text.replace(/\s+/g, " ")}”`);
    return lines;
  }

  // A block that no sequence holds is filled from disk, by way of host memory.
  #wordsOfLoad({ step, engine, seq }) {
    const when = step ? ` in ${nameOfStep(step, engine)}` : "";
    return seq ? `loaded from host memory for ${this.letters(seq)}${when}` : `read from disk${when}`;
  }

  #remember(seq, index) {
    if (!seq) return;
    const { id, name, label, request } = seq;
    const oldEntry = this.seen.get(id);
    const labelled = oldEntry?.label === label ? oldEntry.labelled : index;
    this.seen.set(id, { id, name, index: seq.index, label, request, labelled });
  }

  // Returns a sequence as it was known after the line with this index: it has no colour before its
  // first admission.
  at(id, index) {
    const seq = this.seen.get(id);
    return seq && seq.labelled > index ? { ...seq, label: -1 } : seq;
  }

  letters(id) {
    const seq = this.seen.get(id);
    return seq ? nameOf(seq) : "an earlier request";
  }
}
