// Rounds of drawing. All panels of a round show the same moment: the page moves only between two
// rounds. Panels that take long are spread over several frames, so that no frame is long.

const CALM_MS = 100; // Between the beginnings of two rounds, while the page moves.
const BUDGET_MS = 4; // Of a frame: no further panel is begun after this time.

export class Rounds {
  // `panels` are functions that draw. `advance()` moves the page to the latest moment that is asked
  // for.
  constructor(
    panels,
    advance,
    { calm = CALM_MS, budget = BUDGET_MS, clock = () => performance.now() } = {},
  ) {
    Object.assign(this, { panels, advance, calm, budget, clock });
    this.remaining = []; // The panels that this round still has to draw.
    this.begunAt = -Infinity;
    this.isDue = false; // Something has changed since this round began.
    this.isUrgent = false; // The next frame draws all panels.
  }

  // Whether all panels show the same moment now.
  get isWhole() {
    return !this.remaining.length;
  }

  ask(isUrgent) {
    this.isDue = true;
    this.isUrgent ||= isUrgent;
  }

  // Draws the panels of one frame. Returns whether a later frame has to draw more.
  drawFrame(time) {
    const isUrgent = this.isUrgent;
    const isNext = this.isWhole && this.isDue && time - this.begunAt >= this.calm;
    if (isUrgent || isNext) this.#begin(time);
    const end = this.clock() + this.budget;
    while (this.remaining.length) {
      this.remaining.shift()();
      if (!isUrgent && this.clock() > end) break;
    }
    return !this.isWhole || this.isDue;
  }

  #begin(time) {
    this.isDue = this.isUrgent = false;
    this.advance();
    this.begunAt = time;
    this.remaining = [...this.panels];
  }
}
