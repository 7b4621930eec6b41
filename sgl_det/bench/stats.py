"""Medians, spreads, paired ratios and percentiles: what a figure of the results is made of."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

QUANTILES = (0, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 99, 100)


def spread(values: Sequence[float]) -> dict[str, float]:
    """value (the median), min and max, to five digits."""
    middle = statistics.median(values)
    return {"value": digits(middle), "min": digits(min(values)), "max": digits(max(values))}


def paired(ours: Mapping[int, float], normal: Mapping[int, float]) -> dict[str, float] | None:
    """ratio, ratio_min, ratio_max of ours over normal in the rounds that both have, or None."""
    rounds = sorted(set(ours) & set(normal))
    ratios = [ours[n] / normal[n] for n in rounds if normal[n] > 0]
    if not ratios:
        return None
    found = statistics.median(ratios), min(ratios), max(ratios)
    names = ("ratio", "ratio_min", "ratio_max")
    return dict(zip(names, (round(x, 4) for x in found), strict=True))


def percentile(values: Sequence[float], p: float) -> float:
    """With linear interpolation between the two nearest values."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * p / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def quantiles(values: Sequence[float]) -> list[float]:
    """The percentiles of `QUANTILES`."""
    return [digits(percentile(values, p)) for p in QUANTILES]


def digits(x: float, n: int = 5) -> float:
    """Rounded to n significant digits."""
    return float(f"{x:.{n}g}")
