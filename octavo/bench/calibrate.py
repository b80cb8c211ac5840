"""From a real run to a cost model: every step's features and seconds, and the line through them; and how well it predicts."""

from __future__ import annotations

import statistics
from typing import Any, NamedTuple

import numpy as np

from octavo.bench.picture import Axis, Panel, Series, points
from octavo.core.simulate import FEATURES, Costs, Report, features, percentile, replay, requests_of
from octavo.core.trace import TraceEntry
from octavo.events import Event, StepLanded
from octavo.llm import LLM

MOST_POINTS = 400  # of a trace, in a picture


class MeasuredStep(NamedTuple):
    features: tuple[float, ...]
    seconds: float


def record(llm: LLM, trace: list[TraceEntry]) -> tuple[list[MeasuredStep], Report]:
    """Play a trace on the model, in real time."""
    steps: list[MeasuredStep] = []

    def measure(event: Event) -> None:
        if isinstance(event, StepLanded) and event.plan.items:
            steps.append(MeasuredStep(features(event.plan), event.seconds))

    engine = llm.new_engine(llm.schedule)
    engine.events.subscribe(measure, StepLanded)
    asked, _ = requests_of(trace, llm.config.vocab_size)
    return steps, replay(engine, asked)


def fit(steps: list[MeasuredStep]) -> Costs:
    """Least squares on relative errors, so that short steps count as much as long ones: relative to what was predicted the round
    before, because what was measured would favour too little. No feature may make a step shorter: one that would is left out,
    and the rest fitted again. Steps that something else on the machine held up, far off the line, do not count."""
    a = np.array([step.features for step in steps])
    seconds = np.array([step.seconds for step in steps])
    used = list(range(len(FEATURES)))
    weight = 1 / seconds
    kept = np.ones(len(steps), bool)
    for _ in range(4 * len(FEATURES)):
        rows = a[kept][:, used] * weight[kept, None]
        scale = np.maximum(np.abs(rows).max(axis=0), 1e-30)
        found = np.linalg.lstsq(rows / scale, seconds[kept] * weight[kept], rcond=None)[0] / scale
        if found.min() < 0:
            used.pop(int(found.argmin()))
            continue
        predicted = np.maximum(a[:, used] @ found, 1e-6)
        off = np.abs(seconds / predicted - 1)
        weight = 1 / predicted
        kept = off <= max(5 * float(np.median(off)), 0.05)
    return Costs(
        **dict.fromkeys(FEATURES, 0.0)
        | {FEATURES[i]: float(c) for i, c in zip(used, found, strict=True)}
    )


def errors(costs: Costs, steps: list[MeasuredStep]) -> dict[str, Any]:
    """Of all steps together, of the step in the middle, and what nine in ten do not exceed."""
    predicted = [costs.seconds(step.features) for step in steps]
    real = [step.seconds for step in steps]
    each = [abs(p / r - 1) for p, r in zip(predicted, real, strict=True)]
    return {
        "steps": len(steps),
        "real_s": sum(real),
        "predicted_s": sum(predicted),
        "total_error": sum(predicted) / sum(real) - 1,
        "median_step_error": statistics.median(each),
        "p90_step_error": percentile(each, 90),
    }


def panel(costs: Costs, played: dict[str, list[MeasuredStep]]) -> Panel:
    """Predicted against real, a point a step: of each trace some hundreds, evenly spread."""
    series = []
    for name, steps in played.items():
        shown = steps[:: -(-len(steps) // MOST_POINTS)]
        series.append(
            Series(name, [(1e3 * s.seconds, 1e3 * costs.seconds(s.features)) for s in shown])
        )
    return points(
        "A step's time", series, Axis("real, ms", log=True), Axis("predicted, ms", log=True), size=2
    )
