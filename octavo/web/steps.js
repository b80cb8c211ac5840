// Draws the steps of the scheduler as bars, and lists the latest decisions as text.

import { colour, count, duration, element, explain, prepare, short } from "/web/draw.js";

const KEPT = 400;
const WIDTH = 6; // The width of a bar in pixels.
const MOVES = {
  loads: "loaded from host memory (prefix cache hit)",
  stores: "offloaded to host memory",
  copies: "copied on write",
  shifts: "shifted after an eviction from a bounded cache",
  saves: "written to disk",
  fetches: "requested from disk (prefix cache hit)",
};
const canvas = document.getElementById("steps");
const list = document.getElementById("decisions");
let steps = [];
let budget = 0;
let told = 0;
new ResizeObserver(() => redraw()).observe(document.getElementById("steps-box"));

// The feed sends arrays. This function names their elements.
export const named = ([step, decode, prefill, chunks, preempted, moves, urgent, more, seconds]) =>
  ({ step, decode, prefill, chunks, preempted, moves, urgent, more, seconds });

export const moved = (moves) => Object.entries(moves).map(([kind, n]) => `${count(n)} block${n > 1 ? "s" : ""} ${MOVES[kind]}`);

export function decision(step, names) {
  const parts = [];
  if (step.decode) parts.push(`decode ${count(step.decode)} sequence${step.decode > 1 ? "s" : ""}`);
  if (step.prefill) {
    const [id, start, num] = step.chunks[0], name = names.get(id);
    const others = step.chunks.length - 1 ? `, ${step.chunks.length - 1} more` : "";
    parts.push(`prefill ${count(step.prefill)} tokens${name ? ` (${short(...name)} from ${count(start)} to ${count(start + num)}${others})` : ""}`);
  }
  let text = parts.join(" + ") || "no tokens to compute";
  if (step.decode + step.prefill >= budget && budget) text += ": token budget used up";
  if (step.urgent) text += "; other sequences are paused for an urgent prompt";
  return text;
}

function describe(step, names) {
  const item = element("li"), [number, unit] = duration(step.seconds);
  item.append(element("b", "", `${count(step.step)} `), decision(step, names), step.seconds ? ` · ${number} ${unit}` : "");
  for (const [, request, why] of step.preempted) item.append(element("span", "alarm", ` · preempts ${short(request)}: ${why}`));
  for (const words of moved(step.moves)) item.append(element("span", "tier", ` · ${words}`));
  return item;
}

function redraw() {
  const { context, width, height } = prepare(canvas);
  const shown = steps.slice(-Math.floor(width / WIDTH));
  const top = Math.max(budget / 8, 8, ...shown.map((s) => s.decode + s.prefill));
  const scale = (n) => (height - 12) * Math.sqrt(n / top); // The square root keeps small steps visible beside large ones.
  context.fillStyle = colour("line");
  context.fillRect(0, height - 1, width, 1);
  if (shown.length) {
    context.fillRect(0, 11, width, 1);
    context.fillStyle = colour("dim");
    context.font = "10px system-ui, sans-serif";
    context.fillText(`${count(top)} tokens`, 0, 8);
  }
  shown.forEach((step, i) => {
    const x = width - (shown.length - i) * WIDTH, whole = scale(step.decode + step.prefill), part = step.decode ? scale(step.decode) : 0;
    context.fillStyle = colour("prefill");
    context.fillRect(x, height - 1 - whole, WIDTH - 1, whole);
    context.fillStyle = colour("decode");
    context.fillRect(x, height - 1 - part, WIDTH - 1, part);
    const marks = [[step.preempted.length, "alarm"], [Object.keys(step.moves).length, "tier"]].filter(([n]) => n);
    marks.forEach(([, name], k) => {
      context.fillStyle = colour(name);
      context.beginPath();
      context.arc(x + (WIDTH - 1) / 2, 4 + k * 6, 2.5, 0, 7);
      context.fill();
    });
  });
}

export function showSteps(fresh, model, names) {
  if (budget !== model.max_batched_tokens) {
    budget = model.max_batched_tokens;
    document.getElementById("steps-what").textContent =
      `One bar is one step. The token budget is ${count(budget)}: one token for each decoding sequence, the rest for prefill.`;
  }
  if (!fresh.length) return;
  if (steps.length && fresh[0].step < steps.at(-1).step) steps = []; // A new engine process numbers its steps from the start.
  steps = [...steps, ...fresh].slice(-KEPT);
  redraw();
  if (performance.now() - told > 400) {
    told = performance.now();
    const notable = steps.slice(0, -1).filter((s) => s.preempted.length || s.prefill || s.moves.loads);
    list.replaceChildren(...[steps.at(-1), ...notable.slice(-3).reverse()].map((step) => describe(step, names)));
    canvas.ariaLabel = `Step ${steps.at(-1).step}: ${decision(steps.at(-1), names)}`;
  }
}

explain(canvas, (event) => {
  const fromRight = Math.floor((canvas.getBoundingClientRect().right - event.clientX) / WIDTH);
  const step = steps.at(-1 - fromRight);
  if (!step) return "";
  const [number, unit] = duration(step.seconds);
  return [`step ${count(step.step)}${step.seconds ? `, ${number} ${unit}` : ""}`, decision(step, new Map()), ...moved(step.moves),
    ...step.preempted.map(([, request, why]) => `preempts ${short(request)}: ${why}`)].join("\n");
});
