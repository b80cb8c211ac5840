"""From a real run to a cost model: every step's features and seconds, and the line through them; and how well it predicts."""

from __future__ import annotations

import statistics
from typing import Any, NamedTuple

import numpy as np

from octavo.core.simulate import FEATURES, Costs, Report, features, replay, requests_of
from octavo.core.trace import Entry
from octavo.llm import LLM
from octavo.types import Plan


class Step(NamedTuple):
    features: tuple[float, ...]
    seconds: float


def record(llm: LLM, trace: list[Entry]) -> tuple[list[Step], Report]:
    """Play a trace on the model, in real time."""
    steps: list[Step] = []

    def observe(plan: Plan, seconds: float) -> None:
        if plan.items:
            steps.append(Step(features(plan), seconds))

    engine = llm.new_engine(llm.schedule)
    engine.observers.append(observe)
    asked, _ = requests_of(trace, llm.config.vocab_size)
    return steps, replay(engine, asked)


def fit(steps: list[Step]) -> Costs:
    """Least squares on relative errors, so that short steps count as much as long ones. No feature may make a step shorter: one
    that would is left out, and the rest fitted again. A few steps that something else on the machine held up are left out too."""
    kept, used = steps, list(range(len(FEATURES)))
    for _ in range(2 * len(FEATURES)):
        a = np.array([[step.features[i] / step.seconds for i in used] for step in kept])
        scale = np.maximum(np.abs(a).max(axis=0), 1e-30)
        found = np.linalg.lstsq(a / scale, np.ones(len(kept)), rcond=None)[0] / scale
        costs = Costs(**dict.fromkeys(FEATURES, 0.0) | {FEATURES[i]: float(c) for i, c in zip(used, found, strict=True)})
        if found.min() < 0:
            used = [i for i, c in zip(used, found, strict=True) if c >= 0]
        elif len(kept) == len(steps):
            errors = [abs(costs.seconds(step.features) / step.seconds - 1) for step in steps]
            limit = 5 * statistics.median(errors)
            kept = [step for step, error in zip(steps, errors, strict=True) if error <= max(limit, 0.05)]
        else:
            break
    return costs


def errors(costs: Costs, steps: list[Step]) -> dict[str, Any]:
    """Of all steps together, and of the step in the middle."""
    predicted = [costs.seconds(step.features) for step in steps]
    real = [step.seconds for step in steps]
    each = [abs(p / r - 1) for p, r in zip(predicted, real, strict=True)]
    return {
        "steps": len(steps),
        "real_s": sum(real),
        "predicted_s": sum(predicted),
        "total_error": sum(predicted) / sum(real) - 1,
        "median_step_error": statistics.median(each),
    }
