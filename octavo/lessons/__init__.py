"""Lessons: small scenarios that run on the real engine and are shown on the live page.

    scenario.py   the requests of a lesson, which arrive at given steps
    facts.py      the facts in the recording of a scenario
    chart.py      a run as text, for terminals
    lesson.py     a lesson: question, choices, explanation
    catalog.py    all lessons

A lesson asks for a prediction, shows the recorded run, and names the code and the test. The numbers
in an explanation come from the recording.
"""
