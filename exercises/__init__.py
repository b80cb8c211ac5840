"""Exercises, one for each lesson (`octavo lesson`). A file has a task and a test that fails until
the task is done:

    .venv/bin/python -m pytest exercises/paging.py

The tests compare your code with the real scheduler, which runs without a model. solutions/ has one
solution of each exercise. `make test` checks that every exercise fails as it is, and that its
solution passes.
"""
