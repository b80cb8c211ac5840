// The events before the chosen moment, newest first, in the order of their numbers. A click goes to
// the moment after the event.

import { chip } from "./colours.js";
import { byId, changes, count, element, setChildren } from "./draw.js";
import { GROUPS, KINDS, describe, wordsOfStep } from "./words.js";

const LINES = 250;
const SEARCHED = 20000; // Events that are listed, and that are searched for them.
const list = byId("log");
const shownGroups = new Set(["requests", "server"]);
const isOther = changes();
let items = new Map(); // Index of a line -> { item, label, names }: what the list shows now.
let go = () => {};

export function onLog(listener) {
  go = listener;
}

for (const group of GROUPS) {
  const button = element("button", "", group);
  button.type = "button";
  button.ariaPressed = String(shownGroups.has(group));
  button.addEventListener("click", () => {
    if (!shownGroups.delete(group)) shownGroups.add(group);
    button.ariaPressed = String(shownGroups.has(group));
    go(null);
  });
  byId("filters").append(button);
}

const limits = byId("log-limits");

// `only` is the sequence to which the list is limited, or 0.
export function drawLog(history, index, names, only = 0) {
  if (byId("events").hidden || !history.end) return;
  if (!isOther(names, index, `${[...shownGroups]}`, only)) return;
  const chosen = only && names.at(only, index);
  limits.hidden = !chosen;
  if (chosen) limits.replaceChildren("Events of ", chip(chosen), " alone. “Esc” lists all events.");
  const found = [];
  const before = items;
  items = new Map();
  for (
    let at = index;
    at >= Math.max(history.first, index - SEARCHED) && found.length < LINES;
    at -= 1
  ) {
    const [group] = KINDS[history.line(at)[0]] ?? [];
    if (!shownGroups.has(group)) continue;
    const event = history.event(at);
    if (only && event.seq !== only) continue;
    const seq = names.at(event.seq, index);
    const known = before.get(at);
    const isKnown = known?.names === names && known.label === seq?.label;
    const item = isKnown ? known.item : line(event, at, seq, names, history);
    items.set(at, { item, label: seq?.label, names });
    found.push(item);
  }
  if (!found.length)
    found.push(element("li", "none", emptyWords(only, index - SEARCHED <= history.first)));
  setChildren(list, found);
}

function emptyWords(only, isSearchedWhole) {
  if (!shownGroups.size) return "No kind of event is chosen.";
  const where = isSearchedWhole ? "Up to this step" : `In the last ${count(SEARCHED)} events`;
  const whose = only ? " of the selected request" : "";
  return `${where}, there is no event${whose} of this kind: ${[...shownGroups].join(", ")}.`;
}

function line(event, index, seq, names, history) {
  const [group, word] = KINDS[event.kind];
  const item = element("li", `g-${group} k-${event.kind}`);
  const number = element("span", "number", event.number ? count(event.number) : "");
  const [words, which] = wordsOfStep(event.step, history.engineAt(index));
  const step = element("span", "step", words, element("span", "engine", which));
  const text = element("span", "text");
  if (seq) text.append(chip(seq), " ");
  text.append(describe(event, (id) => names.letters(id)));
  item.append(number, step, element("span", "kind", word), text);
  item.title = `event ${event.number}, ${(event.time / 1e6).toFixed(3)} s`;
  item.addEventListener("click", () => go(index));
  return item;
}
