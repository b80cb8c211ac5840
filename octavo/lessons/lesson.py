"""A lesson: its question, the runs that answer it, and the explanation."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from octavo.lessons.facts import RunFacts
from octavo.lessons.scenario import Scenario, run_scenario
from octavo.llm import LLM


class Moment(NamedTuple):
    """A step of a run that the explanation points to."""

    run: int  # index of the run
    step: int
    request: str  # the name of the request that the step is about, or ""
    text: str


class Reveal(NamedTuple):
    """The explanation after the prediction of a lesson, made from the recorded runs."""

    text: str
    moments: list[Moment]
    is_as_predicted: bool  # The runs agree with the answer. A test requires it.


@dataclass(frozen=True)
class Lesson:
    name: str
    title: str
    intro: str
    runs: tuple[Scenario, ...]
    question: str
    choices: tuple[str, ...]
    answer: int  # index of the right choice
    reveal: Callable[[Sequence[RunFacts]], Reveal]
    code: tuple[str, ...]  # where the code decides, as path:name
    test: str  # the test that covers it, as path::name
    page: str  # the page that explains more
    exercise: str  # the file to complete


@dataclass
class LessonRun:
    """A lesson that has been run."""

    lesson: Lesson
    recordings: list[bytes]

    @cached_property
    def facts(self) -> list[RunFacts]:
        return [RunFacts(recording) for recording in self.recordings]

    @cached_property
    def revealed(self) -> Reveal:
        return self.lesson.reveal(self.facts)

    def to_json(self) -> str:
        """Return what the page shows (octavo/web/lesson.js)."""
        lesson = self.lesson
        reveal = self.revealed
        shown: dict[str, Any] = {
            "name": lesson.name,
            "title": lesson.title,
            "intro": lesson.intro,
            "runs": [scenario.name for scenario in lesson.runs],
            "question": lesson.question,
            "choices": lesson.choices,
            "answer": lesson.answer,
            "text": reveal.text,
            "moments": [moment._asdict() for moment in reveal.moments],
            "code": lesson.code,
            "test": lesson.test,
            "page": lesson.page,
            "exercise": lesson.exercise,
        }
        return json.dumps(shown)


def run_lesson(llm: LLM, lesson: Lesson) -> LessonRun:
    """Run the scenarios of a lesson on a model that is warmed up."""
    return LessonRun(lesson, [run_scenario(llm, scenario) for scenario in lesson.runs])
