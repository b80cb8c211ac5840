// Steps over time, in real milliseconds. From top to bottom:
//
//   tokens    one bar per step: its width is its duration, its height its tokens; a line shows the token budget
//   device    when the device computes; below it, when the host plans, launches and commits
//   lanes     one for each request: waiting, prefill chunks, decode steps, preemptions

import { fillOf, nameOf, styleOf } from "./colours.js";
import { colour, count, explain, formatDuration, plural, prepare } from "./draw.js";
import { findLast, laneUpTo, lastLanded, stepUpTo } from "./spans.js";
import { FINISH_REASONS, nameOfStep, wordsOfReturn } from "./words.js";

const GUTTER = 58;
const AXIS = 16;
const TOKENS = 52;
const DEVICE = 13;
const HOST = 11;
const LANE = 21;
const MORE = 12; // The line that counts the lanes for which there is no room.
const TOP = AXIS + TOKENS + DEVICE + HOST + 12; // Where the lanes begin.

// The steps that overlap an interval, and had landed at a line of the history.
function stepsBetween(steps, from, to, index) {
  const shownSteps = [];
  const first = findLast(steps, (step) => step.landed < from) + 1;
  for (let i = first; i < steps.length && steps[i].at <= index && steps[i].start <= to; i += 1)
    shownSteps.push(stepUpTo(steps[i], index));
  return shownSteps;
}

const hasEnded = (lane, index, time) => lane.endAt <= index && lane.end <= time;

// Returns the number of microseconds to show, so that about 40 steps are seen. It changes rarely, so
// that the picture stays calm.
function chooseWidth(spans, index, width) {
  const place = lastLanded(spans.steps, index);
  if (place < 1) return width;
  const earlier = spans.steps[Math.max(0, place - 40)];
  const newWidth = Math.max(
    0.2e6,
    Math.min(30e6, (spans.steps[place].landed - earlier.start) * 1.05),
  );
  return newWidth > width * 1.6 || newWidth < width / 1.6 ? newWidth : width;
}

function niceInterval(microseconds) {
  const power = 10 ** Math.floor(Math.log10(microseconds));
  return [1, 2, 5, 10].map((n) => n * power).find((n) => n >= microseconds);
}

function drawAxis(context, start, end, x, pixels, height) {
  const interval = niceInterval((end - start) / Math.max(2, pixels / 110));
  context.font = "10px system-ui, sans-serif";
  context.textAlign = "left";
  context.textBaseline = "alphabetic";
  for (let time = Math.ceil(start / interval) * interval; time < end; time += interval) {
    if (time < 0) continue;
    context.fillStyle = colour("line");
    context.fillRect(x(time), AXIS - 4, 1, height - AXIS + 4);
    const decimals = Math.max(0, Math.min(3, 6 - Math.floor(Math.log10(interval))));
    const words =
      interval >= 1e6 ? `${Math.round(time / 1e6)} s` : `${(time / 1e6).toFixed(decimals)} s`;
    if (x(time) + 3 + context.measureText(words).width > pixels) continue; // It would be cut off.
    context.fillStyle = colour("dim");
    context.fillText(words, x(time) + 3, AXIS - 6);
  }
}

// Returns the scale of the tokens of steps: the largest number, and the numbers beside the axis. The
// budget, which is the largest one in most cases, is one of them.
export function axisOfTokens(steps) {
  const tokens = steps.map((step) => step.decode + step.drafted + step.prefill);
  const budget = steps.reduce((largest, step) => Math.max(largest, step.budget), 0);
  const largest = Math.max(1, budget, ...tokens);
  const interval = Math.max(1, niceInterval(largest / 3));
  const ticks = [];
  // A number close to the largest one would be written over it.
  for (let tick = 0; tick < largest - 0.7 * interval; tick += interval) ticks.push(tick);
  return { largest, ticks: [...ticks, largest] };
}

function drawTokenAxis(context, { largest, ticks }, pixels) {
  context.fillStyle = colour("soft");
  context.fillRect(GUTTER, AXIS, pixels - GUTTER, TOKENS);
  context.font = "10px system-ui, sans-serif";
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (const tick of ticks) {
    const y = AXIS + TOKENS * (1 - tick / largest);
    context.fillStyle = colour("line");
    context.fillRect(GUTTER - 3, Math.round(y), pixels - GUTTER + 3, 1);
    context.fillStyle = colour("dim");
    // The outer numbers stay clear of the words above and below the axis.
    const aside = tick === 0 ? -4 : tick === largest ? 4 : 0;
    context.fillText(count(tick), GUTTER - 6, y + aside);
  }
  context.textBaseline = "alphabetic";
  context.fillText("tokens", GUTTER - 6, AXIS - 6);
  context.textAlign = "left";
}

// The budget of each step: a step that reaches the line has no room for another token.
function drawBudget(context, steps, x, largest, pixels) {
  context.strokeStyle = colour("ink");
  context.lineWidth = 1;
  context.setLineDash([4, 3]);
  context.beginPath();
  steps.forEach((step, i) => {
    const y = Math.round(AXIS + TOKENS * (1 - step.budget / largest)) + 0.5;
    const from = Math.max(GUTTER, x(step.start));
    const to = i + 1 < steps.length ? x(steps[i + 1].start) : pixels;
    if (i === 0) context.moveTo(GUTTER, y);
    else context.lineTo(from, y);
    context.lineTo(Math.max(from, to), y);
  });
  context.stroke();
  context.setLineDash([]);
}

function drawSteps(context, steps, x, pixels) {
  const base = AXIS + TOKENS;
  const axis = axisOfTokens(steps);
  drawTokenAxis(context, axis, pixels);
  for (const step of steps) {
    const left = Math.max(GUTTER, x(step.start));
    const wide = Math.max(0.7, x(step.landed) - left - (x(step.landed) - left > 3 ? 1 : 0));
    const tall = (tokens) => (TOKENS * tokens) / axis.largest;
    const decode = step.decode ? Math.max(1.5, tall(step.decode + step.drafted)) : 0;
    const prefill = step.prefill ? Math.max(1.5, tall(step.prefill)) : 0;
    context.fillStyle = colour("decode");
    context.fillRect(left, base - decode, wide, decode);
    context.fillStyle = colour("prefill");
    context.fillRect(left, base - Math.min(TOKENS, decode + prefill), wide, prefill);
    if (step.times) drawHostAndDevice(context, step, x);
  }
  drawBudget(context, steps, x, axis.largest, pixels);
  context.fillStyle = colour("dim");
  context.textAlign = "right";
  context.textBaseline = "middle";
  context.fillText("device", GUTTER - 6, base + 3 + DEVICE / 2);
  context.fillText("host", GUTTER - 6, base + 3 + DEVICE + HOST / 2);
  context.textAlign = "left";
}

// Without a measured time, the device is busy from the launch, or from the landing of the step
// before it.
function drawHostAndDevice(context, step, x) {
  const { started, planned, launched, landed, done } = step.times;
  const y = AXIS + TOKENS + 5;
  const bar = (from, to, top, tall, name) => {
    const left = Math.max(GUTTER, x(from));
    const right = x(to);
    if (right <= left) return;
    context.fillStyle = colour(name);
    context.fillRect(left, top, Math.max(0.6, right - left - 0.4), tall);
  };
  const busyFrom = step.device
    ? Math.max(step.start, landed - step.device)
    : Math.max(planned, step.start);
  bar(busyFrom, landed, y, DEVICE - 4, "device");
  bar(started, step.isOnHost ? busyFrom : launched, y + DEVICE, HOST - 4, "host");
  bar(landed, done, y + DEVICE, HOST - 4, "host");
}

const SPAN_COLOURS = { waiting: "waiting", preempted: "alarm" };

function drawLane(context, spans, lane, y, { x, start, end, now, index, marks, pixels }) {
  const isMarked = marks.selected === lane.id || marks.hovered === lane.id;
  const middle = y + LANE / 2;
  if (isMarked) {
    context.fillStyle = colour("marked");
    context.fillRect(0, y, pixels, LANE);
  }
  drawChip(context, lane, lane.label, y);
  for (const span of lane.spans) {
    const to = Math.min(span.end, now, lane.end);
    if (to < start || span.start > end || span.start > now) continue;
    const left = Math.max(GUTTER, x(span.start));
    const wide = Math.max(1, x(to) - left);
    if (x(to) < GUTTER) continue;
    if (span.kind in SPAN_COLOURS) drawWait(context, left, middle, wide, SPAN_COLOURS[span.kind]);
    else if (span.kind === "prefill") drawPrefill(context, left, y + 4, wide, span);
    else drawDecode(context, spans, span, y + 5, { x, start, now, index });
  }
  for (const mark of lane.marks)
    if (mark.time >= start && mark.time <= now) drawMark(context, mark, x(mark.time), y);
  if (lane.end <= now && lane.end >= start) drawEnd(context, lane, x(lane.end), middle);
}

function drawChip(context, lane, label, y) {
  const text = nameOf(lane);
  context.fillStyle = fillOf(context, label);
  context.beginPath();
  context.roundRect(GUTTER - 36, y + 3, 28, LANE - 6, 4);
  context.fill();
  if (label < 0) {
    context.strokeStyle = colour("line");
    context.lineWidth = 1;
    context.stroke();
  }
  context.fillStyle = label < 0 ? colour("dim") : styleOf(label).ink;
  context.font = `600 ${text.length > 2 ? 9.5 : 11.5}px system-ui, sans-serif`;
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.fillText(text, GUTTER - 22, y + LANE / 2 + 0.5);
  context.textAlign = "left";
}

function drawWait(context, left, middle, wide, name) {
  context.strokeStyle = colour(name);
  context.lineWidth = 2;
  context.setLineDash([3, 3]);
  context.beginPath();
  context.moveTo(left, middle);
  context.lineTo(left + wide, middle);
  context.stroke();
  context.setLineDash([]);
}

function drawPrefill(context, left, top, wide, span) {
  context.fillStyle = colour("prefill");
  context.fillRect(left, top, Math.max(1, wide - 1), LANE - 8);
  if (wide < 22) return;
  context.fillStyle = colour("on-prefill");
  context.font = "600 10px system-ui, sans-serif";
  context.textBaseline = "middle";
  context.fillText(count(span.tokens), left + 4, top + (LANE - 8) / 2 + 0.5);
}

// One tick per step, where there is room. Rejected drafts are hatched above the accepted ones.
function drawDecode(context, spans, span, top, { x, start, now, index }) {
  const tall = LANE - 10;
  context.fillStyle = colour("decode");
  for (let place = span.first; place <= span.last; place += 1) {
    if (!spans.steps[place] || spans.steps[place].landed < start) continue;
    const step = stepUpTo(spans.steps[place], index);
    if (step.start > now) break;
    const left = Math.max(GUTTER, x(step.start));
    const to = x(Math.min(step.landed, now));
    if (to <= GUTTER) continue;
    const wide = to - left;
    const gap = wide > 3 ? 1 : 0;
    if (x(step.landed) - x(step.start) < 1) {
      // Many steps in a pixel: draw the rest of the span at once.
      const restWidth = x(Math.min(span.end, now)) - left;
      context.fillRect(left, top, Math.max(1, restWidth), tall);
      return;
    }
    const drafts = span.drafts[place - span.first];
    const share = drafts ? (1 + drafts.accepted) / (1 + drafts.drafted) : 1;
    context.fillRect(left, top + tall * (1 - share), wide - gap, tall * share);
    if (share < 1) {
      context.fillStyle = colour("rejected");
      context.fillRect(left, top, wide - gap, tall * (1 - share));
      context.fillStyle = colour("decode");
    }
  }
}

function drawMark(context, mark, at, y) {
  if (mark.kind === "preempted") {
    context.fillStyle = colour("alarm");
    context.beginPath();
    context.moveTo(at - 5, y + 2);
    context.lineTo(at + 5, y + 2);
    context.lineTo(at, y + 10);
    context.fill();
  } else if (mark.cached) {
    context.fillStyle = colour(mark.loads.length ? "tier" : "cached");
    context.fillRect(at - 5, y + 4, 5, LANE - 8);
  }
}

function drawEnd(context, lane, at, middle) {
  const failed = lane.reason === "error" || lane.reason === "lost" || lane.reason === "abort";
  context.strokeStyle = colour(failed ? "alarm" : "ink");
  context.lineWidth = 1.6;
  context.beginPath();
  if (failed) {
    context.moveTo(at, middle - 4);
    context.lineTo(at + 8, middle + 4);
    context.moveTo(at + 8, middle - 4);
    context.lineTo(at, middle + 4);
  } else context.arc(at + 4, middle, 3, 0, 7);
  context.stroke();
}

function drawEdges(context, { x, now, end, pixels, height, limit, hidden }) {
  if (limit === Infinity && now < end) {
    context.fillStyle = colour("veil");
    context.fillRect(x(now), AXIS, pixels - x(now), height);
  }
  context.fillStyle = colour("accent");
  if (now <= end) context.fillRect(Math.min(pixels - 1.5, x(now)), AXIS - 4, 1.5, height);
  if (!hidden) return;
  context.fillStyle = colour("dim");
  context.font = "10px system-ui, sans-serif";
  context.textAlign = "right";
  context.textBaseline = "alphabetic";
  context.fillText(`${hidden} more: scroll`, pixels - 6, height - 4);
  context.textAlign = "left";
}

// ---- one timeline -------------------------------------------------------------------------------

export class Timeline {
  // `listeners`: select(sequence id), selectStep(step), hover(sequence id), redraw().
  constructor(canvas, listeners) {
    this.canvas = canvas;
    this.listeners = {
      select: () => {},
      selectStep: () => {},
      hover: () => {},
      redraw: () => {},
      ...listeners,
    };
    this.width = 4e6; // Microseconds that are shown.
    this.isChosen = false; // The user has chosen the width.
    this.right = null; // The time at the right edge; null: the chosen moment.
    this.scroll = 0; // Lanes that are scrolled out at the top.
    this.shown = null;
    this.#listen();
  }

  // `now` and `index` are the cursor. Without an index, there is no cursor: the timeline shows all.
  draw(spans, { now, index }, marks) {
    const { context, width: pixels, height } = prepare(this.canvas);
    if (!pixels) return;
    if (!this.isChosen) this.width = chooseWidth(spans, index, this.width);
    const end = this.right ?? now;
    const start = end - this.width;
    const scale = (pixels - GUTTER) / this.width;
    const x = (time) => GUTTER + (time - start) * scale;
    const limit = index === Infinity ? Infinity : now;
    const steps = stepsBetween(spans.steps, start, Math.min(end, limit), index);
    const lanes = spans.allLanes.filter(
      (lane) => lane.at <= index && lane.arrival <= Math.min(end, limit) && lane.end >= start,
    );
    const isFull = TOP + lanes.length * LANE > height;
    const room = Math.max(1, Math.floor((height - TOP - (isFull ? MORE : 0)) / LANE));
    this.scroll = Math.max(0, Math.min(this.scroll, lanes.length - room));
    // Of many lanes, those that are live come first. A timeline without a cursor keeps the order of
    // arrival, in which another one is compared with it.
    const order =
      lanes.length > room && index !== Infinity
        ? [
            ...lanes.filter((lane) => !hasEnded(lane, index, now)),
            ...lanes.filter((lane) => hasEnded(lane, index, now)),
          ]
        : lanes;
    const visible = order
      .slice(this.scroll, this.scroll + room)
      .map((lane) => laneUpTo(lane, index, spans));
    const hidden = lanes.length - visible.length;
    this.shown = { steps, visible, start, scale, now };
    drawAxis(context, start, end, x, pixels, height);
    drawSteps(context, steps, x, pixels);
    visible.forEach((lane, i) =>
      drawLane(context, spans, lane, TOP + i * LANE, {
        x,
        start,
        end,
        now: Math.min(end, limit),
        index,
        marks,
        pixels,
      }),
    );
    drawEdges(context, { x, now, end, pixels, height, limit, hidden });
    this.#describeLast(steps.at(-1));
  }

  // Updates the label for screen readers.
  #describeLast(step) {
    const words = step ? `: ${describeStep(step).slice(0, 2).join("; ")}` : "";
    const label = `Steps over time${words}`;
    if (this.canvas.ariaLabel !== label) this.canvas.ariaLabel = label;
  }

  zoomBy(factor) {
    this.isChosen = true;
    this.width = Math.max(2000, Math.min(3600e6, this.width * factor));
    this.listeners.redraw();
  }

  // Shows these microseconds up to the chosen moment.
  showAll(width) {
    this.isChosen = true;
    this.width = width;
  }

  followNow() {
    this.right = null;
  }

  #pan(time) {
    if (!this.shown) return;
    this.right = Math.max(this.width * 0.1, (this.right ?? this.shown.now) + time);
    if (this.right >= this.shown.now && time > 0) this.right = null;
  }

  #laneAt(y) {
    return this.shown?.visible[Math.floor((y - TOP) / LANE)];
  }

  #timeAt(x) {
    return this.shown.start + (x - GUTTER) / this.shown.scale;
  }

  #stepAt(time) {
    return this.shown.steps.find((step) => time >= step.start && time <= step.landed);
  }

  #describe(x, y) {
    const lane = this.#laneAt(y);
    if (!this.shown || x < GUTTER) return lane?.request ?? "";
    const time = this.#timeAt(x);
    const step = this.#stepAt(time);
    if (!lane) return step ? describeStep(step).join("\n") : "";
    const span = lane.spans.findLast((each) => each.start <= time);
    if (!span || time > Math.min(this.shown.now, lane.end)) return "";
    const name = nameOf(lane);
    const lasted = formatDuration(Math.min(span.end, lane.end, this.shown.now) - span.start);
    if (lane.end <= time) return `${name}: ${FINISH_REASONS[lane.reason] ?? lane.reason}`;
    if (span.kind === "prefill")
      return `${name}: prefill of tokens ${count(span.from + 1)}–${count(span.from + span.tokens)} in ${nameOfStep(span.step, lane.engine)}, ${lasted}`;
    if (span.kind === "decode")
      return [`${name}: decode`, ...(step ? describeStep(step) : [])].join("\n");
    const admission = lane.marks.find((mark) => mark.kind === "admitted" && mark.time >= span.end);
    const cost =
      admission && span.kind !== "waiting"
        ? `\n${wordsOfReturn({ ...admission, loads: admission.loads.length, positions: span.positions })}`
        : "";
    return `${name}: ${span.kind} for ${lasted}\n${span.reasons?.at(-1)?.reason ?? ""}${cost}`;
  }

  #listen() {
    const { canvas, listeners } = this;
    explain(canvas, (x, y) => this.#describe(x, y));
    canvas.addEventListener("pointermove", (event) =>
      listeners.hover(this.#laneAt(event.offsetY)?.id ?? 0),
    );
    canvas.addEventListener("pointerleave", () => listeners.hover(0));
    canvas.addEventListener("click", (event) => {
      if (!this.shown) return;
      const lane = this.#laneAt(event.offsetY);
      const step = event.offsetX > GUTTER ? this.#stepAt(this.#timeAt(event.offsetX)) : null;
      if (lane) listeners.select(lane.id);
      else if (step && event.offsetY < TOP - 4) listeners.selectStep(step);
    });
    canvas.addEventListener(
      "wheel",
      (event) => {
        event.preventDefault();
        if (event.ctrlKey || event.metaKey) this.zoomBy(event.deltaY > 0 ? 1.25 : 0.8);
        else if (Math.abs(event.deltaX) > Math.abs(event.deltaY))
          this.#pan((event.deltaX / canvas.clientWidth) * this.width);
        else this.scroll += Math.sign(event.deltaY);
        listeners.redraw();
      },
      { passive: false },
    );
    canvas.addEventListener("keydown", (event) => {
      const actions = {
        "+": () => this.zoomBy(0.6),
        "=": () => this.zoomBy(0.6),
        "-": () => this.zoomBy(1.7),
        ArrowUp: () => (this.scroll -= 1),
        ArrowDown: () => (this.scroll += 1),
      };
      if (!actions[event.key]) return;
      event.preventDefault();
      event.stopPropagation();
      actions[event.key]();
      listeners.redraw();
    });
  }
}

export function describeStep(step) {
  const lines = [`${nameOfStep(step.number, step.engine)}: ${formatDuration(step.landed - step.start)}`];
  const parts = [
    step.decode && `${plural(step.decode, "sequence")} decode`,
    step.prefill && `${plural(step.prefill, "prefill token")}`,
  ].filter(Boolean);
  lines.push(`${parts.join(", ") || "moves blocks only"}; budget ${count(step.budget)}`);
  if (step.drafted)
    lines.push(`${count(step.accepted)} of ${plural(step.drafted, "draft")} accepted`);
  if (step.times) {
    const { started, planned, launched, wait_began, landed, done } = step.times;
    const launch = launched - planned - (step.isOnHost ? step.device : 0);
    lines.push(
      `host: plan ${formatDuration(planned - started)}, launch ${formatDuration(Math.max(launch, 0))}, wait ${formatDuration(landed - wait_began)}, commit ${formatDuration(done - landed)}`,
    );
  }
  if (step.device) lines.push(`device: ${formatDuration(step.device)}`);
  if (step.urgent) lines.push("other sequences pause for an urgent prompt");
  return lines;
}
