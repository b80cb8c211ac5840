// Draws the KV cache. A cell shows one block, or several blocks if there are more blocks than cells.
// The used part of a cell has full colour, the cached part is striped, and the free part is pale. A mark shows that it is shared.

import { colour, count, element, explain, ownerColour, prepare, short } from "/web/draw.js";

const canvas = document.getElementById("pool");
const STATES = { used: "used", shared: "shared", cached: "cached (reusable prefix)", free: "free" };
let byRequest = true;
let last = null; // The view, the model and the marked sequences that were drawn last.
let grid = { columns: 1, size: 10 };

for (const [id, value] of [["by-request", true], ["by-state", false]]) {
  document.getElementById(id).addEventListener("click", () => {
    byRequest = value;
    document.getElementById("by-request").ariaPressed = String(value);
    document.getElementById("by-state").ariaPressed = String(!value);
    redraw();
  });
}
new ResizeObserver(() => redraw()).observe(document.getElementById("pool-box"));

function cell(context, x, y, size, used, cached, shared, fill) {
  const round = size > 6 ? 2 : 0, inner = size - (size > 4 ? 1 : 0);
  context.fillStyle = colour("free");
  context.beginPath();
  context.roundRect(x, y, inner, inner, round);
  context.fill();
  if (cached) {
    const height = Math.max(inner * cached, 1), top = y + inner * (1 - used) - height;
    context.fillStyle = colour("cached");
    context.fillRect(x, top, inner, height);
    if (inner > 6 && height > 5) {
      context.strokeStyle = colour("panel");
      context.lineWidth = 1;
      context.beginPath();
      context.moveTo(x + 1, top + height - 1);
      context.lineTo(x + inner - 1, top + 1);
      context.stroke();
    }
  }
  if (used) {
    const height = Math.max(inner * used, 1);
    context.fillStyle = fill;
    context.beginPath();
    context.roundRect(x, y + inner - height, inner, height, used + cached > 0.99 ? round : 0);
    context.fill();
  }
  if (shared && inner > 5) {
    const mark = Math.max(2, Math.round(inner / 3));
    context.fillStyle = colour("panel");
    context.fillRect(x + (inner - mark) / 2, y + (inner - mark) / 2, mark, mark);
  }
}

function fit(cells, width, height) {
  let size = Math.floor(Math.sqrt((width * height) / cells));
  while (size > 2 && Math.floor(width / size) * Math.floor(height / size) < cells) size -= 1;
  size = Math.min(size, 22);
  return { size, columns: Math.max(1, Math.floor(width / size)) };
}

function redraw() {
  if (!last) return;
  const { view, model, marked } = last;
  const { context, width, height } = prepare(canvas);
  if (!width) return;
  const cells = view.used.length;
  grid = fit(cells, width, height);
  for (let i = 0; i < cells; i += 1) {
    const blocks = blocksOf(i, view, model);
    const x = (i % grid.columns) * grid.size, y = Math.floor(i / grid.columns) * grid.size;
    const used = view.used[i] / blocks, fill = byRequest
      ? view.owner[i] ? ownerColour(view.owner[i]) : colour("used")
      : view.shared[i] * 2 > view.used[i] ? colour("shared") : colour("used");
    cell(context, x, y, grid.size, used, view.cached[i] / blocks, view.shared[i], fill);
    if (marked.has(view.owner[i]) && view.used[i]) {
      context.strokeStyle = colour("ink");
      context.lineWidth = 2;
      context.strokeRect(x, y, grid.size - 1, grid.size - 1);
    }
  }
}

const blocksOf = (i, view, model) => Math.min(view.blocks, model.num_blocks - i * view.blocks);

const legend = document.getElementById("pool-legend");
const counts = {};
for (const [name, words] of Object.entries(STATES)) {
  const item = element("li"), icon = element("canvas"), number = element("b");
  item.append(icon, number, ` ${words}`);
  legend.append(item);
  counts[name] = { icon, number };
}

function drawLegend(numbers) {
  const icons = { used: [1, 0, 0, "used"], shared: [1, 0, 1, "shared"], cached: [0, 1, 0, "used"], free: [0, 0, 0, "used"] };
  for (const [name, { icon, number }] of Object.entries(counts)) {
    const text = count(numbers[name]);
    if (number.textContent !== text) number.textContent = text;
    const { context } = prepare(icon), [used, cached, shared, fill] = icons[name];
    cell(context, 0, 0, 12, used, cached, shared, colour(fill));
  }
}

drawLegend({ used: 0, shared: 0, cached: 0, free: 0 });

// Draws a view. `marked` has the ids of sequences whose blocks are outlined.
export function showPool(view, model, marked) {
  last = { view, model, marked };
  const sum = (list) => list.reduce((a, b) => a + b, 0);
  const used = sum(view.used), shared = sum(view.shared), cached = sum(view.cached), free = model.num_blocks - used - cached;
  drawLegend({ used: used - shared, shared, cached, free });
  const square = view.blocks > 1 ? `${view.blocks} blocks` : "one block";
  document.getElementById("pool-what").textContent =
    `${count(model.num_blocks)} blocks of ${model.block_size} tokens hold the keys and values. Each square is ${square}.`;
  canvas.ariaLabel = `KV cache: ${used - shared} blocks used, ${shared} shared, ${cached} cached, ${free} free`;
  redraw();
}

explain(canvas, (event) => {
  if (!last) return "";
  const box = canvas.getBoundingClientRect(), { view, model, names } = { ...last, names: showPool.names };
  const column = Math.floor((event.clientX - box.left) / grid.size), row = Math.floor((event.clientY - box.top) / grid.size);
  const i = row * grid.columns + column;
  if (column >= grid.columns || i >= view.used.length) return "";
  const blocks = blocksOf(i, view, model), first = i * view.blocks + 1;
  const what = blocks > 1
    ? `blocks ${first}–${first + blocks - 1}: ${view.used[i]} used, ${view.cached[i]} cached, ${blocks - view.used[i] - view.cached[i]} free`
    : `block ${first}: ${view.shared[i] ? "shared" : view.used[i] ? "used" : view.cached[i] ? "cached" : "free"}`;
  const owner = names.get(view.owner[i]);
  return owner && view.used[i] ? `${what}\n${blocks > 1 ? "one owner is" : view.shared[i] ? "first owner is" : "owner is"} ${short(...owner)}` : what;
});
showPool.names = new Map(); // Sequence.id -> [request, index]
