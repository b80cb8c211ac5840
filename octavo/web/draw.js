// Functions for all panels: canvases in device pixels, the colours of the page, and short numbers.

let colours = {};

function readColours() {
  const style = getComputedStyle(document.documentElement);
  const names = ["ink", "dim", "line", "soft", "panel", "accent", "waiting", "prefill", "decode", "alarm", "tier", "free", "cached", "used",
    "shared", "owner-light", "owner-strong"];
  colours = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}
readColours();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", readColours);

export const colour = (name) => colours[name];

// Returns a hue for each sequence, as different as possible from the hues of earlier sequences.
export const ownerColour = (id) => `hsl(${Math.round((id * 137.508) % 360)} ${colours["owner-strong"]} ${colours["owner-light"]})`;

// Returns the context of a canvas, scaled and cleared, and its size in CSS pixels.
export function prepare(canvas) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, height = canvas.clientHeight;
  const pixels = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== pixels[0] || canvas.height !== pixels[1]) [canvas.width, canvas.height] = pixels;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

export const count = (n) => Math.round(n).toLocaleString("en");

export function few(n) {
  if (n >= 100000) return `${Math.round(n / 1000)}k`;
  if (n >= 100) return count(n);
  return n >= 10 ? n.toFixed(1) : n.toFixed(n >= 1 || n === 0 ? 1 : 2);
}

export function duration(seconds) {
  if (seconds >= 100) return [count(seconds), "s"];
  return seconds >= 1 ? [seconds.toFixed(2), "s"] : [few(seconds * 1000), "ms"];
}

// Shortens an id such as req_1f…-0 to about eight characters, which distinguish the requests on the page.
export const short = (request, index = 0) => {
  const [id, which] = request.replace(/^req_/, "").split("-");
  return `${id.slice(0, 6)}${which && which !== "0" ? `-${which}` : ""}${index ? `.${index}` : ""}`;
};

const element = (tag, name, text) => Object.assign(document.createElement(tag), { className: name || "", textContent: text ?? "" });
export { element };

const tip = document.getElementById("tip");

// Shows a tooltip beside the pointer while `words(event)` returns a text.
export function explain(target, words) {
  target.addEventListener("pointermove", (event) => {
    const text = words(event);
    tip.hidden = !text;
    if (!text) return;
    tip.textContent = text;
    tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
    tip.style.top = `${Math.min(event.clientY + 16, innerHeight - tip.offsetHeight - 8)}px`;
  });
  target.addEventListener("pointerleave", () => (tip.hidden = true));
}
