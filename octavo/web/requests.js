// The table of requests: live ones in the order of arrival, then the latest that have ended.

import { chip, nameOf } from "./colours.js";
import {
  byId,
  changeDetector,
  count,
  element,
  formatDuration,
  plural,
  setChildren,
  setText,
  shortId,
} from "./draw.js";
import { blockerOf, cachedOf, countStates, wordsOfReason } from "./state.js";
import { FINISH_REASONS, nameOfStep, wordsOfRefusal } from "./words.js";

// Count of the header -> the states of the requests that it counts.
const STATES = {
  decode: ["decode"],
  prefill: ["prefill"],
  waiting: ["waiting", "compiling"],
  done: ["done", "aborted"],
  failed: ["failed"],
  refused: ["refused"],
};

const SHOWN_LIVE = 120;
const SHOWN_ENDED = 60;
const LONG_TABLE = 40; // In a table with more rows than this, only the rows in sight are made.
const MARGIN = 8; // Rows above and below those in sight that are made too.
const USUAL_HEIGHT = 24; // The assumed height of a row that was not in sight yet, in pixels.
const isNarrow = matchMedia("(max-width: 760px)");
const isMedium = matchMedia("(max-width: 1180px)");
const body = byId("rows");
const box = byId("requests-box");
const NO_REQUESTS = byId("no-requests").textContent;
const NONE_YET = "No request has arrived by this step."; // In a recording.
let rows = new Map(); // key -> row
let heights = new Map(); // key -> the height of its row when it was seen last
let select = () => {};
let hover = () => {};
let redraw = () => {};
let shownState = ""; // The state in the header to which the table is limited, or "".
let listed = []; // The ids of the listed requests, in their order.
const isOtherSelection = changeDetector();

export function onRequests(listeners) {
  ({ select, hover, redraw } = listeners);
}

const keyOf = (seq) => `${seq.id}`;

function newRow(key) {
  const tr = element("tr");
  const cells = Array.from({ length: 9 }, () => element("td"));
  const meter = element("div", "meter");
  const note = element("div", "note");
  const bars = ["prompt", "generated", "computed", "cached"].map((kind) => element("i", kind));
  meter.append(...bars);
  const word = element("span");
  const preemptionNote = element("small");
  cells[1].append(word, preemptionNote);
  cells[2].append(meter, note);
  for (const cell of cells.slice(3)) cell.className = "num";
  tr.append(...cells);
  tr.tabIndex = -1;
  const row = { key, tr, cells, meter, bars, note, word, preemptionNote, identity: "" };
  tr.addEventListener("click", () => select(row.seq.id));
  tr.addEventListener("keydown", (event) => {
    const actions = {
      Enter: () => select(row.seq.id),
      " ": () => select(row.seq.id),
      ArrowDown: () => focusRow(tr.nextElementSibling),
      ArrowUp: () => focusRow(tr.previousElementSibling),
    };
    if (!actions[event.key]) return;
    event.preventDefault();
    event.stopPropagation();
    actions[event.key]();
  });
  tr.addEventListener("pointerenter", () => hover(row.seq.id));
  tr.addEventListener("pointerleave", () => hover(0));
  return row;
}

function focusRow(tr) {
  if (!tr) return;
  setTabStop(tr);
  tr.focus({ preventScroll: true });
  showRow(tr);
}

// Of all rows, Tab reaches one: the arrow keys move from it to the others.
function setTabStop(chosen) {
  for (const { tr } of rows.values()) tr.tabIndex = tr === chosen ? 0 : -1;
}

// Scrolls the table so that a row is seen whole, below the head of the table.
function showRow({ offsetTop, offsetHeight }) {
  const top = offsetTop - byId("requests").tHead.offsetHeight;
  const bottom = offsetTop + offsetHeight - box.clientHeight;
  box.scrollTop = Math.min(top, Math.max(bottom, box.scrollTop));
}

// Returns the id of the request that is listed after another one, or before it with -1, or null.
export function idBeside(id, direction) {
  if (!listed.length) return null;
  const at = listed.indexOf(id);
  if (at < 0) return listed.at(direction > 0 ? 0 : -1);
  return listed.at((at + direction) % listed.length);
}

// A plan gives a reason for the requests that it tried, and for the first that it did not try.
function whyWaiting(seq, state) {
  const blocker = blockerOf(seq, state);
  if (blocker === seq) return wordsOfReason(seq.waits.reason, state, seq.waits.needed);
  if (blocker) return `behind ${nameOf(blocker)} in the queue`;
  return seq.preempted ? seq.preempted.reason : "waiting for the next step";
}

// Returns the state in a word, and what stands below the meter.
function wordsOf(seq, state) {
  const extra = [seq.priority && `priority ${seq.priority}`, seq.tenant].filter(Boolean).join(", ");
  const size = `${plural(seq.prompt, "prompt token")}${extra ? `, ${extra}` : ""}`;
  if (seq.state === "compiling")
    return ["compiling", `the structured output is being compiled · ${size}`];
  if (seq.ended !== undefined) {
    const reason = seq.answer ?? (seq.error || FINISH_REASONS[seq.reason] || seq.reason);
    if (seq.state === "refused") return [seq.state, wordsOfRefusal(reason)];
    const parts = [
      reason !== seq.state && wordsOfRefusal(reason),
      seq.preemptions && `preempted ×${seq.preemptions}`,
      `${count(seq.prompt)} prompt + ${count(seq.generated)} reply tokens`,
      seq.first_token && `TTFT ${formatDuration(seq.first_token - seq.arrival)}`,
      `total ${formatDuration(seq.ended - seq.arrival)}`,
    ];
    return [seq.state, parts.filter(Boolean).join(" · ")];
  }
  if (seq.state === "waiting")
    return [seq.preemptions ? "preempted" : "waiting", `${whyWaiting(seq, state)} · ${size}`];

  const isPaused =
    seq.unplanned &&
    seq.unplanned.step === state.step &&
    !state.plan?.items.some((item) => item.id === seq.id);
  return [isPaused ? "paused" : seq.state, isPaused ? seq.unplanned.reason : ""];
}

const tail = (text, length) => (text.length > length ? `…${text.slice(-length)}` : text);

function fill(row, state, marks) {
  const { seq } = row;
  const [word, why] = wordsOf(seq, state);
  const identity = `${seq.label} ${nameOf(seq)} ${seq.request}`;
  if (row.identity !== identity) {
    row.identity = identity;
    row.cells[0].replaceChildren(chip(seq), element("span", "id", shortId(seq.request)));
    row.cells[0].title = seq.request;
  }
  row.tr.className = [
    marks.selected === seq.id ? "selected" : "",
    marks.hovered === seq.id ? "hovered" : "",
    marks.isMine(seq.request) ? "mine" : "",
    seq.ended === undefined ? "" : "over",
  ].join(" ");
  row.cells[1].className = `state ${word}`;
  const isMarked = seq.preemptions && seq.ended === undefined;
  setText(row.word, word);
  setText(row.preemptionNote, isMarked ? `preempted ×${seq.preemptions}` : "");
  row.preemptionNote.hidden = !isMarked || (word === "preempted" && seq.preemptions === 1);
  const limit = Math.max(seq.limit, seq.prompt + seq.generated, 1);
  const part = (n) => `${Math.min(100, (100 * n) / limit).toFixed(2)}%`;
  const computed = Math.min(seq.computed + seq.dropped, seq.prompt);
  const cached = cachedOf(seq);
  const widths = [
    seq.prompt,
    seq.prompt + seq.generated,
    seq.ended === undefined ? computed : seq.prompt,
    Math.min(cached, seq.prompt),
  ];
  row.bars.forEach((bar, i) => (bar.style.width = part(widths[i])));
  row.meter.title = `${plural(cached, "token")} cached at its latest admission, ${plural(seq.prompt, "prompt token")}, ${count(seq.generated)} of at most ${count(limit - seq.prompt)} generated`;
  // A request that waits or has ended has no progress to show, but a reason, which takes the place
  // of the numbers.
  const isIdle =
    Boolean(why) &&
    (seq.ended !== undefined || seq.state === "waiting" || seq.state === "compiling");
  row.meter.hidden = isIdle;
  row.cells[2].colSpan = isIdle ? marks.columns : 1;
  for (const cell of row.cells.slice(3)) cell.hidden = isIdle;
  const text =
    why ||
    (seq.reply
      ? tail(seq.reply.replace(/\s+/g, " "), 90)
      : seq.text
        ? tail(seq.text.replace(/\s+/g, " "), 90)
        : "");
  setText(row.note, text);
  row.note.title = text;
  row.note.className = why ? "note why" : "note text";
  row.note.hidden = !text;
  if (isIdle) return;
  [seq.prompt, cached, seq.generated, seq.table.length].forEach((n, i) =>
    setText(row.cells[3 + i], count(n)),
  );
  setText(row.cells[7], String(seq.priority));
  setText(row.cells[8], seq.tenant);
}

export function drawRequests(state, marks) {
  const live = [...state.sequences.values()].sort(
    (a, b) =>
      (a.state === "waiting") - (b.state === "waiting") || a.name - b.name || a.index - b.index,
  );
  const isChosen = (seq) => !shownState || STATES[shownState].includes(seq.state);
  const chosen = live.filter(isChosen);
  const over = state.ended.filter(isChosen);
  const shown = [
    ...chosen.slice(0, SHOWN_LIVE),
    ...[...state.compiling.values()].filter(isChosen),
    ...over.slice(-SHOWN_ENDED).reverse(),
  ];
  const unlisted = [
    chosen.length > SHOWN_LIVE && plural(chosen.length - SHOWN_LIVE, "more live request"),
    over.length > SHOWN_ENDED && "older requests that have ended",
  ].filter(Boolean);
  setText(byId("more-requests"), unlisted.length ? `Not listed: ${unlisted.join(", ")}.` : "");
  const hasPriorities = shown.some((seq) => seq.priority);
  const hasTenants = shown.some((seq) => seq.tenant);
  byId("requests").classList.toggle("no-priorities", !hasPriorities);
  byId("requests").classList.toggle("no-tenants", !hasTenants);
  // The columns behind the state that page.css shows at this width.
  marks.columns = isNarrow.matches
    ? 3
    : 4 + (isMedium.matches ? 0 : 1 + hasTenants) + hasPriorities;
  listed = shown.map(({ id }) => id);
  const isNewlySelected = isOtherSelection(marks.selected) && marks.selected;
  const index = isNewlySelected ? listed.indexOf(marks.selected) : -1;
  if (index >= 0 && shown.length > LONG_TABLE) scrollNear(shown, index);
  const [first, last] = findInSight(shown);
  for (const row of placeRows(shown, first, last)) fill(row, state, marks);
  const selected = rows.get(String(marks.selected));
  const focused = [...rows.values()].find(({ tr }) => tr === document.activeElement);
  if (index >= 0 && selected) {
    showRow(selected.tr);
    if (focused) selected.tr.focus({ preventScroll: true });
  }
  setTabStop((focused ?? selected ?? rows.values().next().value)?.tr);
  byId("requests").ariaRowCount = String(shown.length + 1);
  byId("no-requests").hidden = shown.length > 0;
  const noRequests = document.body.classList.contains("replay") ? NONE_YET : NO_REQUESTS;
  setText(byId("no-requests"), shownState ? `No request is listed as ${shownState}.` : noRequests);
  drawCounts(state, live);
}

// Returns the indices of the first and the last request that need a row now. Of a long table, these
// are the ones in sight and a few around them: the browser lays out and paints all rows there are.
function findInSight(shown) {
  if (shown.length <= LONG_TABLE) return [0, shown.length - 1];
  for (const [key, { tr }] of rows) heights.set(key, tr.offsetHeight || USUAL_HEIGHT);
  const { scrollTop, clientHeight } = box;
  let top = 0;
  let [first, last] = [0, shown.length - 1];
  shown.forEach((seq, index) => {
    if (top < scrollTop) first = index;
    if (top < scrollTop + clientHeight) last = index;
    top += heightOf(seq);
  });
  return [Math.max(0, first - MARGIN), Math.min(shown.length - 1, last + MARGIN)];
}

// Scrolls a long table so that the row of a request is one of those that are made.
function scrollNear(shown, index) {
  const top = shown.slice(0, index).reduce((all, seq) => all + heightOf(seq), 0);
  if (top < box.scrollTop || top > box.scrollTop + box.clientHeight - 2 * USUAL_HEIGHT)
    box.scrollTop = top;
}

const heightOf = (seq) => heights.get(keyOf(seq)) ?? USUAL_HEIGHT;

// Gives these requests their rows, in this order, and leaves room for the others. Returns the rows.
function placeRows(shown, first, last) {
  const placed = shown.slice(first, last + 1).map((seq, i) => {
    const key = keyOf(seq);
    const row = rows.get(key) ?? newRow(key);
    row.seq = seq;
    row.tr.ariaRowIndex = String(first + i + 2);
    return row;
  });
  rows = new Map(placed.map((row) => [row.key, row]));
  setChildren(
    body,
    placed.map(({ tr }) => tr),
  );
  const isLong = shown.length > LONG_TABLE;
  const heightOfRows = (sequences) => sequences.reduce((all, seq) => all + heightOf(seq), 0);
  const above = isLong ? heightOfRows(shown.slice(0, first)) : 0;
  const below = isLong ? heightOfRows(shown.slice(last + 1)) : 0;
  leaveRoom(byId("rows-above"), above);
  leaveRoom(byId("rows-below"), below);
  if (!isLong) heights = new Map();
  else if (heights.size > 4 * shown.length)
    heights = new Map(shown.map((seq) => [keyOf(seq), heightOf(seq)]));
  return placed;
}

function leaveRoom(part, height) {
  part.hidden = !height;
  part.querySelector("td").style.height = `${height}px`;
}

box.addEventListener("scroll", () => heights.size && redraw(), { passive: true });

const counts = Object.fromEntries(
  ["decode", "prefill", "waiting", "done", "failed", "refused"].map((name) => {
    const number = element("b", "", "0");
    const words = element("span", "", ` ${name}`);
    const button = element("button", "", number, words);
    button.type = "button";
    button.title = `List only these requests, or all again: ${name}`;
    button.ariaPressed = "false";
    button.addEventListener("click", () => limitTo(name));
    const item = element("li", name, button);
    byId("counts").append(item);
    return [name, { item, number, words, button }];
  }),
);

function limitTo(name) {
  shownState = shownState === name ? "" : name;
  for (const [each, { button }] of Object.entries(counts)) button.ariaPressed = String(each === shownState);
  redraw();
}

function drawCounts(state, live) {
  const { decode, prefill, waiting } = countStates(state);
  const { finished, failed, refused } = state.counters;
  const numbers = { decode, prefill, waiting, done: finished, failed, refused };
  const since = state.since ? ` since ${nameOfStep(state.since)}` : "";
  setText(counts.done.words, ` done${since}`);
  for (const [name, { item, number }] of Object.entries(counts)) {
    setText(number, count(numbers[name]));
    item.hidden = !numbers[name] && shownState !== name && (name === "failed" || name === "refused");
  }
  const preempted = live.filter((seq) => seq.state === "waiting" && seq.preemptions).length;
  setText(counts.waiting.words, preempted ? ` waiting, ${preempted} of them preempted` : " waiting");
}
