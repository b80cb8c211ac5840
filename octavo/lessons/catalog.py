"""All lessons, in the order in which they build on each other."""

from __future__ import annotations

from octavo.errors import InvalidRequest
from octavo.lessons import batching_lessons, cache_lessons, memory_lessons, policy_lessons
from octavo.lessons.lesson import Lesson

LESSONS: dict[str, Lesson] = {
    lesson.name: lesson
    for lesson in (
        *memory_lessons.LESSONS,
        *batching_lessons.LESSONS,
        *cache_lessons.LESSONS,
        *policy_lessons.LESSONS,
    )
}


def find_lesson(name: str) -> Lesson:
    if name not in LESSONS:
        raise InvalidRequest(f"there is no lesson {name!r}: use {', '.join(LESSONS)}", "lesson")
    return LESSONS[name]
