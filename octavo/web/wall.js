// The KV wall: every block of the device, and of host memory beside it.
//
//   used      the colour, pattern and letters of the sequence that holds it
//   shared    the colours of all sequences that hold it, side by side
//   cached    no sequence holds it, but its content is known; the number is its place in the order of eviction
//   free      nothing to reuse
//
// By default the wall shows the blocks that were used so far, so that a large pool is not an empty
// wall.

import { fillOf, nameOf, styleIndexOf, styleOf } from "./colours.js";
import {
  byId,
  colour,
  count,
  element,
  explain,
  prefersReducedMotion,
  onTheme,
  plural,
  prepare,
  setText,
  showTip,
  surfaceOf,
} from "./draw.js";
import { countWithheld, findOwners, freeList } from "./state.js";

const LARGEST = 46;
const SMALLEST = 2; // Sizes of a cell in pixels.
const LARGEST_LETTERS = 13;
const LEAST_LETTERS = 7.5; // Smaller letters cannot be read.
const LABEL = 50; // The width of the names in the order by request.
const GAP = 14; // Between two tiers.
const TOP = 15; // The height of the names of the tiers.
const DISK_SHARE = 0.16; // The part of the width that shows the disk.
const MAX_ON_DISK = 600; // The number says how many there are; the squares only show that it grows.
const SMALL_POOL = 256; // A pool with at most this many blocks is always shown whole.
const FLASH_MS = 900;
const FRAMES = {
  copied: "copied before a write",
  evicted: "evicted",
  stored: "copied to or from host memory",
};
const FLASHES = { copied: "prefill", evicted: "alarm", loaded: "tier", stored: "tier" };
const canvas = byId("wall");
// A second canvas above the blocks, for the frames of flashing and of chosen blocks.
const overlay = byId("wall-frames");
let byRequest = false;
let isWhole = false;
let highest = 0; // The highest block that was used so far.
let layout = { key: "", cells: [], host: [], disk: [] }; // Where each block is drawn: { block, x, y, size, seq }.
let shown = null; // What was drawn last.
// What each cell of a tier shows, by its index. Only cells that change are drawn again.
let drawnKeys = { cells: [], host: [], disk: [] };
let isOverlaid = false; // Something is drawn above the blocks.
let cursor = 0; // The block that the keyboard has chosen.
let listeners = { select: () => {}, hover: () => {}, redraw: () => {} };
const NO_OWNERS = []; // The owners of most blocks.
const flashes = new Map(); // "d12" or "h3" -> { kind, until }

export function onWall(pageListeners) {
  listeners = pageListeners;
}

// Forgets which blocks were used, for another recording.
export function resetWall() {
  highest = 0;
  cursor = 0;
  shown = null;
  flashes.clear();
}
onTheme(() => (shown = null));

// Remembers what happened to a block, so that it flashes.
export function flash(event) {
  const kind = FLASHES[event.kind];
  if (!kind || prefersReducedMotion()) return;
  const until = performance.now() + FLASH_MS;
  const add = (place) => flashes.set(place, { colour: kind, until });
  if (event.kind === "copied") [event.source, event.target].forEach((block) => add(`d${block}`));
  else if (event.block) add(`d${event.block}`);
  if (event.host_block >= 0) add(`h${event.host_block}`);
}

export const countCells = () => layout.cells.length;
export const isFlashing = () => flashes.size > 0;

// ---- where blocks are drawn ---------------------------------------------------------------------

// Returns the largest size at which so many cells fit, and the number of columns.
function fit(cells, width, height) {
  let size = Math.min(
    LARGEST,
    Math.max(SMALLEST, Math.floor(Math.sqrt((width * height) / Math.max(cells, 1)))),
  );
  while (size > SMALLEST && Math.floor(width / size) * Math.floor(height / size) < cells) size -= 1;
  return { size, columns: Math.max(1, Math.floor(width / size)) };
}

const grid = (blocks, x, y, width, height, tier) => {
  const { size, columns } = fit(blocks.length, width, height);
  return blocks.map((block, i) => ({
    tier,
    block,
    x: x + (i % columns) * size,
    y: y + Math.floor(i / columns) * size,
    size,
  }));
};

function layOut(state, width, height) {
  const { num_blocks, host_blocks } = state.about;
  for (let block = num_blocks; block > highest; block -= 1)
    if (state.references[block] || state.contents[block]) highest = block;
  const isShownWhole = isWhole || num_blocks <= SMALL_POOL;
  const limit = isShownWhole
    ? num_blocks
    : Math.min(num_blocks, Math.max(24, Math.ceil((highest + 1) / 8) * 8));
  const onDisk = Math.min(state.onDisk, MAX_ON_DISK);
  const key = `${[state.about.stream, width, height, limit, onDisk]}`;
  if (layout.key === key && !byRequest) return layout; // Blocks stay where they are.
  // The tiers share the width by their numbers of cells, but each gets enough to be seen.
  const disk = host_blocks && state.about.has_disk ? Math.round(width * DISK_SHARE) : 0;
  const hostShare = Math.min(0.42, Math.max(0.22, host_blocks / (host_blocks + limit)));
  const host = host_blocks ? Math.round((width - disk) * hostShare) : 0;
  const top = host ? TOP : 0;
  const hostX = width - disk - (disk ? GAP : 0) - host;
  const deviceWidth = host ? hostX - GAP : width;
  const numbers = (count, first = 0) => Array.from({ length: count }, (_, i) => i + first);
  const place = (blocks, x, wide, tier) => grid(blocks, x, top, wide, height - top, tier);
  return {
    key: byRequest ? "" : key,
    cells: byRequest
      ? layOutTables(state, deviceWidth, height - top, top)
      : place(numbers(limit, 1), 0, deviceWidth, "device"),
    host: host ? place(numbers(host_blocks), hostX, host, "host") : [],
    disk: disk
      ? place(numbers(onDisk), width - disk, disk, "disk")
      : [],
    hostX,
    diskX: disk ? width - disk : 0,
    limit,
  };
}

// One line for each sequence, with its blocks in the order of its text, then the cached ones in the
// order of eviction.
function layOutTables(state, width, height, top) {
  const tables = [...state.sequences.values()]
    .filter((seq) => seq.table.length)
    .sort((a, b) => a.name - b.name || a.index - b.index)
    .map((seq) => ({ seq, blocks: seq.table }));
  tables.push({ seq: null, blocks: freeList(state).filter((block) => state.contents[block]) });
  let size = 24;
  let cells = [];
  for (; size >= 4; size -= 1) {
    const columns = Math.max(1, Math.floor((width - LABEL) / size));
    cells = [];
    let y = top;
    for (const { seq, blocks } of tables) {
      blocks.forEach((block, i) =>
        cells.push({
          tier: "device",
          block,
          seq,
          x: LABEL + (i % columns) * size,
          y: y + Math.floor(i / columns) * size,
          size,
        }),
      );
      y += Math.max(1, Math.ceil(blocks.length / columns)) * size + 3;
    }
    if (y <= top + height) break;
  }
  return cells;
}

// ---- drawing ------------------------------------------------------------------------------------

// What a cell shows, as a value that differs where the cell looks different. Most are numbers,
// which are made and compared fast.
const FREE = 0;
const BUSY = -1;
const FILLING = -2;
const CACHED = -3; // The place in the order of eviction is subtracted.
const LABELS = 32; // More than there are styles of requests.
const keyOfOwner = (seq) => LABELS * seq.id + (seq.label < 0 ? 0 : styleIndexOf(seq.label) + 1);

function keyOfCell(cell, { ids, content, order, isBusy }, sequences) {
  if (ids.length === 1) return keyOfOwner(sequences.get(ids[0]));
  if (ids.length)
    return `${cell.seq?.id ?? ""} ${ids.map((id) => keyOfOwner(sequences.get(id)))}`;
  if (isBusy) return BUSY;
  return content ? CACHED - (order ?? 0) : FREE;
}

const gapOf = (size) => (size > 6 ? 2 : size > 2 ? 1 : 0);

function drawCell(context, cell, { owners, content, order, isFilling, isShared, isBusy }) {
  const { x, y, size } = cell;
  const inner = size - gapOf(size);
  context.clearRect(x, y, size, size);
  if (owners.length) {
    const width = inner / Math.min(owners.length, 4);
    owners.slice(0, 4).forEach((seq, i) => {
      context.fillStyle = fillOf(context, seq.label);
      context.fillRect(x + i * width, y, width, inner);
    });
    drawOwners(context, cell, owners, inner);
    if ((owners.length > 1 || isShared) && size > 5) {
      context.strokeStyle = colour("ink");
      context.lineWidth = 1.5;
      context.strokeRect(x + 0.75, y + 0.75, inner - 1.5, inner - 1.5);
    }
    return;
  }
  context.fillStyle = colour(isBusy ? "busy" : content ? "cached" : "free");
  context.fillRect(x, y, inner, inner);
  const [middleX, middleY] = [x + inner / 2, y + inner / 2];
  if (order && size >= 15)
    drawText(context, order, middleX, middleY, Math.min(10, size * 0.42), colour("cached-ink"));
  else if (isFilling) drawText(context, "…", middleX, middleY, 10, colour("ink"));
}

function drawOwners(context, cell, owners, inner) {
  const { x, y, size, seq, block } = cell;
  if (size < 13) return;
  if (!seq) return drawLetters(context, cell, owners, inner);
  const fontSize = Math.min(11, (size * 1.3) / String(block).length);
  drawText(context, block, x + inner / 2, y + inner / 2, fontSize, styleOf(seq.label).ink);
}

function drawText(context, text, x, y, size, fill, outline = "") {
  context.font = `600 ${size}px system-ui, sans-serif`;
  context.textAlign = "center";
  context.textBaseline = "middle";
  if (outline) {
    context.lineWidth = 3;
    context.strokeStyle = outline;
    context.strokeText(text, x, y + 0.5);
  }
  context.fillStyle = fill;
  context.fillText(text, x, y + 0.5);
}

// The letters of all owners, or their number where there is no room.
function drawLetters(context, { x, y, size }, owners, inner) {
  const middle = y + inner / 2;
  const width = inner / owners.length;
  const fontSize = fontThatFits(context, owners.map(nameOf), width - 2);
  if (owners.length === 1 || fontSize >= LEAST_LETTERS) {
    owners.forEach((seq, i) =>
      drawText(context, nameOf(seq), x + (i + 0.5) * width, middle, fontSize, styleOf(seq.label).ink),
    );
    return;
  }
  const [words, center] = [`×${owners.length}`, x + inner / 2];
  const large = Math.min(12, size * 0.5);
  drawText(context, words, center, middle, large, colour("ink"), colour("panel"));
}

// Returns the size at which each of these texts is at most so wide.
function fontThatFits(context, texts, width) {
  context.font = "600 10px system-ui, sans-serif";
  const widest = Math.max(...texts.map((text) => context.measureText(text).width)) / 10;
  return Math.min(LARGEST_LETTERS, width / widest);
}

// The cells of the places that flash: a shared block has several in the order by request.
function cellsOf(places) {
  const matches = [];
  for (const cells of [layout.cells, layout.host]) {
    const tier = cells === layout.host ? "h" : "d";
    const isDirect = cells.length && (tier === "h" || !byRequest); // In the order of the blocks.
    if (isDirect) {
      for (const place of places) {
        const cell = place[0] === tier && cells[Number(place.slice(1)) - cells[0].block];
        if (cell) matches.push([place, cell]);
      }
      continue;
    }
    for (const cell of cells)
      if (places.has(`${tier}${cell.block}`)) matches.push([`${tier}${cell.block}`, cell]);
  }
  return matches;
}

function drawFlashes(context) {
  const now = performance.now();
  for (const [place, cell] of cellsOf(flashes)) {
    const { until, colour: name } = flashes.get(place);
    const left = (until - now) / FLASH_MS;
    if (left <= 0) continue;
    context.globalAlpha = Math.min(1, left * 1.4);
    context.strokeStyle = colour(name);
    context.lineWidth = 3;
    const spread = (1 - left) * 3;
    context.strokeRect(
      cell.x - 1 - spread,
      cell.y - 1 - spread,
      cell.size + 2 * spread,
      cell.size + 2 * spread,
    );
    context.globalAlpha = 1;
  }
  for (const [place, { until }] of flashes) if (until < now) flashes.delete(place);
}

function drawMarked(context, { owners }, marks) {
  const marked = marks.hovered || marks.selected;
  if (!marked && !marks.block) return;
  context.strokeStyle = colour("ink");
  context.lineWidth = 2.5;
  for (const { block, x, y, size } of layout.cells) {
    if (marks.block !== block && !(marked && owners.get(block)?.includes(marked))) continue;
    const inner = size - gapOf(size);
    context.strokeRect(x - 0.5, y - 0.5, inner + 1, inner + 1);
  }
}

function drawOverlay(marks) {
  const isNeeded = flashes.size > 0 || marks.hovered || marks.selected || marks.block;
  if (!isNeeded && !isOverlaid) return;
  isOverlaid = Boolean(isNeeded);
  const { context } = prepare(overlay);
  drawMarked(context, shown, marks);
  if (flashes.size) drawFlashes(context);
}

function placesInOrder(state) {
  const order = new Map();
  if (layout.cells[0]?.size >= 15) {
    freeList(state)
      .filter((block) => state.contents[block])
      .forEach((block, i) => order.set(block, i + 1));
  }
  return order;
}

export function drawWall(state, marks, names) {
  const { context, width, height, isEmpty } = surfaceOf(canvas);
  if (!width) return;
  const isSame =
    !isEmpty &&
    shown?.state === state &&
    shown.number === state.number &&
    shown.byRequest === byRequest &&
    shown.isWhole === isWhole &&
    shown.width === width &&
    shown.height === height;
  if (!isSame) {
    const before = layout;
    layout = layOut(state, width, height);
    if (isEmpty || !shown || layout !== before) {
      context.clearRect(0, 0, width, height);
      drawnKeys = { cells: [], host: [], disk: [] };
    }
    const { number } = state;
    const order = placesInOrder(state);
    const owners = findOwners(state);
    shown = { state, number, byRequest, isWhole, width, height, owners, order, names };
    drawCells(context, shown);
    drawFrame(context, state, width, height);
  }
  drawOverlay(marks);
}

function drawCells(context, { state, owners, order }) {
  const { sequences } = state;
  layout.cells.forEach((cell, i) => {
    const ids = owners.get(cell.block) ?? NO_OWNERS;
    const known = {
      ids,
      content: state.contents[cell.block],
      order: order.get(cell.block),
      isBusy: !ids.length && state.references[cell.block] > 0,
    };
    const key = keyOfCell(cell, known, sequences);
    if (drawnKeys.cells[i] === key) return;
    drawnKeys.cells[i] = key;
    const holders = cell.seq ? [cell.seq] : ids.map((id) => sequences.get(id));
    drawCell(context, cell, { ...known, owners: holders, isShared: ids.length > 1 });
  });
  layout.host.forEach((cell, i) => {
    const content = state.hostContents[cell.block];
    const isFilling = content > 0 && !state.hostReady[cell.block];
    const key = isFilling ? FILLING : content ? CACHED : FREE;
    if (drawnKeys.host[i] === key) return;
    drawnKeys.host[i] = key;
    drawCell(context, cell, { owners: NO_OWNERS, content, isFilling });
  });
  layout.disk.forEach((cell, i) => {
    if (drawnKeys.disk[i] === CACHED) return;
    drawnKeys.disk[i] = CACHED;
    drawCell(context, cell, { owners: NO_OWNERS, content: 1 });
  });
}

function drawTierName(context, words, x, height) {
  context.fillStyle = colour("dim");
  context.fillText(words, x, 10);
  context.fillStyle = colour("line");
  context.fillRect(x - GAP / 2 - 1, 0, 1, height);
}

// The names of the tiers, and of the lines in the order by request.
function drawFrame(context, state, width, height) {
  if (layout.host.length) context.clearRect(0, 0, width, TOP);
  context.textAlign = "left";
  context.textBaseline = "alphabetic";
  context.font = "600 10.5px system-ui, sans-serif";
  context.fillStyle = colour("dim");
  if (layout.host.length) {
    const known = state.hostContents.reduce((sum, content) => sum + (content > 0), 0);
    context.fillText("device", 0, 10);
    const words = `host memory: ${count(known)} of ${count(state.about.host_blocks)}`;
    drawTierName(context, words, layout.hostX, height);
  }
  if (layout.diskX) drawTierName(context, `disk: ${count(state.onDisk)}`, layout.diskX, height);
  if (!byRequest) return;
  let last = null;
  for (const cell of layout.cells) {
    if (cell.seq === last && cell.x > LABEL) continue;
    if (cell.seq !== last) {
      context.fillStyle = colour("ink");
      context.font = "600 11px system-ui, sans-serif";
      context.fillText(
        cell.seq ? nameOf(cell.seq) : "cached",
        0,
        cell.y + Math.min(cell.size, 14) - 2,
      );
    }
    last = cell.seq;
  }
}

const legend = byId("wall-legend");
const numbers = {};
for (const [name, words] of [
  ["used", "used"],
  ["shared", "shared (part of used)"],
  ["withheld", "withheld by the block limit (part of used)"],
  ["cached", "cached: number = order of eviction"],
  ["free", "free: without content"],
]) {
  const number = element("b");
  legend.append(element("li", "", element("i", `key ${name}`), number, ` ${words}`));
  numbers[name] = number;
}
// The meaning of the frames that a block has for a moment.
const frames = ["copied", "evicted", "stored"].map((kind) => {
  const key = element("i", `key frame ${FLASHES[kind]}`);
  return element("li", "", key, ` ${FRAMES[kind]}`);
});
legend.append(...frames);

// Draws the legend. `counts` are the numbers of blocks.
export function drawLegend(state, counts) {
  const withheld = countWithheld(state);
  const all = { ...counts, withheld };
  for (const [name, node] of Object.entries(numbers)) setText(node, count(all[name]));
  numbers.withheld.parentElement.hidden = !withheld;
  frames.at(-1).hidden = !state.about.host_blocks;
  const { num_blocks, block_size } = state.about;
  const numHidden = num_blocks - layout.limit;
  setText(
    byId("wall-what"),
    `${count(num_blocks)} blocks of ${block_size} tokens.${numHidden > 0 && !byRequest ? ` ${plural(numHidden, "block")} ${numHidden === 1 ? "was" : "were"} never used and ${numHidden === 1 ? "is" : "are"} not shown.` : ""}`,
  );
  byId("zoom").hidden = byRequest || (numHidden <= 0 && !isWhole);
  canvas.ariaLabel = `KV blocks: ${counts.used} used, ${counts.shared} of them shared, ${counts.cached} cached, ${counts.free} free`;
}

// ---- questions ----------------------------------------------------------------------------------

function cellAt(x, y) {
  const holds = (cell) =>
    x >= cell.x && x < cell.x + cell.size && y >= cell.y && y < cell.y + cell.size;
  return layout.cells.find(holds) ?? layout.host.find(holds) ?? layout.disk.find(holds);
}

// Returns what is known about a block, in lines of text.
export function describeBlock(state, block, { owners, order, names }) {
  const holders = (owners.get(block) ?? []).map((id) => state.sequences.get(id));
  const content = state.contents[block];
  const { block_size } = state.about;
  const lines = [];
  const place = (seq) => {
    const first = seq.table.indexOf(block) * block_size;
    const last = Math.min(first + block_size, seq.computed);
    return `${nameOf(seq)}${last > first ? ` (tokens ${count(first + 1)}–${count(last)})` : " (not written yet)"}`;
  };
  if (holders.length > 1) lines.push(`block ${block}: shared by ${holders.map(place).join(", ")}`);
  else if (holders.length) lines.push(`block ${block}: used by ${place(holders[0])}`);
  else if (state.references[block]) lines.push(`block ${block}: ${whyBusy(state)}`);
  else if (content) {
    lines.push(
      `block ${block}: cached${order.has(block) ? `, number ${order.get(block)} in the order of eviction` : ""}`,
    );
  } else lines.push(`block ${block}: free`);
  if (content) lines.push(chainOf(state, block));
  return [...lines, ...names.originOf(content, state)];
}

// A block that is used by no sequence.
function whyBusy(state) {
  if (!countWithheld(state)) return "being read from disk";
  const words = "withheld by the block limit";
  return state.about.has_disk ? `${words}, or being read from disk` : words;
}

// The hash of a block covers its tokens and the block before it.
function chainOf(state, block) {
  const byContent = new Map();
  state.contents.forEach((content, other) => content && byContent.set(content, other));
  const chain = [`#${state.contents[block]}`];
  for (
    let parent = state.parents[block];
    parent && chain.length < 5;
    parent = state.parents[byContent.get(parent)] ?? 0
  )
    chain.push(`#${parent}`);
  const [own, ...before] = chain;
  return before.length
    ? `content ${own}; the blocks before it: ${before.join(", ")}`
    : `content ${own}; it is the first block of a text`;
}

function describeCell(cell) {
  if (!cell || !shown) return "";
  const { state } = shown;
  if (cell.tier === "device") return describeBlock(state, cell.block, shown).join("\n");
  if (cell.tier === "disk") return `${plural(state.onDisk, "block")} with known content on disk`;
  const content = state.hostContents[cell.block];
  if (!content) return `host block ${cell.block}: free`;
  const on = state.contents.indexOf(content);
  return [
    `host block ${cell.block}: content #${content}${state.hostReady[cell.block] ? "" : ", being copied"}`,
    on > 0 ? `also in block ${on} of the device` : "not on the device",
    ...shown.names.originOf(content, state),
  ].join("\n");
}

explain(canvas, (x, y) => describeCell(cellAt(x, y)));
canvas.addEventListener("pointermove", (event) => {
  const box = canvas.getBoundingClientRect();
  const cell = cellAt(event.clientX - box.left, event.clientY - box.top);
  listeners.hover(cell?.tier === "device" ? (shown?.owners.get(cell.block)?.[0] ?? 0) : 0);
});
canvas.addEventListener("pointerleave", () => listeners.hover(0));
canvas.addEventListener("click", (event) => {
  const box = canvas.getBoundingClientRect();
  const cell = cellAt(event.clientX - box.left, event.clientY - box.top);
  if (cell?.tier === "device") listeners.select(cell.block);
});
canvas.addEventListener("keydown", (event) => {
  const cells = [...layout.cells, ...layout.host];
  const row = cells.filter(({ tier, y }) => tier === cells[cursor]?.tier && y === cells[cursor].y);
  const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -row.length, ArrowDown: row.length };
  if (!(event.key in moves) || !cells.length) return;
  event.preventDefault();
  event.stopPropagation();
  cursor = Math.max(0, Math.min(cells.length - 1, cursor + moves[event.key]));
  const cell = cells[cursor];
  const box = canvas.getBoundingClientRect();
  if (cell.tier === "device") listeners.select(cell.block);
  setText(byId("wall-words"), describeCell(cell));
  showTip(box.left + cell.x, box.top + cell.y + cell.size, () => describeCell(cell));
});

for (const [id, value] of [
  ["by-block", false],
  ["by-request", true],
]) {
  byId(id).addEventListener("click", () => {
    byRequest = value;
    byId("by-block").ariaPressed = String(!value);
    byId("by-request").ariaPressed = String(value);
    listeners.redraw();
  });
}
byId("zoom").addEventListener("click", () => {
  isWhole = !isWhole;
  byId("zoom").ariaPressed = String(isWhole);
  listeners.redraw();
});
