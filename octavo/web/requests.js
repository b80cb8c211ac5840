// The table of requests. Finished and failed requests stay in the table for a while.

import { count, element, ownerColour, short } from "/web/draw.js";

const KEPT_SECONDS = 12, KEPT = 30;
const body = document.getElementById("rows");
const rows = new Map(); // request and index -> row of the table
const named = ([id, request, index, state, prompt, generated, limit, computed, cached, blocks, preemptions, reason]) =>
  ({ id, request, index, state, prompt, generated, limit, computed, cached, blocks, preemptions, reason });
const FINISH_REASONS = {
  stop: "stop: end of text or stop string", length: "length: max_tokens reached", abort: "aborted by the client",
  error: "error: the step failed", lost: "error: the engine process ended",
  pruned: "beam search continued with better beams", search_over: "beam search finished",
};
let done = 0;

const set = (node, text) => node.textContent !== text && (node.textContent = text);

function newRow(key) {
  const tr = element("tr"), cells = Array.from({ length: 7 }, () => element("td"));
  const swatch = element("i"), name = element("span"), meter = element("div", "meter"), why = element("span", "why");
  const bars = ["", "p", "c"].map((kind) => element("i", kind));
  cells[1].className = "id";
  cells[1].append(swatch, name);
  meter.append(...bars);
  cells[2].append(meter, why);
  for (const cell of cells.slice(3)) cell.className = "num";
  tr.append(...cells);
  const row = { key, tr, cells, swatch, name, meter, bars, why, over: 0 };
  rows.set(key, row);
  return row;
}

function fill(row, s, mine) {
  row.last = s;
  row.over = 0;
  row.cells[0].className = `state ${s.state}`;
  set(row.cells[0], s.state);
  set(row.name, short(s.request, s.index));
  row.name.title = s.request;
  row.swatch.style.background = s.id && s.state !== "waiting" ? ownerColour(s.id) : "transparent";
  row.tr.className = mine ? "mine" : "";
  const waiting = s.state === "waiting";
  row.meter.hidden = waiting;
  row.why.hidden = !waiting;
  set(row.why, s.reason);
  row.why.title = s.reason;
  if (!waiting) {
    const part = (n) => `${Math.min(100, (100 * n) / s.limit).toFixed(1)}%`;
    [s.computed, Math.min(s.computed, s.prompt), Math.min(s.cached, s.computed)].forEach((n, i) => (row.bars[i].style.width = part(n)));
    row.meter.title = `${count(s.computed)} of at most ${count(s.limit)} positions`;
  }
  [s.prompt, s.cached, s.generated, s.blocks].forEach((n, i) => set(row.cells[3 + i], waiting && i ? "" : count(n)));
  row.most = s.limit - s.prompt;
  if (s.preemptions) row.cells[0].append(element("span", "", ` ↩${s.preemptions > 1 ? s.preemptions : ""}`));
}

function finish(row, reason, now) {
  if (row.over) return;
  row.over = now;
  row.tr.className = row.tr.className.includes("mine") ? "mine over" : "over";
  const failed = reason === "error" || reason === "lost";
  row.cells[0].className = failed ? "state failed" : "state done";
  set(row.cells[0], failed ? "failed" : reason === "abort" ? "aborted" : "done");
  row.why.hidden = false;
  row.meter.hidden = true;
  set(row.why, FINISH_REASONS[reason] ?? "finished");
  if (reason === "length") set(row.cells[5], count(row.most)); // The last view is a few steps old.
  set(row.cells[6], "0");
}

// Updates the table. Returns the sequences as objects.
export function showRequests(view, now, isMine, lost = false) {
  const sequences = view.sequences.map(named).sort((a, b) => isMine(b.request) - isMine(a.request)), here = new Set();
  const ends = new Map(view.ended.map(([request, index, reason]) => [`${request}.${index}`, reason]));
  for (const s of sequences) {
    const key = `${s.request}.${s.index}`;
    here.add(key);
    const known = rows.get(key);
    fill(known ?? newRow(key), s, isMine(s.request));
  }
  done += view.ended.length + view.ended_missed;
  const cut = view.decoding + view.prefilling + view.waiting > sequences.length; // The view is truncated, so a missing sequence may still be running.
  for (const [key, row] of rows) {
    if (here.has(key)) continue;
    if (row.over ? now - row.over > KEPT_SECONDS : cut && !ends.has(key)) {
      row.tr.remove();
      rows.delete(key);
    } else finish(row, lost ? "lost" : ends.get(key), now);
  }
  const over = [...rows.values()].filter((row) => row.over).sort((a, b) => b.over - a.over);
  for (const row of over.slice(KEPT)) {
    row.tr.remove();
    rows.delete(row.key);
  }
  const order = [...sequences.map((s) => rows.get(`${s.request}.${s.index}`)), ...over.slice(0, KEPT)];
  order.forEach((row, i) => body.children[i] !== row.tr && body.insertBefore(row.tr, body.children[i] ?? null));
  showCounts(view);
  document.getElementById("no-requests").hidden = order.length > 0;
  return sequences;
}

const counts = Object.fromEntries(["decode", "prefill", "waiting", "done"].map((state) => {
  const item = element("li", state), number = element("b", "", "0");
  item.append(number, ` ${state}`);
  document.getElementById("counts").append(item);
  return [state, number];
}));

function showCounts(view) {
  const numbers = { decode: view.decoding, prefill: view.prefilling, waiting: view.waiting, done };
  for (const [state, number] of Object.entries(counts)) set(number, count(numbers[state]));
  const all = view.decoding + view.prefilling + view.waiting;
  for (const state of ["decode", "prefill", "waiting"])
    document.querySelector(`#states .${state}`).style.width = all ? `${(100 * numbers[state]) / all}%` : "0";
}
