// Where the events come from: the live feed of a server, a recording that `octavo replay` serves, or one inside this file.

import { byId, element, setText } from "./draw.js";
import { follow, parseLines } from "./feed.js";
import { showControls } from "./traffic.js";

const CHUNK = 200_000; // Lines that are added at once.
const PHASES = { starting: "starting", importing: "importing", loading: "loading the model", allocating: "allocating memory", warming: "warming up", down: "engine restarting" };

export async function openSource(page, tools) {
  const embedded = byId("recording");
  if (embedded) {
    for (const id of ["save", "tab-what-if"]) byId(id).hidden = true; // They need a server.
    return openRecording(page, tools, await unpack(embedded.textContent));
  }
  if (document.body.dataset.recording) return openRecording(page, tools, await fetchRecording(document.body.dataset.recording));
  follow({
    onState: showServer,
    onLines: (lines) => {
      const isFirst = !page.history.end;
      page.addLines(lines);
      if (isFirst) tools.followLink();
    },
    say: (state, words) => say(state, words),
  });
}

// ---- recordings -----------------------------------------------------------------------------------------

async function fetchRecording(path) {
  say("starting", "loading the recording");
  const reply = await fetch(path);
  if (!reply.ok) throw new Error(`the recording cannot be loaded: ${reply.status}`);
  return reply.text();
}

// A recording inside this file is compressed with gzip and written in base64.
async function unpack(text) {
  const bytes = Uint8Array.from(atob(text.trim()), (character) => character.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

async function openRecording(page, { redraw, followLink }, text) {
  page.isReplay = true;
  page.follows = false;
  document.body.classList.add("replay");
  const lines = parseLines(text);
  for (let at = 0; at < lines.length; at += CHUNK) {
    page.history.add(lines.slice(at, at + CHUNK));
    if (at + CHUNK < lines.length) {
      say("starting", `reading ${Math.round((100 * at) / lines.length)} %`);
      await new Promise((done) => setTimeout(done));
    }
  }
  page.moveTo(page.history.first);
  page.moveTo(page.history.endOfStep(Math.min(1, page.history.steps.length - 1)));
  say("replay", "recording");
  byId("tab-try").hidden = true;
  followLink();
  redraw(true);
  document.body.dataset.ready = "true";
}

// ---- the server -----------------------------------------------------------------------------------------

export function say(state, words) {
  byId("status").dataset.state = state;
  setText(byId("status-text"), words);
  document.body.classList.toggle("stale", !["ready", "replay"].includes(state));
}

function showServer({ server, model }) {
  const { state, phase, progress } = server;
  const words = state === "ready" ? "ready" : state === "restarting" && phase !== "ready" ? `engine restarting: ${PHASES[phase] ?? phase}` : PHASES[phase] && state !== "ready" ? PHASES[phase] : state;
  say(state, words);
  showControls(server);
  byId("tab-what-if").hidden = !server.controls;
  byId("progress").hidden = progress === undefined;
  if (progress !== undefined) byId("progress-bar").style.width = `${100 * progress}%`;
  if (!model) return;
  const facts = [model.architecture, `${model.dtype} on ${model.device}`, model.speculative && `speculative ${model.speculative}`, `Octavo ${server.version}`];
  byId("model").replaceChildren(element("b", "", server.name), ` · ${facts.filter(Boolean).join(" · ")}`);
}
