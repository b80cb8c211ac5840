// The row of metrics. Each metric has a number, a caption, and a line chart of the last minute.

import { colour, count, duration, element, few, prepare } from "/web/draw.js";

const MINUTE = 60;
const mean = ([n, s], [m, r]) => (m > n ? (r - s) / (m - n) : null);
const percent = (x) => (x === null ? null : [few(x * 100), "%"]);
const time = (x) => (x === null ? null : duration(x));
const plain = (x) => (x === null ? null : [few(x), ""]);

const drafted = (a, b) => a.heartbeat.drafted_tokens - b.heartbeat.drafted_tokens;
const accepted = (a, b) => a.heartbeat.accepted_tokens - b.heartbeat.accepted_tokens;

// value(now, then) compares two frames that are `window` seconds apart. A caption may be a function of the latest frame.
// A tile with isShown(frame) is hidden while that is false.
const TILES = [
  ["Tokens", "generated per second", 1, (a, b) => (a.heartbeat.generated_tokens - b.heartbeat.generated_tokens) / (a.time - b.time), (x) => x === null ? null : [few(x), "/s"]],
  ["Time to first token", "mean, last 10 s", 10, (a, b) => mean(b.numbers.ttft, a.numbers.ttft), time],
  ["Inter-token latency", "mean, last 2 s", 2, (a, b) => mean(b.numbers.itl, a.numbers.itl), time],
  ["Queue", "requests waiting", 0, (a) => a.numbers.queue, (x) => x === null ? null : [count(x), ""]],
  ["Prefix cache", "hit rate of prompt tokens", 10, (a, b) => ratio(a.heartbeat.cached_tokens - b.heartbeat.cached_tokens, a.heartbeat.queried_tokens - b.heartbeat.queried_tokens), percent],
  ["KV used", "of all KV blocks", 0, (a) => ratio(a.heartbeat.blocks_used, a.heartbeat.blocks_used + a.heartbeat.blocks_cached + a.heartbeat.blocks_free), percent],
  ["Step", "mean time, last 2 s", 2, (a, b) => ratio(total(a) - total(b), a.heartbeat.steps - b.heartbeat.steps), time],
  ["Drafts accepted", ({ heartbeat }) => `${count(heartbeat.accepted_tokens)} of ${count(heartbeat.drafted_tokens)}`, 10, (a, b) => ratio(accepted(a, b), drafted(a, b)), percent, ({ model }) => Boolean(model?.speculative)],
];
const ratio = (a, b) => (b > 0 ? a / b : null);
const total = (frame) => Object.values(frame.heartbeat.seconds).reduce((a, b) => a + b, 0);

const tiles = TILES.map(([title, caption, window, value, words, isShown]) => {
  const box = element("div", "tile"), output = element("output", "", "–"), line = element("canvas");
  const isFixed = typeof caption === "string";
  const text = element("p", "", isFixed ? caption : "");
  line.ariaHidden = "true";
  box.hidden = Boolean(isShown);
  box.append(element("h3", "", title), output, text, line);
  document.getElementById("tiles").append(box);
  return { box, output, text, caption: isFixed ? null : caption, line, window, value, words, isShown, points: [] };
});
let frames = []; // The frames of the last 12 s.
let starts = 0;

function spark(canvas, points, now) {
  const { context, width, height } = prepare(canvas);
  const known = points.filter(([, y]) => y !== null);
  if (known.length < 2) return;
  const top = Math.max(...known.map(([, y]) => y)) * 1.1 || 1;
  const at = ([t, y]) => [width * (1 - (now - t) / MINUTE), height - 1 - (height - 4) * (y / top)];
  context.beginPath();
  known.forEach((point, i) => (i ? context.lineTo(...at(point)) : context.moveTo(...at(point))));
  context.strokeStyle = colour("accent");
  context.lineWidth = 1.5;
  context.lineJoin = "round";
  context.stroke();
  context.lineTo(at(known.at(-1))[0], height);
  context.lineTo(at(known[0])[0], height);
  context.closePath();
  context.globalAlpha = 0.13;
  context.fillStyle = colour("accent");
  context.fill();
  context.globalAlpha = 1;
}

export function showMetrics(frame) {
  if (frame.server.starts !== starts || (frames.length && frame.heartbeat.steps < frames.at(-1).heartbeat.steps)) {
    starts = frame.server.starts; // The counters of a new engine process start at zero.
    frames = [];
  }
  frames.push(frame);
  frames = frames.filter((f) => frame.time - f.time < 12);
  for (const tile of tiles) {
    if (tile.isShown) tile.box.hidden = !tile.isShown(frame);
    if (tile.box.hidden) continue;
    if (tile.caption) tile.text.textContent = tile.caption(frame);
    const then = frames.find((f) => frame.time - f.time <= tile.window + 0.05) ?? frame;
    const value = then === frame && tile.window ? null : tile.value(frame, then);
    tile.points.push([frame.time, value]);
    while (tile.points[0][0] < frame.time - MINUTE) tile.points.shift();
    const words = tile.words(value);
    tile.output.textContent = words ? words[0] : "–";
    if (words && words[1]) tile.output.append(element("small", "", words[1]));
    spark(tile.line, tile.points, frame.time);
  }
}
