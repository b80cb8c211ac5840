// Passes each frame of the feed to the panels of the page. octavo/serve/endpoints/live_feed.py describes a frame.

import { showMetrics } from "/web/charts.js";
import { count, short } from "/web/draw.js";
import { follow } from "/web/feed.js";
import { tell } from "/web/log.js";
import { showPool } from "/web/pool.js";
import { isMine, showMine } from "/web/prompt.js";
import { showRequests } from "/web/requests.js";
import { moved, named, showSteps } from "/web/steps.js";

const $ = (id) => document.getElementById(id);
const names = new Map(); // Sequence.id -> [request, index], for the latest thousand sequences
let state = "";
let shown = null; // The last view of the current engine process, or null.

const REASONS = {
  stop: "finished: stop", length: "finished: length", abort: "aborted", error: "failed: the step failed",
  pruned: "finished: pruned beam", search_over: "finished: beam search",
};
const PHASES = {
  starting: "engine starting", importing: "importing", loading: "loading weights", allocating: "allocating the KV cache",
  warming: "warming up", down: "engine down", ready: "ready",
};

function say(kind, words) {
  $("status").dataset.state = kind;
  if ($("status-text").textContent !== words) $("status-text").textContent = words;
  document.body.classList.toggle("stale", kind !== "ready" && kind !== "draining");
}

function showServer({ server, model }) {
  const restarting = server.state === "restarting";
  const phase = PHASES[server.phase] ?? server.phase;
  const words = {
    ready: "ready",
    stalled: "engine stalled: no step for a while",
    draining: "shutting down: open requests may finish",
    restarting: `engine restarting: ${phase}`,
    starting: server.phase === "ready" ? "loading the tokenizer" : phase,
  }[server.state] ?? server.state;
  const part = server.progress === undefined ? "" : ` ${Math.round(server.progress * 100)}%`;
  say(server.state, words + part);
  $("progress").hidden = server.state === "ready" || server.progress === undefined;
  $("progress-bar").style.width = `${(server.progress ?? 0) * 100}%`;
  if (words !== state) {
    if (state || server.state !== "ready") tell([["server", words]]);
    state = words;
  }
  if (!model) return;
  const text = `${model.architecture} · ${model.dtype} on ${model.device} · ${count(model.num_blocks)} blocks of ${model.block_size} · ` +
    `${count(model.max_num_seqs)} batch slots · context ${count(model.max_model_len)} · ` +
    (model.speculative ? `speculative ${model.speculative} · ` : "") + `Octavo ${server.version}`;
  if ($("model").dataset.text === text) return;
  $("model").dataset.text = text;
  const name = document.createElement("b");
  name.textContent = server.name;
  $("model").replaceChildren(name, ` · ${text}`);
}

// The feed sends arrays. This function names their elements.
const namedEvent = ([number, step, kind, request, index, tokens, cached, reason, moves]) =>
  ({ number, step, kind, request, index, tokens, cached, reason, moves });

function wordsOf({ kind, request, index, tokens, cached, reason, moves }) {
  if (kind === "blocks") return moved(moves).join(", ");
  const name = short(request, index);
  if (kind === "done" || kind === "failed") return `${name} ${REASONS[reason] ?? reason}`;
  if (reason) return `${name}: ${reason}`;
  return `${name}, ${count(tokens)} tokens${cached ? `, ${count(cached)} cached` : ""}`;
}

// Returns the events in the order in which they happened. The first entries count what was left out.
function eventsOf({ gap, view }) {
  const found = [];
  if (gap) found.push(["gap", `${count(gap)} frame${gap > 1 ? "s" : ""} skipped: this page is too slow`]);
  if (view.steps_missed) found.push(["gap", `${count(view.steps_missed)} steps not shown`]);
  if (view.events_missed) found.push(["gap", `${count(view.events_missed)} events not shown`]);
  return [...found, ...view.events.map(namedEvent).map((event) => [event.kind, wordsOf(event)])];
}

// Clears the page when the engine process has ended, because its requests and blocks no longer exist.
function forget({ time, model }) {
  const none = shown.used.map(() => 0);
  const empty = { ...shown, sequences: [], decoding: 0, prefilling: 0, waiting: 0, used: none, shared: none, cached: none, owner: none,
    ended: [], ended_missed: 0, events: [], events_missed: 0 };
  showRequests(empty, time, isMine, true);
  showPool(empty, model, new Set());
  shown = null;
}

function show(frame) {
  showServer(frame);
  showMetrics(frame);
  const { view, model } = frame;
  if (shown && frame.server.state === "restarting") forget(frame);
  if (!view || !model) return;
  shown = view;
  const sequences = showRequests(view, frame.time, isMine);
  for (const s of sequences) if (s.id) {
    names.delete(s.id);
    names.set(s.id, [s.request, s.index]);
  }
  for (const id of [...names.keys()].slice(0, Math.max(0, names.size - 1000))) names.delete(id);
  const steps = view.steps.map(named);
  showPool.names = names;
  showPool(view, model, new Set(sequences.filter((s) => isMine(s.request)).map((s) => s.id)));
  showSteps(steps, model, names);
  showMine(sequences);
  tell(eventsOf(frame));
}

follow(show, say);
