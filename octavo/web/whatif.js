// What if: the requests of the engine process at the cursor, simulated under other settings
// (octavo/bench/what_if.py). The scheduler is the real one; the time of a step comes from a model
// that is fitted to the recorded steps. Simulated results are labelled as such.

import { byId, count, element, fewDigits, formatDuration, plural, setText } from "./draw.js";
import { address, authorization, parseLines } from "./feed.js";
import { History, renameRequests } from "./history.js";
import { Spans, percentile } from "./spans.js";
import { Timeline } from "./timeline.js";

const panel = byId("what-if");
const dialog = byId("simulated");
const POLICIES = ["fcfs", "priority", "shortest", "deadline", "fair", "prefix"];
const SAME = "the same settings";
const WORDS = {
  policy: "policy",
  token_budget: "token budget",
  max_num_seqs: "batch slots",
  num_blocks: "blocks",
};
let getPage = () => null;
let drawLast = null; // Draws the timelines of the last result.

export function bindWhatIf(page) {
  getPage = () => page;
  const fields = {
    policy: element("select"),
    token_budget: element("input"),
    max_num_seqs: element("input"),
    num_blocks: element("input"),
  };
  for (const policy of POLICIES) fields.policy.append(new Option(policy, policy));
  const rows = Object.entries(fields).map(([name, input]) => {
    if (name !== "policy") Object.assign(input, { type: "number", min: 1 });
    return element("label", "", element("span", "", WORDS[name]), input);
  });
  const button = element("button", "primary", "simulate");
  const reopenButton = element("button", "", "show the last result");
  const message = element("p", "facts");
  button.type = reopenButton.type = "button";
  reopenButton.hidden = true;
  reopenButton.addEventListener("click", open);
  button.addEventListener("click", async () => {
    await simulate(fields, button, message);
    reopenButton.hidden = !drawLast;
  });
  panel.replaceChildren(
    element(
      "p",
      "",
      "What would have happened under other settings? The real scheduler gets all requests of the engine process at the viewed step again, from the first one that the server has kept up to now. No model runs: the time of a step is predicted from the recorded steps.",
    ),
    element("div", "fields", ...rows),
    element("p", "buttons", button, reopenButton),
    message,
  );
  byId("tab-what-if").addEventListener("click", () => fill(fields));
}

function fill(fields) {
  const { state } = getPage();
  if (!state || fields.token_budget.value) return;
  fields.policy.value = state.settings.policy;
  fields.token_budget.value = state.settings.token_budget;
  fields.max_num_seqs.value = state.about.max_num_seqs;
  fields.num_blocks.value = state.settings.block_limit;
}

async function simulate(fields, button, message) {
  const { engine } = getPage().state.about;
  const changes = { engine, policy: fields.policy.value };
  for (const name of ["token_budget", "max_num_seqs", "num_blocks"])
    if (Number(fields[name].value)) changes[name] = Number(fields[name].value);
  button.disabled = true;
  setText(message, "simulating");
  try {
    const reply = await fetch(address("live/what-if"), {
      method: "POST",
      headers: { "content-type": "application/json", ...authorization() },
      body: JSON.stringify(changes),
    });
    const result = await reply.json();
    if (!reply.ok || result.message) throw new Error(result.message ?? result.error.message);
    setText(message, "");
    show(result, engine);
  } catch (error) {
    setText(message, error.message);
  }
  button.disabled = false;
}

// Reads the events of a recording or a simulation, and renames its requests. `before` has the counters
// at its start.
function readRun(text, offset) {
  const spans = new Spans();
  const history = new History((event, state, index) => spans.add(event, state, index));
  const lines = parseLines(text);
  renameRequests(lines, offset);
  history.add(lines);
  const before = history.keyframes[0].state.counters;
  return { spans, counters: history.end.counters, before };
}

function summary({ spans, counters, before }) {
  const times = (samples) => samples.values.slice(0, samples.length).sort();
  const [ttft, itl] = [times(spans.ttft), times(spans.itl)];
  const last = spans.steps.at(-1)?.landed ?? 0;
  const first = spans.allLanes[0]?.arrival ?? 0;
  const tokens = spans.steps.reduce((all, step) => all + step.sampled, 0);
  return [
    formatDuration(percentile(ttft, 50) ?? 0),
    formatDuration(percentile(ttft, 99) ?? 0),
    formatDuration(percentile(itl, 50) ?? 0),
    formatDuration(percentile(itl, 99) ?? 0),
    fewDigits(tokens / Math.max((last - first) / 1e6, 1e-9)),
    count(counters.preemptions - before.preemptions),
    count(counters.recomputed_tokens - before.recomputed_tokens),
    formatDuration(last - first),
  ];
}

// Returns the recorded run and the simulated runs of the same requests. `nameOffset` is added to the
// numbers from which the recorded requests are named.
export function readRuns(result, nameOffset) {
  const recorded = readRun(result.events, nameOffset);
  const offset = Math.min(...recorded.spans.allLanes.map((lane) => lane.name)) - 1;
  const [same, changed] = [result.recorded, result.changed].map((text) => readRun(text, offset));
  const nameOfLane = (lane) => `${lane.name}.${lane.index}`;
  const labels = new Map(recorded.spans.allLanes.map((lane) => [nameOfLane(lane), lane.label]));
  for (const lane of [...same.spans.allLanes, ...changed.spans.allLanes])
    lane.label = labels.get(nameOfLane(lane)) ?? lane.label;
  return { recorded, same, changed };
}

// Returns the rows of the table: a name and the values.
export function rowsOf({ recorded, same, changed }, words) {
  const rows = [
    ["recorded", recorded],
    [`simulated, ${SAME}`, same],
  ];
  if (words !== SAME) rows.push([`simulated, ${words}`, changed]);
  return rows.map(([name, run]) => [name, summary(run)]);
}

function show(result, engine) {
  const page = getPage();
  const runs = readRuns(result, page.history.namesBefore.get(engine) ?? 0);
  const { recorded, changed } = runs;
  const heads = [
    "",
    "TTFT p50",
    "TTFT p99",
    "ITL p50",
    "ITL p99",
    "tokens/s",
    "preemptions",
    "recomputed",
    "total",
  ];
  const rows = rowsOf(runs, describe(result));
  const requests = plural(recorded.spans.allLanes.length, "request");
  const which = page.state.engine > 1 ? `engine ${page.state.engine}` : "the engine process";
  const table = element(
    "table",
    "",
    element(
      "thead",
      "",
      element("tr", "", ...heads.map((head) => element("th", head ? "num" : "", head))),
    ),
    element(
      "tbody",
      "",
      ...rows.map(([name, values]) =>
        element(
          "tr",
          "",
          element("td", "", name),
          ...values.map((text) => element("td", "num", text)),
        ),
      ),
    ),
  );
  const isSame = describe(result) !== SAME && isSameRun(result);
  const canvases = [element("canvas"), element("canvas")];
  const error =
    result.error === null
      ? "There are few steps, so the times of the embedded model are used."
      : `On the recorded steps, the predicted total time is off by ${fewDigits(100 * Math.abs(result.error))} %.`;
  byId("simulated-content").replaceChildren(
    element("h2", "", "What if"),
    element("p", "what", `All runs have the same ${requests} of ${which}, as far as its events are kept. A simulated run begins with an empty cache.`),
    element("div", "wide", table),
    isSame
      ? element("p", "callout", `The same decisions: with ${describe(result)}, the scheduler plans every step of the simulated run as without the change.`)
      : "",
    element("p", "what", error),
    element("h3", "", "recorded"),
    element("div", "canvas", canvases[0]),
    element("h3", "simulated", `simulated: ${describe(result)}`),
    element("div", "canvas", canvases[1]),
  );
  byId("simulated-content").querySelector("h2").id = "simulated-title";
  drawLast = () => drawBoth(canvases, recorded.spans, changed.spans);
  open();
}

function open() {
  dialog.showModal();
  drawLast();
}

// Whether both simulated runs have the same events, apart from their settings, such as the budget of
// a plan.
export function isSameRun({ recorded, changed }) {
  const [one, other] = [recorded, changed].map((text) =>
    text
      .split("\n")
      .filter((line) => !/^\["(snapshot|settings)"/.test(line))
      .map((line) => line.replace(/^(\["planned",\d+,\d+,\d+),\d+/, "$1")),
  );
  return one.length === other.length && one.every((line, i) => line === other[i]);
}

const describe = ({ changes, settings }) => {
  const before = {
    ...settings,
    max_num_seqs: getPage().state.about.max_num_seqs,
    num_blocks: settings.block_limit,
  };
  const parts = Object.entries(changes)
    .filter(([name, value]) => before[name] !== value)
    .map(([name, value]) => `${WORDS[name]} ${value}`);
  return parts.join(", ") || SAME;
};

// Both timelines show the same interval, and the same request has the same letters and colours in both.
function drawBoth(canvases, recorded, simulated) {
  const lengths = [recorded, simulated].map(
    (spans) => (spans.steps.at(-1)?.landed ?? 0) - (spans.allLanes[0]?.arrival ?? 0),
  );
  const width = Math.max(...lengths) * 1.02;
  const timelines = canvases.map((canvas) => new Timeline(canvas, { redraw: () => draw() }));
  const marks = { selected: 0, hovered: 0 };
  const draw = () =>
    timelines.forEach((timeline, i) => {
      const spans = [recorded, simulated][i];
      const start = spans.allLanes[0]?.arrival ?? 0;
      timeline.draw(spans, { now: start + width, index: Infinity }, marks);
    });
  for (const timeline of timelines) timeline.showAll(width);
  draw();
}
