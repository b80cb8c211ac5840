// The KV wall: every block of the device, and of host memory beside it.
//
//   used      the colour, pattern and letters of the sequence that holds it
//   shared    the colours of all sequences that hold it, side by side
//   cached    no sequence holds it, but its content is known; the number is its place in the order of eviction
//   free      nothing to reuse
//
// By default the wall shows the blocks that were used so far, so that a large pool is not an empty
// wall.

import { fillOf, lookOf, nameOf } from "./colours.js";
import {
  byId,
  colour,
  count,
  element,
  explain,
  isStill,
  plural,
  prepare,
  setText,
  showTip,
} from "./draw.js";
import { findOwners, freeList } from "./state.js";

const LARGEST = 46;
const SMALLEST = 2; // Sizes of a cell in pixels.
const LABEL = 50; // The width of the names in the order by request.
const GAP = 14; // Between two tiers.
const DISK_SHARE = 0.16; // The part of the width that shows the disk.
const MOST_ON_DISK = 600; // The number says how many there are; the squares only show that it grows.
const SMALL_POOL = 256; // A pool with at most this many blocks is always shown whole.
const FLASH_MS = 900;
const FRAMES = {
  copied: "copied before a write",
  evicted: "evicted",
  stored: "copied to or from host memory",
};
const FLASHES = { copied: "prefill", evicted: "alarm", loaded: "tier", stored: "tier" };
const canvas = byId("wall");
let byRequest = false;
let isWhole = false;
let highest = 0; // The highest block that was used so far.
let layout = { key: "", cells: [], host: [], disk: [] }; // Where each block is drawn: { block, x, y, size, seq }.
let shown = null; // What was drawn last.
let cursor = 0; // The block that the keyboard has chosen.
let listeners = { select: () => {}, hover: () => {}, redraw: () => {} };
const NOBODY = []; // The owners of most blocks.
const flashes = new Map(); // "d12" or "h3" -> { kind, until }

export function onWall(given) {
  listeners = given;
}

// Forgets which blocks were used, for another recording.
export function resetWall() {
  highest = 0;
  cursor = 0;
  flashes.clear();
}

// Remembers what happened to a block, so that it flashes.
export function flash(event) {
  const kind = FLASHES[event.kind];
  if (!kind || isStill()) return;
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
  const key = `${[state.about.stream, width, height, limit, state.onDisk]}`;
  if (layout.key === key && !byRequest) return layout; // Blocks stay where they are.
  // The tiers share the width by their numbers of cells, but each gets enough to be seen.
  const disk = host_blocks && state.about.has_disk ? Math.round(width * DISK_SHARE) : 0;
  const hostShare = Math.min(0.42, Math.max(0.22, host_blocks / (host_blocks + limit)));
  const host = host_blocks ? Math.round((width - disk) * hostShare) : 0;
  const top = host ? 15 : 0;
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
      ? place(numbers(Math.min(state.onDisk, MOST_ON_DISK)), width - disk, disk, "disk")
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

function drawCell(context, cell, look) {
  const { x, y, size } = cell;
  const gap = size > 6 ? 2 : size > 3 ? 1 : 0;
  const inner = size - gap;
  const { owners, content, order, isReady, isMarked } = look;
  if (owners.length) {
    const width = inner / Math.min(owners.length, 4);
    owners.slice(0, 4).forEach((seq, i) => {
      context.fillStyle = fillOf(context, seq.label);
      context.fillRect(x + i * width, y, width, inner);
    });
    if (size >= 13 && cell.seq) {
      drawText(
        context,
        cell.block,
        x + inner / 2,
        y + inner / 2,
        Math.min(11, (size * 1.3) / String(cell.block).length),
        lookOf(cell.seq.label).ink,
      );
    } else if (size >= 13) drawLetters(context, cell, owners, inner);
    if ((owners.length > 1 || look.isShared) && size > 5) {
      context.strokeStyle = colour("ink");
      context.lineWidth = 1.5;
      context.strokeRect(x + 0.75, y + 0.75, inner - 1.5, inner - 1.5);
    }
  } else if (content || look.isBusy) {
    context.fillStyle = colour(look.isBusy ? "busy" : "cached");
    context.fillRect(x, y, inner, inner);
    if (size >= 15 && order) {
      drawText(
        context,
        order,
        x + inner / 2,
        y + inner / 2,
        Math.min(10, size * 0.42),
        colour("cached-ink"),
      );
    } else if (isReady === false)
      drawText(context, "…", x + inner / 2, y + inner / 2, 10, colour("ink"));
  } else {
    context.fillStyle = colour("free");
    context.fillRect(x, y, inner, inner);
  }
  if (isMarked) {
    context.strokeStyle = colour("ink");
    context.lineWidth = 2.5;
    context.strokeRect(x - 0.5, y - 0.5, inner + 1, inner + 1);
  }
}

function drawText(context, text, x, y, size, fill) {
  context.font = `600 ${size}px system-ui, sans-serif`;
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.fillStyle = fill;
  context.fillText(text, x, y + 0.5);
}

function drawLetters(context, { x, y, size }, owners, inner) {
  const middle = y + inner / 2;
  if (owners.length === 1 || (owners.length <= 3 && size >= 22)) {
    const width = inner / owners.length;
    owners.forEach((seq, i) => {
      const text = nameOf(seq);
      const fontSize = Math.min(
        13,
        (size * 0.92) / Math.max(text.length * owners.length * 0.8, 1.7),
      );
      drawText(context, text, x + (i + 0.5) * width, middle, fontSize, lookOf(seq.label).ink);
    });
    return;
  }
  context.lineWidth = 3;
  context.strokeStyle = colour("panel");
  context.font = `600 ${Math.min(12, size * 0.5)}px system-ui, sans-serif`;
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.strokeText(`×${owners.length}`, x + inner / 2, middle + 0.5);
  drawText(
    context,
    `×${owners.length}`,
    x + inner / 2,
    middle,
    Math.min(12, size * 0.5),
    colour("ink"),
  );
}

function drawFlashes(context, cells) {
  const now = performance.now();
  for (const cell of cells) {
    const found = flashes.get(`${cell.tier[0]}${cell.block}`);
    if (!found) continue;
    const left = (found.until - now) / FLASH_MS;
    if (left <= 0) continue;
    context.globalAlpha = Math.min(1, left * 1.4);
    context.strokeStyle = colour(found.colour);
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

export function drawWall(state, marks, names) {
  const { context, width, height } = prepare(canvas);
  if (!width) return;
  layout = layOut(state, width, height);
  const owners = findOwners(state);
  const order = new Map();
  if (layout.cells[0]?.size >= 15) {
    freeList(state)
      .filter((block) => state.contents[block])
      .forEach((block, i) => order.set(block, i + 1));
  }
  shown = { state, owners, order, names };
  const marked = marks.hovered || marks.selected;
  for (const cell of layout.cells) {
    const ids = owners.get(cell.block) ?? NOBODY;
    const holders = ids.length ? ids.map((id) => state.sequences.get(id)) : NOBODY;
    drawCell(context, cell, {
      owners: cell.seq ? [cell.seq] : holders,
      content: state.contents[cell.block],
      order: order.get(cell.block),
      isBusy: !ids.length && state.references[cell.block] > 0,
      isShared: ids.length > 1,
      isMarked: (marked && ids.includes(marked)) || marks.block === cell.block,
    });
  }
  for (const cell of layout.host) {
    drawCell(context, cell, {
      owners: [],
      content: state.hostContents[cell.block],
      isReady: Boolean(state.hostReady[cell.block]),
      isMarked: false,
    });
  }
  for (const cell of layout.disk) drawCell(context, cell, { owners: [], content: 1 });
  if (flashes.size) drawFlashes(context, [...layout.cells, ...layout.host]);
  drawFrame(context, state, height);
}

function drawTierName(context, words, x, height) {
  context.fillStyle = colour("dim");
  context.fillText(words, x, 10);
  context.fillStyle = colour("line");
  context.fillRect(x - GAP / 2 - 1, 0, 1, height);
}

// The names of the tiers, and of the lines in the order by request.
function drawFrame(context, state, height) {
  context.textAlign = "left";
  context.textBaseline = "alphabetic";
  context.font = "600 10.5px system-ui, sans-serif";
  context.fillStyle = colour("dim");
  if (layout.host.length) {
    const known = state.hostContents.reduce((sum, content) => sum + (content > 0), 0);
    context.fillText("device", 0, 10);
    const words = `host: ${count(known)} of ${count(state.about.host_blocks)}`;
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
  ["cached", "cached: number = order of eviction"],
  ["free", "free"],
]) {
  const number = element("b");
  legend.append(element("li", "", element("i", `key ${name}`), number, ` ${words}`));
  numbers[name] = number;
}
// What the frames mean that a block has for a moment.
const frames = ["copied", "evicted", "stored"].map((kind) => {
  const key = element("i", `key frame ${FLASHES[kind]}`);
  return element("li", "", key, ` ${FRAMES[kind]}`);
});
legend.append(...frames);

// Draws the legend. `found` are the numbers of blocks.
export function drawLegend(state, found) {
  for (const [name, node] of Object.entries(numbers)) setText(node, count(found[name]));
  frames.at(-1).hidden = !state.about.host_blocks;
  const { num_blocks, block_size } = state.about;
  const rest = num_blocks - layout.limit;
  setText(
    byId("wall-what"),
    `${count(num_blocks)} blocks of ${block_size} tokens.${rest > 0 && !byRequest ? ` ${plural(rest, "more block")} were never used and are not shown.` : ""}`,
  );
  byId("zoom").hidden = byRequest || (rest <= 0 && !isWhole);
  canvas.ariaLabel = `KV blocks: ${found.used} used, ${found.shared} of them shared, ${found.cached} cached, ${found.free} free`;
}

// ---- questions ----------------------------------------------------------------------------------

const cellAt = (x, y) =>
  [...layout.cells, ...layout.host, ...layout.disk].find(
    (cell) => x >= cell.x && x < cell.x + cell.size && y >= cell.y && y < cell.y + cell.size,
  );

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
  else if (state.references[block]) lines.push(`block ${block}: being read from disk`);
  else if (content) {
    lines.push(
      `block ${block}: cached${order.has(block) ? `, number ${order.get(block)} in the order of eviction` : ""}`,
    );
  } else lines.push(`block ${block}: free`);
  if (content) lines.push(chainOf(state, block));
  return [...lines, ...names.originOf(content, state)];
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
  return `content ${chain.join(" after ")}${chain.length === 1 ? ", the first of a text" : ""}`;
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
  const cells = layout.cells;
  const columns = cells.findIndex((cell) => cell.y > cells[0].y);
  const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns };
  if (!(event.key in moves) || !cells.length) return;
  event.preventDefault();
  event.stopPropagation();
  cursor = Math.max(0, Math.min(cells.length - 1, cursor + moves[event.key]));
  const cell = cells[cursor];
  const box = canvas.getBoundingClientRect();
  listeners.select(cell.block);
  setText(byId("wall-words"), describeCell(cell));
  showTip(box.left + cell.x, box.top + cell.y + cell.size, describeCell(cell));
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
