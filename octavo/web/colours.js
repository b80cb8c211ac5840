// Names and styles of requests: letters, colours and patterns.
//
// Two of the twelve colours differ by at least 23 in CIEDE2000. Where simulated deuteranopia or
// protanopia brings two of them below 20, one is striped and the other is not
// (tests/web/test_colours.py). From the thirteenth live request on, the colours repeat with dots.

export const COLOURS = [
  "#2770eb",
  "#c07000",
  "#55e2dd",
  "#51329d",
  "#d8d43f",
  "#98534e",
  "#35bcff",
  "#114e53",
  "#f0c6ac",
  "#887e95",
  "#614000",
  "#859580",
];
export const STRIPED = [
  false,
  false,
  false,
  true,
  false,
  true,
  true,
  false,
  true,
  true,
  false,
  false,
];
const NAMES = 26 + 26 * 26; // Names repeat after that many requests.

// Returns A to Z, then AA to ZZ. `number` counts the requests from 1.
export function letters(number) {
  const index = (number - 1) % NAMES;
  const letter = (n) => String.fromCharCode(65 + n);
  return index < 26 ? letter(index) : letter(Math.floor(index / 26) - 1) + letter(index % 26);
}

export const nameOf = (seq) =>
  seq.name ? letters(seq.name) + (seq.index ? `.${seq.index}` : "") : "–";

// Returns the colour of a sequence and its pattern: plain, stripes, dots or crosses.
export const styleOf = (label) => STYLES[styleIndexOf(label)];
// Returns the index of the style of a sequence.
export const styleIndexOf = (label) => ((label % 24) + 24) % 24;

// Returns the colour of text on a background.
function textColourOn(colour) {
  const [r, g, b] = [1, 3, 5]
    .map((start) => parseInt(colour.slice(start, start + 2), 16) / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.2 ? "#10131a" : "#ffffff";
}

const STYLES = Array.from({ length: 24 }, (_, index) => {
  const colour = index % 12;
  const pattern =
    index < 12 ? (STRIPED[colour] ? "stripes" : "plain") : STRIPED[colour] ? "crosses" : "dots";
  return { colour: COLOURS[colour], pattern, ink: textColourOn(COLOURS[colour]) };
});
let patterns = []; // Index of a style -> its CanvasPattern.
let patternRatio = 0; // Device pixels per pixel for which the patterns were made.

// Returns the colour or pattern with which a canvas fills the blocks of a sequence. A sequence that
// has not started has no colour.
export function fillOf(context, label) {
  if (label < 0) return "transparent";
  const { colour, pattern, ink } = styleOf(label);
  if (pattern === "plain") return colour;
  const ratio = window.devicePixelRatio || 1;
  if (ratio !== patternRatio) [patterns, patternRatio] = [[], ratio];
  const index = styleIndexOf(label);
  patterns[index] ??= makePattern(context, colour, pattern, ink, ratio);
  return patterns[index];
}

function makePattern(context, colour, pattern, ink, ratio) {
  const size = 8;
  const tile = document.createElement("canvas");
  tile.width = tile.height = Math.round(size * ratio);
  const drawing = tile.getContext("2d");
  drawing.scale(tile.width / size, tile.height / size);
  drawing.fillStyle = colour;
  drawing.fillRect(0, 0, size, size);
  drawing.globalAlpha = 0.34;
  drawing.strokeStyle = drawing.fillStyle = ink;
  drawing.lineWidth = 1.6;
  drawing.beginPath();
  if (pattern === "dots") {
    for (const [x, y] of [
      [2, 2],
      [6, 6],
    ])
      drawing.fillRect(x - 1, y - 1, 2, 2);
  } else {
    for (const shift of [-size, 0, size]) {
      drawing.moveTo(shift - 1, size + 1);
      drawing.lineTo(shift + size + 1, -1);
      if (pattern === "crosses") {
        drawing.moveTo(shift - 1, -1);
        drawing.lineTo(shift + size + 1, size + 1);
      }
    }
  }
  drawing.stroke();
  const canvasPattern = context.createPattern(tile, "repeat");
  canvasPattern.setTransform(new DOMMatrix().scale(size / tile.width));
  return canvasPattern;
}

// Returns an element with the letters of a sequence on its colour and pattern.
export function chip(seq) {
  const { colour, pattern, ink } = styleOf(seq.label ?? 0);
  const element = document.createElement("span");
  element.className = `chip ${seq.label < 0 ? "none" : pattern}`;
  element.textContent = nameOf(seq);
  if (seq.label >= 0) {
    element.style.setProperty("--look", colour);
    element.style.setProperty("--look-ink", ink);
  }
  return element;
}
