// Time travel: pause, steps, the slider, the speed of a replay, and the keyboard.

import {
  byId,
  changeDetector,
  colour,
  count,
  element,
  explain,
  onTheme,
  plural,
  prepare,
  setText,
  surfaceOf,
} from "./draw.js";
import { address } from "./feed.js";
import { idBeside } from "./requests.js";
import { nameOfStep } from "./words.js";

const scrub = byId("scrub");
const map = byId("scrub-map");
const MAX_NAMED_MARKS = 4; // Marks close to the pointer that a tip names.
let timer = 0;
let isPlaying = false;
let onStop = () => {};

export function bindTransport(page, { showLink, redraw }) {
  onStop = redraw;
  const pause = () => {
    if (isPlaying) return stop();
    if (page.isReplay) return play(page);
    page.moveTo(page.follows ? page.index : page.history.last, !page.follows);
    showLink();
  };
  const goToEnd = () => {
    stop();
    page.moveTo(page.history.last, !page.isReplay);
    showLink();
  };
  const step = (number) => {
    stop();
    page.moveSteps(number);
    showLink();
  };
  byId("pause").addEventListener("click", pause);
  byId("back").addEventListener("click", () => step(-1));
  byId("forward").addEventListener("click", () => step(1));
  let pressed = null; // The x position of a press that has not moved the slider yet.
  scrub.addEventListener("pointerdown", ({ offsetX }) => (pressed = offsetX));
  scrub.addEventListener("pointerup", () => (pressed = null));
  scrub.addEventListener("input", () => {
    stop();
    // A press close to a mark goes to the mark.
    const stepIndex = pressed === null ? undefined : marksNear(pressed)[0]?.stepIndex;
    pressed = null;
    page.moveTo(page.history.endOfStep(stepIndex ?? Number(scrub.value)));
    showLink();
  });
  explain(scrub, (x) => wordsOfMarks(page, marksNear(x)));
  byId("link").addEventListener("click", async () => {
    if (page.follows) page.moveTo(page.index);
    showLink();
    await navigator.clipboard?.writeText(location.href).catch(() => {});
    setText(byId("link"), "copied");
    setTimeout(() => setText(byId("link"), "link"), 1500);
  });
  addEventListener("keydown", (event) => {
    if (event.target.closest("input, textarea, select, dialog") && event.target !== scrub) return;
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const stepCount = event.shiftKey ? 10 : 1;
    const actions = {
      " ": pause,
      ArrowLeft: () => step(-stepCount),
      ArrowRight: () => step(stepCount),
      Home: () => step(-Infinity),
      End: goToEnd,
      j: () => chooseNext(page, 1),
      k: () => chooseNext(page, -1),
      "?": showHelp,
      Escape: () => page.select({ kind: "none" }),
      "+": () => byId("narrower").click(),
      "-": () => byId("wider").click(),
    };
    if (!actions[event.key] || (event.target.closest("button, summary") && event.key === " "))
      return;
    event.preventDefault();
    actions[event.key]();
  });
  byId("help-button").addEventListener("click", showHelp);
  byId("save").addEventListener("click", () => save(page));
}

// Selects the next or the previous request of the table.
function chooseNext(page, direction) {
  const { selection } = page;
  const id = idBeside(selection.kind === "sequence" ? selection.id : 0, direction);
  if (id !== null) page.select({ kind: "sequence", id });
}

// ---- playing a recording ------------------------------------------------------------------------

export function play(page) {
  if (page.index >= page.history.last) page.moveTo(page.history.first);
  isPlaying = true;
  let before = performance.now();
  let time = page.now;
  const advance = (now) => {
    if (!isPlaying) return;
    time += 1000 * (now - before) * Number(byId("speed").value);
    before = now;
    const index = page.history.indexOfTime(time);
    if (index > page.index) page.moveOnTo(index);
    if (page.index >= page.history.last) stop();
    timer = requestAnimationFrame(advance);
  };
  timer = requestAnimationFrame(advance);
}

export function stop() {
  if (isPlaying) onStop(); // All panels show the moment at which the page stands.
  isPlaying = false;
  cancelAnimationFrame(timer);
}

// Saves what the page has seen as one HTML file, which needs no server.
async function save(page) {
  setText(byId("save"), "saving");
  const reply = await fetch(address("web/single-file.html"));
  const packed = await new Response(
    new Blob([page.history.text()]).stream().pipeThrough(new CompressionStream("gzip")),
  ).arrayBuffer();
  const bytes = new Uint8Array(packed);
  const parts = [];
  for (let at = 0; at < bytes.length; at += 30000)
    parts.push(String.fromCharCode(...bytes.subarray(at, at + 30000)));
  const text = (await reply.text()).replace("@RECORDING@", btoa(parts.join("")));
  const link = element("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "text/html" }));
  link.download = `octavo-${new Date().toISOString().slice(0, 19).replaceAll(":", "-")}.html`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
  setText(byId("save"), "save");
}

// ---- drawing ------------------------------------------------------------------------------------

export function drawTransport(page) {
  const { history, state } = page;
  const last = Math.max(0, history.steps.length - 1);
  if (Number(scrub.max) !== last) scrub.max = last;
  const stepIndex = history.stepAt(page.index);
  if (Number(scrub.value) !== stepIndex) scrub.value = stepIndex;
  const isMoving = page.isReplay ? isPlaying : page.follows;
  setText(byId("pause"), isMoving ? "pause" : page.isReplay ? "play" : wordsToGoLive(page));
  byId("pause").ariaPressed = String(!isMoving);
  setText(byId("clock"), `${nameOfStep(state.step, state.engine)} · ${(page.now / 1e6).toFixed(2)} s`);
  scrub.ariaValueText = nameOfStep(state.step, state.engine);
  byId("speed-box").hidden = !page.isReplay;
  document.body.classList.toggle("paused", !isMoving);
  drawMap(page);
}

function wordsToGoLive({ history, index }) {
  const behind = history.last - index;
  return behind > 0 ? `go live (${plural(behind, "new event")})` : "go live";
}

let isOtherMap = changeDetector();
onTheme(() => (isOtherMap = changeDetector()));

const NEAR = 5; // A pointer that is at most this many pixels from a mark points at it.
const THUMB = 5; // The width of the handle of the slider, in pixels.
let marks = []; // What the slider marks: { kind, at, stepIndex, x }.

// Returns the marks close to an x position of the slider, nearest first.
const marksNear = (x) =>
  marks
    .filter((mark) => Math.abs(mark.x - x) <= NEAR)
    .sort((one, other) => Math.abs(one.x - x) - Math.abs(other.x - x));

const MARKS = {
  preempted: (page, { seq }) => `${page.names.letters(seq)} was preempted`,
  restarted: () => "the engine process ended, and a new one started",
  gap: () => "this page does not have the steps before this one",
};

function wordsOfMarks(page, nearMarks) {
  const { history } = page;
  const lines = nearMarks.slice(0, MAX_NAMED_MARKS).map((mark) => {
    const step = nameOfStep(history.line(mark.at)[2], history.engineAt(mark.at));
    return `${step}: ${MARKS[mark.kind](page, mark)}`;
  });
  const more = nearMarks.length - lines.length;
  return [...lines, ...(more > 0 ? [`and ${plural(more, "mark")} more`] : [])].join("\n");
}

// The tokens of each step along the slider, and a mark for each preemption, for each crash of the
// engine process, and where steps are missing.
function drawMap({ spans, history }) {
  const isEmpty = surfaceOf(map).isEmpty;
  const drawnValues = [spans, spans.steps.length, history.steps.length, spans.marks.length];
  if (!isOtherMap(...drawnValues) && !isEmpty) return;
  const { context, width, height } = prepare(map);
  const { steps } = spans;
  const first = Math.max(0, steps.length - history.steps.length);
  const shown = steps.length - first;
  if (!shown || !width) return;
  const x = (stepIndex) => ((stepIndex - first) / shown) * width;
  const columns = Math.min(shown, Math.max(1, Math.floor(width / 2)));
  for (let column = 0; column < columns; column += 1) {
    const from = first + Math.floor((column * shown) / columns);
    const to = first + Math.floor(((column + 1) * shown) / columns);
    drawColumn(context, steps, from, to, { x, height });
  }
  marks = placeMarks(spans, history, width);
  for (const mark of marks) drawMark(context, mark, height);
}

// Returns the marks of the steps that the page has, where the handle of the slider stands at them.
function placeMarks(spans, history, width) {
  const last = Math.max(1, history.steps.length - 1);
  return spans.marks
    .filter(({ at }) => at >= history.first)
    .map((mark) => {
      const stepIndex = history.stepAt(mark.at);
      return { ...mark, stepIndex, x: THUMB / 2 + (stepIndex / last) * (width - THUMB) };
    });
}

// A crash has a line from the top to the bottom with a cross, and a gap has a dashed one.
function drawMark(context, { kind, x }, height) {
  if (kind === "restarted") drawCrash(context, x, height);
  else if (kind === "preempted") {
    context.fillStyle = colour("alarm");
    context.fillRect(x - 1, 2, 2, 7);
  } else {
    context.fillStyle = colour("dim");
    for (let y = 0; y < height; y += 6) context.fillRect(x - 1, y, 2, 3);
  }
}

function drawCrash(context, x, height) {
  context.fillStyle = colour("alarm");
  context.fillRect(x - 1, 0, 2, height);
  context.strokeStyle = colour("alarm");
  context.lineWidth = 2;
  context.beginPath();
  context.moveTo(x - 4, height / 2 - 4);
  context.lineTo(x + 4, height / 2 + 4);
  context.moveTo(x + 4, height / 2 - 4);
  context.lineTo(x - 4, height / 2 + 4);
  context.stroke();
}

// Draws the fullest of some steps: prefill above decode, as parts of the token budget.
function drawColumn(context, steps, from, to, { x, height }) {
  let fullest = steps[from];
  const tokens = (step) => (step.decode + step.drafted + step.prefill) / Math.max(1, step.budget);
  for (let stepIndex = from + 1; stepIndex < to; stepIndex += 1)
    if (tokens(steps[stepIndex]) > tokens(fullest)) fullest = steps[stepIndex];
  const tall = (number) => (number / Math.max(1, fullest.budget)) * (height - 6);
  const decode = fullest.decode ? Math.max(2, tall(fullest.decode + fullest.drafted)) : 0;
  const prefill = fullest.prefill ? Math.max(2, tall(fullest.prefill)) : 0;
  const wide = Math.max(1, x(to) - x(from) - 0.5);
  context.fillStyle = colour("map");
  context.fillRect(x(from), height - 2 - decode, wide, decode);
  context.fillStyle = colour("map-prefill");
  context.fillRect(x(from), height - 2 - decode - prefill, wide, prefill);
}

// ---- help ---------------------------------------------------------------------------------------

const KEYS = [
  ["space", "pause or continue"],
  ["← →", "one step back or forward; with Shift, ten steps"],
  ["Home, End", "the first step; the latest step, which is live if there is a server"],
  ["j, k", "select the next and the previous request of the table"],
  ["+ −", "zoom of the timeline"],
  [
    "Tab",
    "move to the requests, the KV blocks or the timeline; the arrow keys then move inside the panel",
  ],
  ["Esc", "clear the selection"],
  ["?", "this help"],
];

function showHelp() {
  const list = element("dl");
  for (const [keys, words] of KEYS) list.append(element("dt", "", keys), element("dd", "", words));
  byId("help-text").replaceChildren(
    element("h2", "", "How to read this page"),
    element(
      "p",
      "",
      "All panels show the same moment. While the page is live, this is the latest event. Pause, then use the slider or the arrow keys to look at any earlier step. On the slider, a short red mark is a preemption, a red cross is a crash of the engine process, and a dashed line marks steps that the page does not have.",
    ),
    element(
      "p",
      "",
      "Letters, colours and patterns stand for requests, in all views. Choose a request, a block or a step, and “Why?” explains it. docs/watching.md walks through examples.",
    ),
    list,
  );
  byId("help-text").querySelector("h2").id = "help-title";
  byId("help").showModal();
}
