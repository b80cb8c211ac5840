"""Whether a quantity grows: a straight line through its samples, and how sure its slope is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

BLOCKS = 24
STUDENT = 2.1  # of 95 %, for about 20 degrees of freedom


class Trend(NamedTuple):
    per_hour: float
    error: float  # half of the slope's 95 % confidence interval
    hours: float  # that the samples span
    mean: float

    @property
    def growth(self) -> float:
        """By how much the quantity has grown for sure, over the whole time; not above 0: it may not
        have grown at all."""
        return (self.per_hour - self.error) * self.hours

    def __str__(self) -> str:
        return f"{self.per_hour:+.1f} ± {self.error:.1f} per hour"


def fit(seconds: Sequence[float], values: Sequence[float]) -> Trend:
    """The least-squares line through the lowest values of blocks of samples.

    What is taken for a moment and given back does not raise the lowest value; a leak does. And
    blocks are independent, which samples in a row are not.
    """
    if len(seconds) < 4:
        raise ValueError("a trend needs at least four samples")
    count = min(BLOCKS, len(seconds))
    x = np.array([part.mean() for part in np.array_split(np.asarray(seconds, float), count)]) / 3600
    y = np.array([part.min() for part in np.array_split(np.asarray(values, float), count)])
    centred = x - x.mean()
    slope = float(centred @ (y - y.mean()) / (centred @ centred))
    rest = y - y.mean() - slope * centred
    deviation = float(np.sqrt(rest @ rest / (count - 2) / (centred @ centred)))
    span = (seconds[-1] - seconds[0]) / 3600
    return Trend(slope, STUDENT * deviation, span, float(y.mean()))
