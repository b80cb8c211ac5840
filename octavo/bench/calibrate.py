"""Fits a cost model to the steps of a real run, and measures how well it predicts them."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from octavo.bench.picture import Axis, Panel, Series, points
from octavo.core.simulate import FEATURES, Costs, Report, features, percentile, replay, requests_of
from octavo.core.trace import TraceEntry
from octavo.events import Event, StepLanded

if TYPE_CHECKING:
    from octavo.llm import LLM

MAX_POINTS = 400  # points of one trace in a picture


class MeasuredStep(NamedTuple):
    features: tuple[float, ...]
    seconds: float


def record(llm: LLM, trace: list[TraceEntry]) -> tuple[list[MeasuredStep], Report]:
    """Play a trace on the model in real time."""
    measured_steps: list[MeasuredStep] = []

    def measure(event: Event) -> None:
        if isinstance(event, StepLanded) and event.plan.items:
            measured_steps.append(MeasuredStep(features(event.plan), event.seconds))

    engine = llm.new_engine(llm.schedule)
    engine.events.subscribe(measure, StepLanded)
    requests, _ = requests_of(trace, llm.config.vocab_size)
    return measured_steps, replay(engine, requests)


def fit(steps: list[MeasuredStep]) -> Costs:
    """Fit the cost model by least squares on relative errors.

    Relative errors make short steps count as much as long ones. They are relative to the prediction
    of the previous round, because measured times would favour a prediction that is too low. No
    feature may make a step shorter: such a feature is left out, and the fit is repeated. Outliers,
    which something else on the machine delayed, do not count.
    """
    feature_matrix = np.array([step.features for step in steps])
    seconds = np.array([step.seconds for step in steps])
    used_features = list(range(len(FEATURES)))
    weights = 1 / seconds
    is_kept = np.ones(len(steps), bool)
    for _ in range(4 * len(FEATURES)):
        weighted_rows = feature_matrix[is_kept][:, used_features] * weights[is_kept, None]
        column_scale = np.maximum(np.abs(weighted_rows).max(axis=0), 1e-30)
        weighted_seconds = seconds[is_kept] * weights[is_kept]
        solution = np.linalg.lstsq(weighted_rows / column_scale, weighted_seconds, rcond=None)[0]
        coefficients = solution / column_scale
        if coefficients.min() < 0:
            used_features.pop(int(coefficients.argmin()))
            continue
        predicted = np.maximum(feature_matrix[:, used_features] @ coefficients, 1e-6)
        relative_errors = np.abs(seconds / predicted - 1)
        weights = 1 / predicted
        is_kept = relative_errors <= max(5 * float(np.median(relative_errors)), 0.05)
    fitted = dict.fromkeys(FEATURES, 0.0)
    for feature_index, coefficient in zip(used_features, coefficients, strict=True):
        fitted[FEATURES[feature_index]] = float(coefficient)
    return Costs(**fitted)


def errors(costs: Costs, steps: list[MeasuredStep]) -> dict[str, Any]:
    """Return the error of the total time, and the median and the 90th percentile over steps."""
    predicted = [costs.seconds(step.features) for step in steps]
    real = [step.seconds for step in steps]
    step_errors = [
        abs(predicted_seconds / real_seconds - 1)
        for predicted_seconds, real_seconds in zip(predicted, real, strict=True)
    ]
    return {
        "steps": len(steps),
        "real_s": sum(real),
        "predicted_s": sum(predicted),
        "total_error": sum(predicted) / sum(real) - 1,
        "median_step_error": statistics.median(step_errors),
        "p90_step_error": percentile(step_errors, 90),
    }


def panel(costs: Costs, steps_by_trace: dict[str, list[MeasuredStep]]) -> Panel:
    """Draw predicted against real times with a point for a step, at most MAX_POINTS per trace."""
    series = []
    for name, steps in steps_by_trace.items():
        shown_steps = steps[:: -(-len(steps) // MAX_POINTS)]
        positions = [
            (1e3 * step.seconds, 1e3 * costs.seconds(step.features)) for step in shown_steps
        ]
        series.append(Series(name, positions))
    return points(
        "Time of a step",
        series,
        Axis("real, ms", is_logarithmic=True),
        Axis("predicted, ms", is_logarithmic=True),
        mark_size=2,
    )
