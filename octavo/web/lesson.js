// The lesson panel: what happens, a question, the user's prediction, and then the recorded runs with
// an explanation. The texts come from octavo/lessons; the page shows the recordings like any other.

import { nameOf } from "./colours.js";
import { byId, element, prefersReducedMotion } from "./draw.js";
import { play, stop } from "./transport.js";

const panel = byId("lesson");
const SLOW = "0.25"; // The speed at which a run is shown: steps of a small model are short.

// `openRun(index)` opens the recording of a run. `openTab(name)` opens a tab of the side panel.
export function openLesson(page, lesson, { openRun, openTab }) {
  byId("tab-lesson").hidden = false;
  byId("transport").hidden = true; // The run is not shown before the prediction.
  page.moveTo(page.history.first);
  openTab("lesson");
  askForPrediction(lesson, async (choice) => {
    byId("transport").hidden = false;
    byId("speed").value = SLOW;
    const runs = new LessonRuns(page, lesson, openRun);
    reveal(lesson, choice, runs);
    openTab("lesson");
    await runs.show(0);
    if (prefersReducedMotion()) page.moveTo(page.history.last);
    else play(page);
  });
}

function askForPrediction(lesson, onChoice) {
  const choices = element("div", "choices");
  lesson.choices.forEach((words, index) => {
    const button = element("button", "", words);
    button.type = "button";
    button.addEventListener("click", () => onChoice(index));
    choices.append(button);
  });
  panel.replaceChildren(
    element("h2", "title", lesson.title),
    element("p", "", lesson.intro),
    element("h3", "", "What do you predict?"),
    element("p", "question", lesson.question),
    choices,
    element("p", "what", "Choose an answer. Then the page shows the recorded run."),
  );
}

function reveal(lesson, choice, runs) {
  const isRight = choice === lesson.answer;
  const verdict = isRight
    ? "Your prediction was right."
    : `You predicted “${lesson.choices[choice]}”.`;
  const moments = element("ul", "plain");
  for (const moment of lesson.moments) moments.append(momentLine(lesson, moment, runs));
  panel.replaceChildren(
    element("h2", "title", lesson.title),
    element("p", "question", lesson.question),
    element("p", "verdict", element("b", "", verdict), ` Answer: ${lesson.choices[lesson.answer]}.`),
    element("p", "", lesson.text),
    element("h3", "", "Important moments"),
    moments,
    runs.switch,
    element("h3", "", "The code that decides"),
    sources(lesson),
  );
}

function momentLine(lesson, moment, runs) {
  const isOne = lesson.runs.length === 1;
  const where = isOne ? `step ${moment.step}` : `${lesson.runs[moment.run]}, step ${moment.step}`;
  const button = element("button", "link", where);
  button.type = "button";
  button.addEventListener("click", () => runs.showMoment(moment));
  return element("li", "", button, `: ${moment.text}`);
}

function sources(lesson) {
  const list = element("dl");
  const rows = [
    ["code", lesson.code.join(", ")],
    ["test", lesson.test],
    ["read more", lesson.page],
    ["exercise", lesson.exercise],
  ];
  for (const [term, text] of rows) list.append(element("dt", "", term), element("dd", "", text));
  return list;
}

// The runs of a lesson. One of them is shown.
class LessonRuns {
  constructor(page, lesson, openRun) {
    this.page = page;
    this.openRun = openRun;
    this.shown = 0;
    this.buttons = lesson.runs.map((name, index) => {
      const button = element("button", "", `run: ${name}`);
      button.type = "button";
      button.addEventListener("click", () => this.play(index));
      return button;
    });
    this.switch = element("div", "buttons", ...this.buttons);
  }

  async show(index) {
    stop();
    if (index !== this.shown) await this.openRun(index);
    this.shown = index;
    this.buttons.forEach((button, i) => (button.ariaPressed = String(i === index)));
  }

  async play(index) {
    await this.show(index);
    this.page.moveTo(this.page.history.first);
    play(this.page);
  }

  async showMoment({ run, step, request }) {
    await this.show(run);
    const { history, names } = this.page;
    const stepIndex = history.stepIndexOfNumber(step);
    if (stepIndex >= 0) this.page.moveTo(history.endOfStep(stepIndex));
    const seq = [...names.seen.values()].findLast((each) => nameOf(each) === request);
    this.page.select(seq ? { kind: "sequence", id: seq.id } : { kind: "none" }, false);
  }
}
