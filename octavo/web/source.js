// Where the events come from: the live feed of a server, a recording that `octavo replay` serves,
// or one inside this file.

import { byId, element, setText } from "./draw.js";
import { follow, parseLines } from "./feed.js";
import { openLesson } from "./lesson.js";
import { showControls } from "./traffic.js";

const CHUNK = 200_000; // Lines that are added at once.
const PHASES = {
  starting: "starting",
  importing: "importing",
  loading: "loading the model",
  compiling: "compiling CPU kernels, which takes about a minute",
  allocating: "allocating memory",
  warming: "warming up",
  down: "engine restarting",
};

export async function openSource(page, tools) {
  const isSingleFile = byId("recording-0") !== null;
  const { source } = document.body.dataset;
  if (isSingleFile) {
    for (const id of ["save", "tab-what-if"]) byId(id).hidden = true; // They need a server.
  }
  if (isSingleFile || source) {
    await openRecording(page, tools, await readRecording(0));
    const lesson = await readLesson();
    const openRun = async (index) => {
      page.reset();
      await openRecording(page, { ...tools, followLink: () => {} }, await readRecording(index));
    };
    if (lesson) openLesson(page, lesson, { openRun, openTab: tools.openTab });
    document.body.dataset.ready = "true";
    return;
  }
  let isLinkFollowed = false;
  follow({
    onState: (state) => {
      showServer(state);
      // The step that the address names may be among the last lines that the server has kept.
      if (isLinkFollowed || !state.has_kept_lines) return;
      isLinkFollowed = true;
      tools.followLink();
    },
    onLines: (lines) => page.addLines(lines),
    showStatus,
  });
}

// ---- recordings ---------------------------------------------------------------------------------

// Returns the text of a recording. A lesson has several, which are numbered.
async function readRecording(index) {
  const embedded = byId(`recording-${index}`);
  if (embedded) return unpack(embedded.textContent);
  showStatus("starting", "loading the recording");
  const reply = await fetch(`./recording-${index}`);
  if (!reply.ok) throw new Error(`the recording cannot be loaded: ${reply.status}`);
  return reply.text();
}

// Returns the text of the lesson, or null if there is none.
async function readLesson() {
  const embedded = byId("lesson-text");
  if (embedded) return JSON.parse(embedded.textContent);
  if (document.body.dataset.source !== "lesson") return null;
  return (await fetch("./lesson")).json();
}

// A recording inside this file is compressed with gzip and written in base64.
async function unpack(text) {
  const bytes = Uint8Array.from(atob(text.trim()), (character) => character.charCodeAt(0));
  return new Response(
    new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip")),
  ).text();
}

async function openRecording(page, { redraw, followLink }, text) {
  page.isReplay = true;
  page.follows = false;
  document.body.classList.add("replay");
  const lines = parseLines(text);
  for (let at = 0; at < lines.length; at += CHUNK) {
    page.history.add(lines.slice(at, at + CHUNK));
    if (at + CHUNK < lines.length) {
      showStatus("starting", `reading ${Math.round((100 * at) / lines.length)} %`);
      await new Promise((done) => setTimeout(done));
    }
  }
  page.moveTo(page.history.first);
  page.moveTo(page.history.endOfStep(Math.min(1, page.history.steps.length - 1)));
  showStatus("replay", "recording");
  byId("tab-try").hidden = true;
  followLink();
  redraw(true);
}

// ---- the server ---------------------------------------------------------------------------------

export function showStatus(state, words) {
  byId("status").dataset.state = state;
  setText(byId("status-text"), words);
  document.body.classList.toggle("stale", !["ready", "replay"].includes(state));
}

function showServer({ server, model }) {
  const { state, phase, progress } = server;
  const words =
    state === "ready"
      ? "ready"
      : state === "restarting" && phase !== "ready"
        ? `engine restarting: ${PHASES[phase] ?? phase}`
        : PHASES[phase] && state !== "ready"
          ? PHASES[phase]
          : state;
  showStatus(state, words);
  showControls(server);
  byId("tab-what-if").hidden = !server.controls;
  byId("progress").hidden = progress === undefined;
  if (progress !== undefined) byId("progress-bar").style.width = `${100 * progress}%`;
  if (!model) return;
  const facts = [
    model.architecture,
    `${model.weights || model.dtype} on ${model.device}`,
    model.speculative && `drafts: ${model.speculative.split(",")[0]}`,
    `Octavo ${server.version}`,
  ];
  byId("model").replaceChildren(
    element("b", "", server.name),
    ` · ${facts.filter(Boolean).join(" · ")}`,
  );
}
