// Draws a page that moves in every frame, with panels that take as many milliseconds as the arguments say. Prints for each frame what
// the panels show, and whether the page says that they agree.

import { Rounds } from "../../octavo/web/rounds.js";

const costs = process.argv.slice(2).map(Number);
let time = 0, wanted = 0, cursor = 0;
const shown = costs.map(() => 0);
const rounds = new Rounds(
  costs.map((cost, panel) => () => {
    shown[panel] = cursor;
    time += cost;
  }),
  () => (cursor = wanted),
  { calm: 100, budget: 4, clock: () => time },
);
const frames = [];
function drawFrame(begun) {
  time = Math.max(time, begun);
  const start = time;
  const isMore = rounds.drawFrame(begun);
  frames.push({ shown: [...shown], wanted, isWhole: rounds.isWhole, isMore, took: time - start });
}
for (let frame = 0; frame < 120; frame += 1) {
  wanted += 1;
  rounds.ask(frame === 60); // One change is urgent.
  drawFrame(17 * (frame + 1));
}
const urgent = frames[60];
for (let frame = 120; frame < 160; frame += 1) drawFrame(17 * (frame + 1));
console.log(JSON.stringify({ frames, urgent }));
