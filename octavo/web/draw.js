// Functions for all views: elements, canvases in device pixels, the colours of the page, numbers
// and times in words.

export const byId = (id) => document.getElementById(id);

export function element(tag, className = "", ...content) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...content.filter((part) => part !== null && part !== undefined));
  return node;
}

export const setText = (node, text) => node.textContent !== text && (node.textContent = text);

const FOCUSABLE = "button, summary, [tabindex]";
const AHEAD = 4; // Children that are compared with the next node.

// Gives an element these children in this order. Children that it has already stay in the document.
export function setChildren(parent, nodes) {
  const targets = new Set(nodes);
  let next = parent.firstChild;
  const removeUntil = (end) => {
    while (next !== end) {
      const removed = next;
      next = next.nextSibling;
      removed.remove();
    }
  };
  for (const node of nodes) {
    let candidate = next;
    while (candidate && !targets.has(candidate)) candidate = candidate.nextSibling;
    removeUntil(candidate);
    for (let i = 0; i < AHEAD && candidate && candidate !== node; i += 1)
      candidate = candidate.nextSibling;
    if (candidate === node && node.parentNode === parent) {
      removeUntil(node); // A child before it has moved, and comes back later.
      next = node.nextSibling;
    } else parent.insertBefore(node, next);
  }
  removeUntil(null);
}

// Gives an element new children, but keeps those that look the same, and the focus.
export function updateChildren(parent, nodes) {
  const oldChildren = [...parent.children];
  const focused = document.activeElement;
  const focusIndex = [...parent.querySelectorAll(FOCUSABLE)].indexOf(focused);
  setChildren(
    parent,
    nodes.map((node, i) => (oldChildren[i]?.isEqualNode(node) ? oldChildren[i] : node)),
  );
  if (focusIndex < 0 || parent.contains(focused)) return;
  [...parent.querySelectorAll(FOCUSABLE)].slice(0, focusIndex + 1).at(-1)?.focus({ preventScroll: true });
}

// ---- colours and canvases -----------------------------------------------------------------------

let style = getComputedStyle(document.documentElement);
let colourCache = new Map();

// Returns a colour of page.css by its name.
export function colour(name) {
  if (!colourCache.has(name)) colourCache.set(name, style.getPropertyValue(`--${name}`).trim());
  return colourCache.get(name);
}

const themeListeners = [];
export const onTheme = (listener) => themeListeners.push(listener);
export function readColours() {
  style = getComputedStyle(document.documentElement);
  colourCache = new Map();
  for (const listener of themeListeners) listener();
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", readColours);

const reducedMotion = matchMedia("(prefers-reduced-motion: reduce)");
let isMotionReduced = reducedMotion.matches;
reducedMotion.addEventListener("change", () => (isMotionReduced = reducedMotion.matches));
// Whether the user wants as little motion as possible.
export const prefersReducedMotion = () => isMotionReduced;

// The sizes of canvases in CSS pixels. Asking a canvas for its size in every frame would make the
// browser lay out the page each time.
const sizes = new Map();
const sizeObserver = new ResizeObserver((entries) => {
  for (const { target } of entries) sizes.set(target, [target.clientWidth, target.clientHeight]);
});

function sizeOf(canvas) {
  if (!sizes.has(canvas)) {
    sizes.set(canvas, [canvas.clientWidth, canvas.clientHeight]);
    sizeObserver.observe(canvas);
  }
  return sizes.get(canvas);
}

// Returns the context of a canvas, scaled, and its size in CSS pixels. It keeps what was drawn,
// unless it got another size: then `isEmpty` is true.
export function surfaceOf(canvas) {
  const ratio = window.devicePixelRatio || 1;
  const [width, height] = sizeOf(canvas);
  const pixels = [Math.round(width * ratio), Math.round(height * ratio)];
  const isEmpty = canvas.width !== pixels[0] || canvas.height !== pixels[1];
  if (isEmpty) [canvas.width, canvas.height] = pixels;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return { context, width, height, isEmpty };
}

// Like surfaceOf, but clears the canvas.
export function prepare(canvas) {
  const surface = surfaceOf(canvas);
  surface.context.clearRect(0, 0, surface.width, surface.height);
  return surface;
}

// Returns a function that returns whether its arguments differ from those of its last call.
export function changeDetector() {
  let before = [];
  return (...values) => {
    const isSame =
      values.length === before.length && values.every((value, i) => Object.is(value, before[i]));
    before = values;
    return !isSame;
  };
}

// ---- numbers ------------------------------------------------------------------------------------

const numbers = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
export const count = (n) => numbers.format(n);
export const plural = (n, noun, nouns = `${noun}s`) => `${count(n)} ${n === 1 ? noun : nouns}`;
export const capitalised = (words) => `${words[0].toUpperCase()}${words.slice(1)}`;
export const percent = (part, whole) => (whole ? `${fewDigits((100 * part) / whole)} %` : "–");

export function fewDigits(n) {
  if (n >= 100000) return `${Math.round(n / 1000)}k`;
  if (n >= 100) return count(n);
  return n >= 10 ? n.toFixed(1) : n.toFixed(n >= 1 || n === 0 ? 1 : 2);
}

// Returns a number of microseconds as [number, unit].
export function duration(microseconds) {
  const seconds = microseconds / 1e6;
  if (seconds >= 100) return [count(seconds), "s"];
  if (seconds >= 1) return [seconds.toFixed(2), "s"];
  return microseconds >= 1000 ? [fewDigits(microseconds / 1000), "ms"] : [fewDigits(microseconds), "µs"];
}

export const formatDuration = (microseconds) => duration(microseconds).join(" ");

// Shortens an id such as req_1f…-0 to about eight characters.
export function shortId(request) {
  const [id, which] = request.replace(/^req_/, "").split("-");
  return `${id.slice(0, 6)}${which && which !== "0" ? `-${which}` : ""}`;
}

// ---- tips ---------------------------------------------------------------------------------------

const tip = byId("tip");
let shownTip = null; // The tip that is shown: { x, y, words }.

// Shows a tip at this place of the window while `words()` returns a text.
export function showTip(x, y, words) {
  shownTip = { x, y, words };
  const text = words();
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  tip.style.left = `${Math.max(8, Math.min(x + 14, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${y + 18 + tip.offsetHeight > innerHeight ? y - tip.offsetHeight - 10 : y + 18}px`;
}

export function hideTip() {
  tip.hidden = true;
  shownTip = null;
}

// Updates the text of the tip.
export function refreshTip() {
  if (!shownTip) return;
  const text = tip.hidden ? "" : tip.textContent;
  if (shownTip.words() !== text) showTip(shownTip.x, shownTip.y, shownTip.words);
}

// Shows a tip beside the pointer while `words(x, y)` returns a text. A tap shows it, too.
export function explain(target, words) {
  const show = (event) => {
    const box = target.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    showTip(event.clientX, event.clientY, () => words(x, y));
  };
  target.addEventListener("pointermove", show);
  target.addEventListener("pointerdown", show);
  target.addEventListener("pointerleave", (event) => event.pointerType !== "touch" && hideTip());
  target.addEventListener("blur", hideTip);
}
addEventListener("scroll", hideTip, true);
addEventListener("keydown", ({ key }) => key === "Escape" && hideTip(), true);
