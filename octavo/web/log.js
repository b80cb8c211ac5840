// The event log, newest first. While it is paused, the button counts new events.

import { element } from "/web/draw.js";

const LINES = 300;
const list = document.getElementById("log");
const button = document.getElementById("pause");
let held = null; // Lines that have arrived since the log was paused, or null.

button.addEventListener("click", () => {
  if (held) {
    const lines = held;
    held = null;
    add(lines);
  } else held = [];
  button.ariaPressed = String(Boolean(held));
  label();
});

const label = () => (button.textContent = held ? (held.length ? `resume (${held.length} new)` : "resume") : "pause");

function add(lines) {
  const fragment = document.createDocumentFragment();
  for (const line of lines.slice(-LINES).reverse()) fragment.append(line);
  list.prepend(fragment);
  while (list.children.length > LINES) list.lastChild.remove();
}

// Adds events to the log. Each event is [kind, words], and the oldest comes first.
export function tell(events) {
  const time = new Date().toLocaleTimeString("en-GB");
  const lines = events.map(([kind, words]) => {
    const item = element("li");
    item.append(element("time", "", time), element("span", `kind k-${kind}`, kind), element("span", "text", words));
    return item;
  });
  if (!held) return add(lines);
  held = [...held, ...lines].slice(-LINES);
  label();
}
