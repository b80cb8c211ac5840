// Time travel: pause, steps, the slider, the speed of a replay, and the keyboard.

import {
  byId,
  changes,
  colour,
  count,
  element,
  onTheme,
  prepare,
  setText,
  surfaceOf,
} from "./draw.js";
import { address } from "./feed.js";
import { nameOfStep } from "./words.js";

const scrub = byId("scrub");
const map = byId("scrub-map");
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
  scrub.addEventListener("input", () => {
    stop();
    page.moveTo(page.history.endOfStep(Number(scrub.value)));
    showLink();
  });
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
    const many = event.shiftKey ? 10 : 1;
    const actions = {
      " ": pause,
      ArrowLeft: () => step(-many),
      ArrowRight: () => step(many),
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
  const sequences = [...page.state.sequences.values()].sort((a, b) => a.name - b.name);
  if (!sequences.length) return;
  const at = sequences.findIndex((seq) => seq.id === page.selection.id);
  page.select({ kind: "sequence", id: sequences.at((at + direction) % sequences.length).id });
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
  const place = history.stepAt(page.index);
  if (Number(scrub.value) !== place) scrub.value = place;
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
  return behind > 0 ? `go live (${count(behind)} new)` : "go live";
}

let isOtherMap = changes();
onTheme(() => (isOtherMap = changes()));

// The tokens of each step along the slider, and a mark for each preemption and for each crash of the
// engine process.
function drawMap({ spans, history }) {
  const isEmpty = surfaceOf(map).isEmpty;
  const { preemptions, restarts } = spans;
  const known = [
    ...[spans, spans.steps.length, history.steps.length],
    ...[preemptions.length, restarts.length],
  ];
  if (!isOtherMap(...known) && !isEmpty) return;
  const { context, width, height } = prepare(map);
  const { steps } = spans;
  const first = Math.max(0, steps.length - history.steps.length);
  const shown = steps.length - first;
  if (!shown || !width) return;
  const x = (place) => ((place - first) / shown) * width;
  const columns = Math.min(shown, Math.max(1, Math.floor(width / 2)));
  for (let column = 0; column < columns; column += 1) {
    const from = first + Math.floor((column * shown) / columns);
    const to = first + Math.floor(((column + 1) * shown) / columns);
    drawColumn(context, steps, from, to, { x, height });
  }
  context.fillStyle = colour("alarm");
  for (const place of preemptions)
    if (place >= first) context.fillRect(Math.min(x(place), width - 2), 2, 2, 7);
  // A crash has a line from the top to the bottom with a cross.
  for (const place of restarts)
    if (place >= first) drawCrash(context, Math.min(x(place), width - 4), height);
}

function drawCrash(context, x, height) {
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
  for (let place = from + 1; place < to; place += 1)
    if (tokens(steps[place]) > tokens(fullest)) fullest = steps[place];
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
  ["j, k", "the next and the previous request"],
  ["+ −", "zoom of the timeline"],
  ["Tab", "move to the KV blocks or the timeline; the arrow keys then move inside the panel"],
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
      "All panels show the same moment. While the page is live, this is the latest event. Pause, then use the slider or the arrow keys to look at any earlier step. On the slider, a short red mark is a preemption, and a red cross is a crash of the engine process.",
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
