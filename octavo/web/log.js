// The events before the chosen moment, newest first, in the order of their numbers. A click goes to
// the moment after the event.

import { chip } from "./colours.js";
import { byId, changeDetector, count, element, setChildren } from "./draw.js";
import { GROUPS, KINDS, describe, wordsOfStep } from "./words.js";

const MAX_ITEMS = 250;
const MAX_SEARCHED = 20000; // The latest events, among which those to list are searched.
const list = byId("log");
const shownGroups = new Set(["requests", "server"]);
const isOther = changeDetector();
let items = new Map(); // Index of a line -> { item, label, names }: what the list shows now.
let goTo = () => {};

export function onLog(listener) {
  goTo = listener;
}

for (const group of GROUPS) {
  const button = element("button", "", group);
  button.type = "button";
  button.ariaPressed = String(shownGroups.has(group));
  button.addEventListener("click", () => {
    if (!shownGroups.delete(group)) shownGroups.add(group);
    button.ariaPressed = String(shownGroups.has(group));
    goTo(null);
  });
  byId("filters").append(button);
}

const limits = byId("log-limits");

// `onlyId` is the sequence to which the list is limited, or 0.
export function drawLog(history, index, names, onlyId = 0) {
  if (byId("events").hidden || !history.end) return;
  if (!isOther(names, index, `${[...shownGroups]}`, onlyId)) return;
  const chosen = onlyId && names.at(onlyId, index);
  limits.hidden = !chosen;
  if (chosen) limits.replaceChildren("Events of ", chip(chosen), " alone. “Esc” lists all events.");
  const listItems = [];
  const oldItems = items;
  items = new Map();
  for (
    let at = index;
    at >= Math.max(history.first, index - MAX_SEARCHED) && listItems.length < MAX_ITEMS;
    at -= 1
  ) {
    const [group] = KINDS[history.line(at)[0]] ?? [];
    if (!shownGroups.has(group)) continue;
    const event = history.event(at);
    if (onlyId && event.seq !== onlyId) continue;
    const seq = names.at(event.seq, index);
    const oldItem = oldItems.get(at);
    const isUnchanged = oldItem?.names === names && oldItem.label === seq?.label;
    const item = isUnchanged ? oldItem.item : line(event, at, seq, names, history);
    items.set(at, { item, label: seq?.label, names });
    listItems.push(item);
  }
  if (!listItems.length)
    listItems.push(element("li", "none", emptyWords(onlyId, index - MAX_SEARCHED <= history.first)));
  setChildren(list, listItems);
}

function emptyWords(onlyId, isSearchedWhole) {
  if (!shownGroups.size) return "No kind of event is chosen.";
  const where = isSearchedWhole ? "Up to this step" : `In the last ${count(MAX_SEARCHED)} events`;
  const whose = onlyId ? " of the selected request" : "";
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
  item.addEventListener("click", () => goTo(index));
  return item;
}
