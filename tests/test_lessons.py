"""Every lesson runs, its runs show what its answer says, and it names code, tests, pages and
exercises that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from octavo.cli import app, lesson_command
from octavo.core.offload_costs import OffloadCosts
from octavo.lessons.catalog import LESSONS
from octavo.lessons.chart import draw_run
from octavo.lessons.lesson import Lesson, LessonRun, run_lesson
from octavo.lessons.scenario import BASE_OPTIONS
from octavo.llm import LLM
from tests.tiny import model_dir

REPOSITORY = Path(__file__).parents[1]
lessons = pytest.mark.parametrize("lesson", LESSONS.values(), ids=list(LESSONS))


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(model_dir("llama"), **BASE_OPTIONS)


@pytest.fixture(scope="module")
def runs() -> dict[str, LessonRun]:
    """The lessons that were run, by name."""
    return {}


@lessons
def test_the_runs_of_a_lesson_show_what_its_answer_says(
    lesson: Lesson, llm: LLM, runs: dict[str, LessonRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    # With so small a model, computing a block may be faster than loading it.
    monkeypatch.setattr(OffloadCosts, "loading_pays", lambda *_: True)
    run = runs[lesson.name] = run_lesson(llm, lesson)
    reveal = run.revealed
    assert reveal.is_as_predicted, reveal.text
    for moment in reveal.moments:
        facts = run.facts[moment.run]
        assert 0 < moment.step <= facts.last_step, moment
        assert not moment.request or facts.of(moment.request)
    shown = json.loads(run.to_json())
    assert shown["answer"] < len(shown["choices"]) == len(set(shown["choices"]))
    for facts in run.facts:
        lines = draw_run(facts, 80)
        assert len(lines) > len(lesson.runs[0].arrivals) and max(map(len, lines)) <= 81


@pytest.mark.slow
def test_lessons_hold_with_the_embedded_model() -> None:
    """It has a draft head, which a lesson must not use unless it says so."""
    llm = LLM("smollm2", **BASE_OPTIONS)
    for lesson in LESSONS.values():
        run = run_lesson(llm, lesson)
        assert run.revealed.is_as_predicted, run.revealed.text
        has_drafts = any(facts.drafts[0] for facts in run.facts)
        assert has_drafts == (lesson.name == "speculation"), lesson.name


def test_there_is_a_lesson_for_each_mechanism() -> None:
    assert len(LESSONS) >= 10


@lessons
def test_a_lesson_names_what_exists(lesson: Lesson) -> None:
    for place in lesson.code:
        path, name = place.split(":")
        assert re.search(rf"^(class|def|    def) {name}\b", (REPOSITORY / path).read_text(), re.M)
    path, name = lesson.test.split("::")
    assert f"def {name}(" in (REPOSITORY / path).read_text(), lesson.test
    assert (REPOSITORY / lesson.page).exists()
    assert (REPOSITORY / lesson.exercise).exists()


def test_a_lesson_in_the_terminal_asks_before_it_shows(
    runs: dict[str, LessonRun], llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runs.get("paging") or run_lesson(llm, LESSONS["paging"])
    monkeypatch.setattr(lesson_command, "run_chosen", lambda chosen, model: run)
    arguments = ["lesson", "paging", "--no-browser"]
    done = CliRunner().invoke(app, arguments, input="0\n2\n")
    assert done.exit_code == 0, done.output
    assert done.output.index("enter a number") < done.output.index("run: contiguous")
    assert "Your prediction was right." in done.output
    assert "You predicted otherwise." in CliRunner().invoke(app, arguments, input="1\n").output
    assert CliRunner().invoke(app, arguments, input="").exit_code == 2


def test_a_lesson_becomes_one_file(
    runs: dict[str, LessonRun], llm: LLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = runs.get("paging") or run_lesson(llm, LESSONS["paging"])
    monkeypatch.setattr(lesson_command, "run_chosen", lambda chosen, model: run)
    target = tmp_path / "paging.html"
    done = CliRunner().invoke(app, ["lesson", "paging", "--export", str(target)])
    assert done.exit_code == 0, done.output
    page = target.read_text()
    assert 'id="recording-1"' in page and 'id="lesson-text"' in page


def test_lessons_are_listed_and_unknown_ones_refused() -> None:
    listed = CliRunner().invoke(app, ["lesson"])
    assert listed.exit_code == 0 and all(name in listed.output for name in LESSONS)
    refused = CliRunner().invoke(app, ["lesson", "nothing"])
    assert refused.exit_code == 2 and "paging" in refused.output
