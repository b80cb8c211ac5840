// The page: connects a source of events with the views. A source is the live feed, a recording, or
// a recording inside this file.
//
// All views show one moment, the cursor: a place in the history of events. While the page follows,
// the cursor is the latest event that was known when the round of drawing began (rounds.js).

import { letters } from "./colours.js";
import {
  byId,
  capitalised,
  count,
  element,
  onTheme,
  plural,
  readColours,
  refreshTip,
  setText,
} from "./draw.js";
import { History } from "./history.js";
import { drawLog, onLog } from "./log.js";
import { drawMetrics } from "./metrics.js";
import { followMine, isMine } from "./prompt.js";
import { drawRequests, onRequests } from "./requests.js";
import { Rounds } from "./rounds.js";
import { openSource } from "./source.js";
import { Spans } from "./spans.js";
import { cloneState } from "./state.js";
import { Timeline } from "./timeline.js";
import { followSettings, onTraffic } from "./traffic.js";
import { bindTransport, drawTransport } from "./transport.js";
import { drawLegend, drawWall, flash, isFlashing, onWall, resetWall } from "./wall.js";
import { bindWhatIf } from "./whatif.js";
import { drawWhy, onWhy } from "./why.js";
import { Names, nameOfStep } from "./words.js";

const isNarrow = matchMedia("(max-width: 760px)");

export const page = {
  history: null,
  spans: null,
  names: null,
  state: null, // The state of the engine at the cursor.
  index: 0, // The cursor.
  now: 0, // The time at the cursor, in microseconds.
  follows: true, // The cursor is the latest event.
  // The next round of drawing adds these lists of new lines, and moves to the line that a replay has
  // reached, or null.
  pending: [],
  replayIndex: null,
  isReplay: false,
  selection: { kind: "none" },
  hovered: 0, // A sequence.
  hoveredBlock: 0,
  isWhole: false, // All panels show the same moment.

  // Forgets all events, for a source that begins anew.
  reset() {
    resetWall();
    this.selection = { kind: "none" };
    this.spans = new Spans();
    this.names = new Names();
    this.history = new History((event, state, index) => {
      this.spans.add(event, state, index);
      this.names.add(event, state, index);
      if (this.follows) flash(event);
    });
    this.state = null;
    this.index = 0;
    this.pending = [];
    this.replayIndex = null;
  },

  // While the page follows, new lines wait for the next round: they would change the state that the
  // panels show.
  addLines(lines) {
    this.pending.push(lines);
    if (!this.history.end) this.advance();
    else if (!this.follows) this.addPending();
    redraw();
  },

  // Moves to the latest moment that is asked for. It is called between two rounds of drawing.
  advance() {
    const isNew = this.pending.length > 0;
    this.addPending();
    if (this.follows && isNew) this.setCursor(this.history.last, true);
    else if (this.replayIndex !== null) this.setCursor(this.replayIndex, false);
  },

  // Moves the cursor behind the line with this index with the next round of drawing.
  moveOnTo(index) {
    this.replayIndex = index;
    redraw();
  },

  // Moves the cursor behind the line with this index. All panels show it in the next frame.
  moveTo(index, follows = false) {
    if (!this.history.end) return;
    if (follows) this.addPending();
    this.setCursor(follows ? this.history.last : index, follows);
    this.addPending(); // The state at the cursor is a copy now.
    redraw(true);
  },

  addPending() {
    const pending = this.pending;
    this.pending = [];
    for (const lines of pending) this.history.add(lines);
  },

  setCursor(index, follows) {
    if (!this.history.end) return;
    this.replayIndex = null;
    const target = Math.max(this.history.first, Math.min(index, this.history.last));
    const from = { index: this.index, state: this.state };
    if (!follows && target > from.index && target - from.index < 400) {
      for (let at = from.index + 1; at <= target; at += 1)
        if (this.history.line(at)) flash(this.history.event(at));
    }
    this.state = this.history.stateAt(target, this.state ? from : null);
    // The latest state goes on changing with new events. A page that stands still keeps its own.
    if (!follows && this.state === this.history.end) this.state = cloneState(this.state);
    this.index = target;
    this.follows = follows;
    this.now = this.history.line(target)[3];
    if (follows && !this.isReplay) timeline.followNow();
  },

  // Moves the cursor by steps. It then stands at the end of a step. From within a step, the first
  // move forward leads to the end of this step.
  moveSteps(number) {
    const stepIndex = this.history.stepAt(this.index);
    const isAtEnd = this.history.endOfStep(stepIndex) === this.index;
    const target = Math.max(
      0,
      Math.min(
        this.history.steps.length - 1,
        stepIndex + number - (number > 0 && !isAtEnd ? 1 : 0),
      ),
    );
    this.moveTo(this.history.endOfStep(target));
  },

  select(selection, opensTab = true) {
    this.selection = selection;
    if (opensTab && selection.kind !== "none") {
      openTab("why");
      // On a phone, the explanation is below the other panels.
      if (isNarrow.matches) byId("side-panel").scrollIntoView({ block: "end" });
    }
    showLink();
    redraw(true);
  },

  findSequence(id) {
    if (!this.state) return null;
    const { sequences, ended, compiling } = this.state;
    const hasId = (seq) => seq.id === id;
    return sequences.get(id) ?? ended.findLast(hasId) ?? [...compiling.values()].find(hasId) ?? null;
  },

  // Returns the index of the last line up to the end of a step of an engine process for which
  // `matches` is true, or null.
  findEvent(matches, step, engine) {
    const { history } = this;
    for (let at = this.index; at >= history.first; at -= 1) {
      const line = history.line(at);
      if (line[2] <= step && matches(line) && history.engineAt(at) === engine) return at;
    }
    return null;
  },

  // Returns the latest events of a sequence, oldest first.
  eventsOf(id, maxEvents) {
    const events = [];
    const kinds = new Set([
      "arrived",
      "forked",
      "admitted",
      "waiting",
      "preempted",
      "finished",
      "failed",
      "copied",
    ]);
    for (let at = this.index; at >= this.history.first && events.length < maxEvents; at -= 1) {
      const line = this.history.line(at);
      if (!kinds.has(line[0]) || line[4] !== id) continue;
      events.unshift({ event: this.history.event(at), index: at });
      if (line[0] === "arrived" || line[0] === "forked") break;
    }
    return events;
  },
};
page.reset();

const hover = (id) => {
  if (page.hovered === id) return;
  page.hovered = id;
  redraw(true);
};
const hoverBlock = (block) => {
  if (page.hoveredBlock === block) return;
  page.hoveredBlock = block;
  redraw(true);
};
const selectSequence = (id) => page.select({ kind: "sequence", id });
const timeline = new Timeline(byId("timeline"), {
  select: selectSequence,
  selectStep: (step) => page.select({ kind: "step", step }),
  hover,
  redraw: () => redraw(true),
});
byId("wider").addEventListener("click", () => timeline.zoomBy(1.7));
byId("narrower").addEventListener("click", () => timeline.zoomBy(0.6));
for (const [name, words] of [
  ["waiting", "waiting"],
  ["cached", "cached"],
  ["prefill", "prefill"],
  ["decode", "decode"],
  ["budget", "token budget"],
  ["rejected", "rejected draft"],
  ["alarm", "preempted"],
  ["tier", "from host memory"],
])
  byId("timeline-legend").append(element("li", name, element("i", `key ${name}`), words));

// ---- drawing ------------------------------------------------------------------------------------

const rounds = new Rounds(
  [
    () => drawWall(page.state, marksOf(page), page.names),
    () => timeline.draw(page.spans, page, marksOf(page)),
    () => drawTransport(page),
    () => drawRequests(page.state, marksOf(page)),
    () => {
      const blocks = drawMetrics(page);
      drawLegend(page.state, blocks);
      drawFooter(blocks);
    },
    () => drawLog(page.history, page.index, page.names, Math.max(0, marksOf(page).selected)),
    () => drawWhy(page),
    () => {
      const { state } = page;
      followMine(state);
      followSettings(page.history.end);
      byId("timeline-legend").classList.toggle("no-drafts", !state.counters.drafted);
      byId("timeline-legend").classList.toggle("no-host", !state.about.host_blocks);
      drawHead();
      refreshTip();
    },
  ],
  () => page.advance(),
);

const marksOf = ({ selection, hovered, hoveredBlock }) => ({
  selected: selection.kind === "sequence" ? selection.id : 0,
  block: hoveredBlock || (selection.kind === "block" ? selection.block : 0),
  hovered,
  isMine,
});

let isFrameRequested = false;

// An urgent change is shown by all panels in the next frame.
export function redraw(urgent = false) {
  rounds.ask(urgent);
  askForFrame();
}

function askForFrame() {
  if (isFrameRequested) return;
  isFrameRequested = true;
  requestAnimationFrame(draw);
}

function draw(time) {
  isFrameRequested = false;
  if (!page.state) return;
  const isMore = rounds.drawFrame(time);
  page.isWhole = rounds.isWhole;
  if (isFlashing()) drawWall(page.state, marksOf(page), page.names);
  if (isFlashing() || isMore) askForFrame();
}

function drawFooter({ used, cached, free, total }) {
  const isSumRight = used + cached + free === total;
  setText(
    byId("sum"),
    `${count(used)} used + ${count(cached)} cached (can be evicted) + ${count(free)} free = ${plural(total, "block")} ${isSumRight ? "✓" : "✗"}`,
  );
  byId("sum").className = isSumRight ? "" : "bad";
  const check = page.history.checkOf(page.state.about.stream, page.index);
  const { words, isBad } = describeCheck(check, page.state.engine);
  setText(byId("checked"), words);
  byId("checked").className = isBad ? "bad" : "";
  setText(byId("seen"), plural(page.history.lines.length, "event"));
}

function describeCheck(check, engine) {
  if (!check) return { words: "", isBad: false };
  const { step, differences } = check;
  return differences.length
    ? {
        words: `✗ at ${nameOfStep(step, engine)} the page differed from the engine, please report this: ${differences[0]}`,
        isBad: true,
      }
    : { words: `state checked against the engine at ${nameOfStep(step, engine)} ✓`, isBad: false };
}

function drawHead() {
  if (!page.isReplay || byId("model").dataset.about === page.state.about.stream) return;
  const { about } = page.state;
  byId("model").dataset.about = about.stream;
  byId("model").replaceChildren(
    element("b", "", about.model ?? "recording"),
    ` · ${[about.architecture, about.weights || about.dtype, about.device].filter(Boolean).join(", ")} · ${new Date(1000 * about.unix_time).toLocaleString()}`,
  );
}

// ---- tabs, links and keys -----------------------------------------------------------------------

export function openTab(name) {
  for (const tab of document.querySelectorAll("[role=tab]")) {
    const isOpen = tab.getAttribute("aria-controls") === name;
    tab.ariaSelected = String(isOpen);
    tab.tabIndex = isOpen ? 0 : -1;
    byId(tab.getAttribute("aria-controls")).hidden = !isOpen;
  }
  redraw(true);
}
for (const tab of document.querySelectorAll("[role=tab]"))
  tab.addEventListener("click", () => openTab(tab.getAttribute("aria-controls")));
byId("side-panel").addEventListener("keydown", (event) => {
  if (event.target.role !== "tab" || !["ArrowLeft", "ArrowRight"].includes(event.key)) return;
  event.stopPropagation();
  const tabs = [...document.querySelectorAll("[role=tab]:not([hidden])")];
  const at = tabs.indexOf(event.target);
  const next = tabs.at((at + (event.key === "ArrowRight" ? 1 : -1)) % tabs.length);
  next.focus();
  next.click();
});

// The address names the step and the request, so that it can be sent to somebody.
export function showLink() {
  showNotice("");
  const parts = [];
  if (!page.follows && page.state) {
    parts.push(`step=${page.state.step}`);
    if (page.state.engine > 1) parts.push(`engine=${page.state.engine}`);
  }
  const seq = page.selection.kind === "sequence" ? page.findSequence(page.selection.id) : null;
  if (seq?.name) parts.push(`request=${letters(seq.name)}${seq.index ? `.${seq.index}` : ""}`);
  if (page.selection.kind === "block") parts.push(`block=${page.selection.block}`);
  history.replaceState(
    null,
    "",
    parts.length ? `#${parts.join("&")}` : location.pathname + location.search,
  );
}

// Goes to the step and selects the request or block of the address. Shows a notice if the page does not
// have them.
export function followLink() {
  if (!page.history.end) return;
  if (page.follows) page.moveTo(page.history.last, true); // With all lines that wait for a round.
  const wanted = new URLSearchParams(location.hash.slice(1));
  const notes = [];
  if (wanted.has("step"))
    notes.push(goToStep(Number(wanted.get("step")), Number(wanted.get("engine") ?? 1)));
  if (wanted.has("request")) notes.push(selectNamed(wanted.get("request")));
  if (wanted.has("block")) page.select({ kind: "block", block: Number(wanted.get("block")) });
  showNotice(notes.filter(Boolean).join(" "));
}

// Goes to a step of an engine process, or to the nearest one. Returns a notice about it, or "".
function goToStep(number, wantedEngine) {
  const { history } = page;
  const exact = history.stepIndexOfNumber(number, wantedEngine);
  if (exact >= 0) {
    page.moveTo(history.endOfStep(exact));
    return "";
  }
  const isKnown = history.nearestStep(number, wantedEngine) !== null;
  const engine = isKnown ? wantedEngine : history.end.engine;
  const { first, last, stepIndex } = history.nearestStep(number, engine);
  page.moveTo(history.endOfStep(stepIndex));
  const steps = `steps ${count(first)} to ${count(last)}${engine > 1 ? ` of engine ${engine}` : ""}`;
  const shown = `and shows ${nameOfStep(page.state.step, engine)}`;
  return `${capitalised(nameOfStep(number, wantedEngine))} is not kept. This page has ${steps}, ${shown}.`;
}

// Selects the latest request with these letters. Returns a notice about it, or "".
function selectNamed(name) {
  const matches = [...page.names.seen.values()].filter(
    (each) => `${letters(each.name)}${each.index ? `.${each.index}` : ""}` === name,
  );
  const seq = matches.findLast(({ id }) => page.findSequence(id)) ?? matches.at(-1);
  if (!seq) return `The request ${name} is not kept.`;
  page.select({ kind: "sequence", id: seq.id });
  return "";
}

function showNotice(words) {
  setText(byId("notice-text"), words);
  byId("notice").hidden = !words;
}
byId("notice-close").addEventListener("click", () => showNotice(""));
addEventListener("hashchange", followLink);

onRequests({ select: selectSequence, hover, redraw: () => redraw(true) });
onWall({
  select: (block) => page.select({ kind: "block", block }),
  hover,
  redraw: () => redraw(true),
});
onWhy({
  go: (index) => {
    page.moveTo(index);
    showLink();
  },
  select: selectSequence,
  selectBlock: (block) => page.select({ kind: "block", block }),
  hoverBlock,
  redraw: () => redraw(true),
});
onLog((index) => (index === null ? redraw(true) : page.moveTo(index)));
onTheme(() => redraw(true));
// Requests that a button sends are visible at once, even if the page was paused.
onTraffic(() => !page.follows && !page.isReplay && page.moveTo(page.history.last, true));
bindTransport(page, { showLink, redraw: () => redraw(true) });
const resized = new ResizeObserver(() => redraw(true));
for (const id of ["scrub-box", "tiles", "wall-box", "timeline-box"]) resized.observe(byId(id));
bindWhatIf(page);
readColours();
openTab("why");
openSource(page, { redraw, followLink, openTab });
