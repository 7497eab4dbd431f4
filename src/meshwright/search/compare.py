"""Two predictions side by side: which terms make the difference, and whether they can be told apart at all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from meshwright.base.records import Prediction
from meshwright.base.units import format_seconds
from meshwright.cost.predict import BAND_QUANTILE

REPEAT_NOISE: Final = 0.015
"""Relative difference that a repeat of one layout shows by itself: public sweeps repeat within 0.6 to 2.4 %
(SimuMax 0.6, Hagemann 1, InternLM 0 to 1.7, prime-rl 2.4)."""
TOLD: Final = 3
"""How many terms a difference names."""


def spread(prediction: Prediction) -> float:
    """Return the standard deviation of the log of a prediction's error, from its 80 % band."""
    if prediction.step_time_low_s <= 0 or prediction.step_time_high_s <= 0:
        return 0.0
    return math.log(prediction.step_time_high_s / prediction.step_time_low_s) / (2.0 * BAND_QUANTILE)


def differences(prediction: Prediction, than: Prediction) -> dict[str, float]:
    """Return seconds by cause that ``prediction`` has more than ``than``, the largest first; equal ones left out."""
    other = than.time.as_dict()
    out = {name: value - other[name] for name, value in prediction.time.as_dict().items()}
    return dict(sorted(((n, d) for n, d in out.items() if d), key=lambda kv: -abs(kv[1])))


def can_be_told_apart(one: Prediction, other: Prediction) -> bool:
    """Return whether the model can say which of two layouts is faster, at 80 %.

    What two layouts have in common is wrong in both by the same factor and cancels. The terms in which they differ
    are each wrong by the prediction's spread, one independent of another. Below the noise of a repeat nothing is
    told apart.
    """
    gap = abs(one.step_time_s - other.step_time_s)
    if gap <= REPEAT_NOISE * min(one.step_time_s, other.step_time_s):
        return False
    error = math.sqrt(sum(d * d for d in differences(one, other).values()))
    return gap > BAND_QUANTILE * max(spread(one), spread(other)) * error


def like_the_best(predictions: Sequence[Prediction]) -> int:
    """Return how many predictions, the first with it and in their order, cannot be told apart from the first."""
    count = 0
    for prediction in predictions:
        if count and can_be_told_apart(predictions[0], prediction):
            break
        count += 1
    return count


def apart_sentence(predictions: Sequence[Prediction]) -> str:
    """Return the sentence about plans that cannot be told apart, or "" when the first can be."""
    count = like_the_best(predictions)
    if count < 2:
        return ""
    first, last = predictions[0].step_time_s, predictions[count - 1].step_time_s
    band = f"{format_seconds(predictions[0].step_time_low_s)} to {format_seconds(predictions[0].step_time_high_s)}"
    return (
        f"The first {count} plans cannot be told apart: they are {100 * abs(last / first - 1):.1f} % apart, the 80 % "
        f"band of the first is {band}, and a repeat differs by {100 * REPEAT_NOISE:.1f} %. Run them for a few steps."
    )


def because(prediction: Prediction, than: Prediction) -> str:
    """Return the terms that make ``prediction`` slower (or faster) than another, in words."""
    terms = list(differences(prediction, than).items())
    rest = sum(d for _, d in terms[TOLD:])
    told = [*terms[:TOLD], *([("the rest", rest)] if rest else [])]
    parts = [f"{name} {'+' if d > 0 else '-'}{format_seconds(abs(d))}" for name, d in told]
    return ", ".join(parts) or "no term differs"
