// The row of metrics. All of them are derived from events before the chosen moment, so that they
// can be replayed.

import {
  byId,
  changeDetector,
  colour,
  count,
  duration,
  element,
  fewDigits,
  onTheme,
  plural,
  prepare,
  setText,
  surfaceOf,
} from "./draw.js";
import { findLast, lastLanded, percentile, stepUpTo } from "./spans.js";
import { countBlocks, countStates } from "./state.js";

const WINDOW = 30; // Seconds that percentiles look back.
const POINTS = 100; // Points of a small chart.

const time = (microseconds) => (microseconds === null ? null : duration(microseconds));
const share = (part, whole) => (whole > 0 ? [fewDigits((100 * part) / whole), "%"] : null);
const ratio = (part, whole) => (whole > 0 ? part / whole : 0);

// Each tile: its title, measure(page) -> { value: [number, unit] or null, words }, chart(totals,
// totals before them) -> a number, and for some isShown(state).
const TILES = [
  [
    "Tokens per second",
    ({ recent }) => {
      const tokens = recent.reduce((all, step) => all + step.sampled, 0);
      const seconds = span(recent);
      return { value: [fewDigits(seconds ? tokens / seconds : 0), "/s"], words: "generated, last 3 s" };
    },
    (now, then) =>
      ratio(1e6 * (now.generated_tokens - then.generated_tokens), now.time - then.time),
  ],
  [
    "Time to first token",
    (page) => percentiles(page.spans.ttft.before(page, WINDOW), "no token yet"),
    (now) => now.ttft,
  ],
  [
    "Inter-token latency",
    (page) => percentiles(page.spans.itl.before(page, WINDOW), "no second token yet"),
    (now) => now.itl,
  ],
  [
    "Requests",
    ({ state }) => {
      const { decode, prefill, waiting } = countStates(state);
      return {
        value: [count(decode + prefill), "running"],
        words: `${count(waiting)} waiting; ${count(state.about.max_num_seqs)} slots`,
      };
    },
    (now) => now.running,
  ],
  [
    "Prefix cache",
    ({ state }) => {
      const { cached_tokens, queried_tokens } = state.counters;
      return {
        value: share(cached_tokens, queried_tokens),
        words: `${count(cached_tokens)} of ${count(queried_tokens)} tokens`,
      };
    },
    (now) => ratio(now.cached_tokens, now.queried_tokens),
  ],
  [
    "KV blocks used",
    ({ blocks }) => ({
      value: share(blocks.used, blocks.total),
      words: `${count(blocks.used)} of ${count(blocks.total)}; ${count(blocks.cached)} can be evicted`,
    }),
    (now) => now.used,
  ],
  [
    "Step",
    ({ recent }) => {
      const total = recent.reduce((all, step) => all + step.landed - step.start, 0);
      const device = recent.reduce((all, step) => all + deviceTime(step), 0);
      return {
        value: recent.length ? time(total / recent.length) : null,
        words: recent.length
          ? `device busy ${fewDigits(100 * Math.min(1, ratio(device, total)))} %`
          : "no step",
      };
    },
    (now, then) => ratio(now.time - then.time, now.plans - then.plans),
  ],
  [
    "Preemptions",
    ({ state }) => ({
      value: [count(state.counters.preemptions), ""],
      words: `${plural(state.counters.recomputed_tokens, "token")} recomputed`,
    }),
    (now) => now.preemptions,
  ],
  [
    "Drafts accepted",
    ({ state }) => {
      const { drafted, accepted } = state.counters;
      return { value: share(accepted, drafted), words: `${count(accepted)} of ${count(drafted)}` };
    },
    (now) => ratio(now.accepted, now.drafted),
    (state) => state.about.speculative,
  ],
];

function percentiles(sorted, emptyWords) {
  const [p50, p99] = [50, 99].map((q) => percentile(sorted, q));
  return {
    value: time(p50),
    words: p99 === null ? emptyWords : `p50; p99 ${duration(p99).join(" ")}`,
  };
}

const deviceTime = (step) =>
  step.device || (step.times ? step.landed - Math.max(step.times.planned, step.start) : 0);
const span = (steps) => (steps.length ? (steps[0].landed - steps.at(-1).start) / 1e6 : 0);

// Returns the steps of the last seconds before the cursor, newest first.
function stepsBefore({ spans: { steps }, index, now }, seconds) {
  const recentSteps = [];
  for (let i = lastLanded(steps, index); i >= 0 && steps[i].landed > now - 1e6 * seconds; i -= 1)
    recentSteps.push(stepUpTo(steps[i], index));
  return recentSteps;
}

const tiles = TILES.map(([title, measure, chart, isShown]) => {
  const output = element("output", "", "–");
  const words = element("p");
  const line = element("canvas");
  const box = element("div", "tile", element("h3", "", title), output, words, line);
  line.ariaHidden = "true";
  box.hidden = Boolean(isShown);
  byId("tiles").append(box);
  return { box, output, words, line, measure, chart, isShown, points: [] };
});
const isOtherChart = changeDetector();
onTheme(() => tiles.forEach(drawChart));

export function drawMetrics({ state, spans, now, index }) {
  const blocks = countBlocks(state);
  const recent = stepsBefore({ spans, index, now }, 3);
  const last = findLast(spans.totals, (each) => each.at <= index);
  const totals = spans.totals.slice(Math.max(0, last - POINTS), last + 1);
  const isNew = isOtherChart(totals.length, totals[0], totals.at(-1));
  for (const tile of tiles) {
    if (tile.isShown) tile.box.hidden = !tile.isShown(state);
    if (tile.box.hidden) continue;
    const { value, words } = tile.measure({ state, spans, now, index, blocks, recent });
    setText(tile.words, words);
    const text = value ? value.join(" ") : "–";
    if (tile.output.dataset.text !== text) {
      tile.output.dataset.text = text;
      tile.output.replaceChildren(
        value ? value[0] : "–",
        element("small", "", value ? value[1] : ""),
      );
    }
    if (!isNew && !surfaceOf(tile.line).isEmpty) continue;
    tile.points = totals.slice(1).map((each, i) => tile.chart(each, totals[i]));
    drawChart(tile);
  }
  return blocks;
}

function drawChart({ line, points }) {
  const { context, width, height } = prepare(line);
  if (points.length < 2 || !width) return;
  const largest = Math.max(...points) * 1.1;
  const at = (value, i) => [
    width * (1 - (points.length - 1 - i) / (POINTS - 1)),
    height - 1 - (height - 3) * (largest ? value / largest : 0),
  ];
  context.beginPath();
  points.forEach((value, i) =>
    i ? context.lineTo(...at(value, i)) : context.moveTo(...at(value, i)),
  );
  context.strokeStyle = colour("accent");
  context.lineWidth = 1.3;
  context.lineJoin = "round";
  context.stroke();
  context.lineTo(width, height);
  context.lineTo(at(points[0], 0)[0], height);
  context.closePath();
  context.globalAlpha = 0.12;
  context.fillStyle = colour("accent");
  context.fill();
  context.globalAlpha = 1;
}
