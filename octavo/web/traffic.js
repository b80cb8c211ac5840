// Traffic for demonstrations: buttons that send ordinary requests, a steady stream of them, and, on
// a server with --live-controls, settings of the running engine.

import { byId, element, setText } from "./draw.js";
import { address, authorization } from "./feed.js";

// A browser opens at most six connections to a server, so many prompts are sent as a list in one
// request. The engine sees one request for each of them.
const MAX_OPEN = 5;
const SHARED =
  "You are the librarian of an old harbour town. You know every book about the sea: logbooks of whalers, tables of tides, letters of keepers of lighthouses, and the first printed maps. You answer in short sentences, you name the shelf where a book stands, and you never invent a title. When a question is not about books, you say so politely and suggest one that might help. ";
const QUESTIONS = [
  "Which book describes a storm?",
  "Where are the maps of the northern coast?",
  "Who kept the lighthouse in 1850?",
  "How does a tide table work?",
  "Tell me about octavo volumes.",
  "What did whalers write about?",
];
const STORIES = [
  "Write a short story about a paper boat.",
  "Describe how bread is baked.",
  "Explain why the sky is blue.",
  "List what a printer needs.",
  "Tell me about a voyage around the cape.",
  "Describe a market in the rain.",
];
const pick = (list) => list[Math.floor(Math.random() * list.length)];
const between = (low, high) => low + Math.floor(Math.random() * (high - low + 1));

let open = 0;
let steady = 0;
let latest = null;
let beforeTraffic = () => {};

// The listener is called when a button sends traffic.
export function onTraffic(listener) {
  beforeTraffic = listener;
}

// Sends a request and reads its reply to the end. The views show it like any other.
async function send(fields) {
  open += 1;
  try {
    const body = JSON.stringify({ temperature: 0.8, ignore_eos: true, stream: true, ...fields });
    const reply = await fetch(address("v1/completions"), {
      method: "POST",
      headers: { "content-type": "application/json", ...authorization() },
      body,
    });
    await reply.text();
  } catch {
    // The engine was crashed, or the server has ended.
  }
  open -= 1;
}

const SCENARIOS = [
  [
    "burst",
    "twelve short prompts at once. If there are fewer batch slots, some of them wait.",
    () => send({ prompt: [...STORIES, ...STORIES], max_tokens: 40 }),
  ],
  [
    "shared prefix",
    "six prompts that begin with the same text. Their first blocks are shared.",
    () => send({ prompt: QUESTIONS.map((question) => SHARED + question), max_tokens: 80 }),
  ],
  [
    "long prompt",
    "one long prompt. It is computed in chunks while others decode.",
    () => send({ prompt: SHARED.repeat(6) + STORIES[0], max_tokens: 32 }),
  ],
  [
    "long replies",
    "six prompts with long replies. If the pool is small, its blocks run out, and some requests are preempted.",
    () => send({ prompt: STORIES, max_tokens: 300 }),
  ],
  [
    "urgent",
    "one prompt with priority −5. Under the policy “priority”, it goes first.",
    () => send({ prompt: SHARED + QUESTIONS[0], max_tokens: 32, priority: -5 }),
  ],
  [
    "three samples",
    "one prompt with n = 3. Three replies share the blocks of the prompt, and copy the last one before they write to it.",
    () => send({ prompt: SHARED.slice(0, 200), n: 3, max_tokens: 40 }),
  ],
];

const sent = element("p", "facts", "Each button sends ordinary requests to this server.");
byId("traffic").after(sent);

// Returns a button that sends the requests of a scenario.
export function trafficButton(name) {
  const [, words, act] = SCENARIOS.find((scenario) => scenario[0] === name);
  const button = element("button", "", name);
  button.type = "button";
  button.title = words;
  button.addEventListener("click", () => {
    beforeTraffic();
    if (open < MAX_OPEN) act();
    setText(
      sent,
      open <= MAX_OPEN
        ? `Sent: ${words}`
        : `Not sent: ${MAX_OPEN} requests of this page have no complete reply yet, and a browser keeps few connections open. Wait until one of them ends.`,
    );
  });
  return button;
}

for (const [name] of SCENARIOS) byId("traffic").append(trafficButton(name));

// ---- steady traffic -----------------------------------------------------------------------------

const toggle = element("button", "", "steady traffic");
toggle.type = "button";
toggle.title = "Send a request every second or two.";
toggle.addEventListener("click", () => setSteady(!steady));
byId("traffic").append(toggle);

function setSteady(on) {
  clearTimeout(steady);
  steady = 0;
  toggle.ariaPressed = String(on);
  if (!on) return;
  const next = () => {
    if (!document.hidden && open < 4) {
      send(
        Math.random() < 0.6
          ? { prompt: SHARED + pick(QUESTIONS), max_tokens: between(20, 90) }
          : { prompt: pick(STORIES), max_tokens: between(20, 140) },
      );
    }
    steady = setTimeout(next, between(500, 1900));
  };
  next();
}

// ---- controls -----------------------------------------------------------------------------------

// Returns what is wrong with the request, or "".
async function post(path, body) {
  try {
    const reply = await fetch(address(path), {
      method: "POST",
      headers: { "content-type": "application/json", ...authorization() },
      body: JSON.stringify(body),
    });
    const answer = await reply.json();
    return reply.ok ? "" : answer.error.message;
  } catch {
    return "The server cannot be reached.";
  }
}

const message = element("p", "facts");
const KNOBS = [
  [
    "policy",
    "policy",
    (settings) =>
      select(["fcfs", "priority", "shortest", "deadline", "fair", "prefix"], settings.policy),
  ],
  [
    "token_budget",
    "token budget",
    (settings, about) =>
      range(about.max_num_seqs, about.max_num_batched_tokens, settings.token_budget),
  ],
  [
    "chunk",
    "prompt tokens per step",
    (settings, about) => range(1, about.max_num_batched_tokens, settings.chunk),
  ],
  [
    "block_limit",
    "block limit",
    (settings, about) => range(1, about.num_blocks, settings.block_limit),
  ],
];

function select(values, chosen) {
  const control = element("select");
  for (const value of values)
    control.append(new Option(value, value, value === chosen, value === chosen));
  return control;
}

function range(low, high, value) {
  const control = element("input");
  Object.assign(control, { type: "range", min: low, max: high, step: 1, value });
  return control;
}

const knobs = new Map(); // name of a setting -> its input

function drawKnobs(settings, about) {
  const rows = KNOBS.map(([name, words, make]) => {
    const input = make(settings, about);
    const isRange = input.type === "range";
    const output = element("output", "", isRange ? input.value : "");
    if (isRange) input.addEventListener("input", () => setText(output, input.value));
    input.addEventListener("change", () => change(name, isRange ? Number(input.value) : input.value));
    knobs.set(name, input);
    return element("label", "", element("span", "", words), input, output);
  });
  byId("knobs").replaceChildren(...rows);
  byId("knobs-box").append(message);
}

// Shows the settings in the inputs that exist, so that the focus stays where it is.
function showSettings(settings) {
  for (const [name, input] of knobs) {
    input.value = settings[name];
    input.dispatchEvent(new Event("input"));
  }
}

const pendingChanges = new Map(); // name of a setting -> the value that the engine should get next
let isChanging = false;

// Sends one change at a time. Of the values that are chosen meanwhile, the last one is sent next.
async function change(name, value) {
  pendingChanges.set(name, value);
  if (isChanging) return;
  isChanging = true;
  let error = "";
  while (pendingChanges.size) {
    const [next, nextValue] = pendingChanges.entries().next().value;
    pendingChanges.delete(next);
    error = await post("live/settings", { [next]: nextValue });
  }
  isChanging = false;
  setText(message, error);
  if (error) showSettings(latest.settings);
}

let isControlled = false;
let drawnEngine = null; // the stream of the engine process whose settings the inputs belong to
let shown = ""; // the settings that the inputs show

// Whether the page belongs to a demonstration, whose engine may be changed and crashed.
export const isDemonstration = () => isControlled;

// Called with the state of the server. Steady traffic begins when a demonstration does.
export function showControls(server) {
  if (!server.controls || isControlled) return;
  isControlled = true;
  byId("knobs-box").hidden = false;
  byId("try").prepend(byId("traffic-box"), byId("knobs-box")); // They matter more than a prompt.
  const crash = element("button", "", "crash the engine");
  crash.type = "button";
  crash.title = "Kills the engine process. Its requests fail, and a new process starts.";
  crash.addEventListener("click", async () => {
    beforeTraffic();
    const error = await post("live/crash", {});
    setText(sent, error || "The engine process was killed. Its requests fail, and a new one starts.");
  });
  byId("traffic").append(crash);
  setSteady(true);
}

// Called with the latest state of the engine.
export function followSettings(state) {
  if (!isControlled || !state) return;
  latest = state;
  const { settings, about } = state;
  const key = JSON.stringify(settings);
  if (about.stream !== drawnEngine) drawKnobs(settings, about);
  else if (key === shown || isChanging || byId("knobs").contains(document.activeElement)) return;
  else showSettings(settings);
  drawnEngine = about.stream;
  shown = key;
}
