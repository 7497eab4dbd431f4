"""A layout that the user names: illegal by which rule, slower by which terms, or too large and what cures it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshwright.base.errors import Kind, MeshwrightError, Problem, problem
from meshwright.base.records import Prediction
from meshwright.base.units import format_bytes, format_seconds
from meshwright.cluster.spec import ClusterSpec
from meshwright.cost.pieces import make_pricer
from meshwright.cost.predict import fits, predict_with
from meshwright.layout.batch import derive_batch
from meshwright.layout.check import check
from meshwright.layout.cut import resolve
from meshwright.layout.layout import Layout
from meshwright.model.spec import ModelSpec
from meshwright.schedule.generate import GENERATORS, generate
from meshwright.search.compare import because, can_be_told_apart, differences
from meshwright.search.reasons import change_that_fits


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The answer about one named layout.

    Attributes:
        layout: as it was named, its cut resolved where it is legal.
        problems: the rules that it breaks, and what it pays.
        prediction: None where it breaks a rule that is not merely "not built yet".
        slower_pct: how much slower than the best plan, if there is one.
        terms: seconds by cause that it has more than the best plan, the largest first.
        over_bytes: bytes above what the device has, 0 where it fits.
        sentences: the same in words, the verdict first.
    """

    layout: Layout
    problems: tuple[Problem, ...]
    prediction: Prediction | None
    slower_pct: float | None
    terms: dict[str, float]
    over_bytes: int
    sentences: tuple[str, ...]

    @property
    def legal(self) -> bool:
        """Whether it breaks no rule."""
        return not any(p.severity == "error" for p in self.problems)

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "layout": self.layout.as_dict(),
            "layout_text": self.layout.text(),
            "legal": self.legal,
            "problems": [p.as_dict() for p in self.problems],
            "fits": self.prediction is not None and fits(self.prediction),
            "predicted": None if self.prediction is None else self.prediction.as_dict(),
            "slower_pct": self.slower_pct,
            "terms_s": self.terms,
            "over_bytes": self.over_bytes,
            "why": list(self.sentences),
        }


def ask(
    spec: ModelSpec,
    cluster: ClusterSpec,
    layout: Layout,
    seq_len: int,
    global_batch: int,
    best: Prediction | None,
    best_text: str = "",
) -> Asked:
    """Return what is to be said about ``layout``, beside the best plan that was found.

    Raises:
        MeshwrightError: E405 a figure is not known.
    """
    problems: list[Problem] = []
    batch = None
    try:
        batch = derive_batch(layout, global_batch, seq_len)
    except MeshwrightError as error:
        problems += error.problems
    problems += check(spec, layout, batch, cluster)
    if layout.schedule not in GENERATORS:
        do = "meshwright estimate --layout, which reads the file"
        found = f"schedule={layout.schedule} is rows in a file"
        problems.append(problem("E301", where="layout.schedule", found=found, do=do))
    errors = [p for p in problems if p.severity == "error"]
    broken = [p for p in errors if p.kind is not Kind.CODE]
    if batch is None or broken or layout.schedule not in GENERATORS:
        said = tuple(f"Illegal by {p.code}: {p.found}; do {p.do or p.needs}." for p in broken or errors)
        return _answer(layout, problems, None, None, {}, 0, said)
    pricer = make_pricer(spec, cluster, seq_len, layout.precision)
    fixed = resolve(spec, layout, seq_len)
    schedule = generate(layout.schedule, layout.pp, batch.accumulation, layout.chunks)
    found = predict_with(pricer, fixed, batch, schedule)
    said = [f"{p.code}: {p.found}; today {p.do}." for p in errors]
    over = 0
    if not fits(found):
        capacity = cluster.device.memory.value
        over = max(0, round(found.peak_memory_bytes - capacity))
        said.append(
            f"It needs {format_bytes(found.peak_memory_bytes)} of {format_bytes(capacity)}: {format_bytes(over)} over."
            if over
            else f"Its peak of {format_bytes(found.peak_memory_bytes)} of {format_bytes(capacity)} runs out of memory "
            f"with a probability of {100 * found.oom_probability:.0f} %."
        )
        said.append(change_that_fits(pricer, layout, batch))
    slower, terms = None, dict[str, float]()
    if best is not None:
        slower = 100.0 * (found.step_time_s / best.step_time_s - 1.0)
        terms = differences(found, best)
        said.append(_slower(found, best, slower, best_text))
    return _answer(fixed, problems, found, slower, terms, over, tuple(said))


def _slower(found: Prediction, best: Prediction, slower: float, best_text: str) -> str:
    word = "slower" if slower >= 0 else "faster"
    head = (
        f"It takes {format_seconds(found.step_time_s)}, {abs(slower):.1f} % {word} than the best plan"
        f"{' (' + best_text + ')' if best_text else ''}: {because(found, best)}."
    )
    return head if can_be_told_apart(found, best) else f"{head} The model cannot tell the two apart."


def _answer(
    layout: Layout,
    problems: list[Problem],
    prediction: Prediction | None,
    slower: float | None,
    terms: dict[str, float],
    over: int,
    said: tuple[str, ...],
) -> Asked:
    return Asked(
        layout=layout,
        problems=tuple(problems),
        prediction=prediction,
        slower_pct=slower,
        terms=terms,
        over_bytes=over,
        sentences=said,
    )
