"""Lessons: small scenarios that run on the real engine and are shown on the live page.

    scenario.py   what happens in a lesson: requests that arrive at given steps
    facts.py      what can be read off a recording of it
    chart.py      a run as text, for terminals
    lesson.py     a lesson: question, choices, explanation
    catalog.py    all lessons

A lesson asks for a prediction, shows the recorded run, and names the code and the test. The numbers
in an explanation are read off the recording.
"""
