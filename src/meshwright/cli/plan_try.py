"""What ``plan --try`` says: each plan's terms as predicted and as measured, what was learnt, and both rankings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshwright.base.errors import MeshwrightError, Problem, problem
from meshwright.base.units import format_bytes, format_seconds
from meshwright.cli.output import show_line, table

if TYPE_CHECKING:
    from meshwright.base.records import Measurement
    from meshwright.cli.plan_answers import Request
    from meshwright.cluster.spec import ClusterSpec
    from meshwright.orchestrate.trying import Learnt
    from meshwright.program.plan import Plan
    from meshwright.search.search import SearchResult


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What was tried and learnt, and the ranking after it."""

    learnt: Learnt
    after: Sequence[tuple[Plan, Measurement | None]]
    memory_class: dict[str, Any]


def check_try(cluster: ClusterSpec, *, unbuilt: bool) -> None:
    """Refuse what cannot be tried, before the search.

    Raises:
        MeshwrightError: E479 beside --unbuilt, E473 not this machine, E474 too many ranks.
    """
    if unbuilt:
        raise MeshwrightError(problem("E479", where="meshwright plan", found="--try and --unbuilt"))
    from meshwright.orchestrate.trying import check_here

    check_here(cluster, cluster.num_gpus)


def try_best(
    request: Request, probed: ClusterSpec, result: SearchResult, count: int, top: int, model_path: str
) -> Outcome:
    """Run the best ``count`` plans, feed them back, and search again; ``probed`` has the probe's own figures.

    Raises:
        MeshwrightError: E477, E478, E813.
    """
    from meshwright.mesh.env import cache_folder
    from meshwright.orchestrate.trying import learn, ranked, try_plans
    from meshwright.search.search import search

    tried = try_plans(result.plans[:count], request.cluster, show_line)
    learnt = learn(tried, probed, cache_folder())
    again = search(
        request.spec,
        learnt.cluster,
        request.seq_len,
        request.global_batch,
        top=max(top, count),
        model_path=model_path,
        **request.search,
    )
    after = ranked(again.plans, learnt.tried, request.search["objective"])
    return Outcome(learnt=learnt, after=after, memory_class=_memory_class(request, result.plans[0]))


def _memory_class(request: Request, best: Plan) -> dict[str, Any]:
    """Return the decision tree's memory class, predicted and from three measured steps."""
    from meshwright.orchestrate.trying import class_by_steps
    from meshwright.search.tree import memory_class

    precision = best.layout.precision
    said, predicted = memory_class(request.spec, request.cluster, request.seq_len, precision)
    show_line("memory class: three steps of the whole model with one sequence on one device")
    found = class_by_steps(request.spec, request.cluster, request.seq_len, precision)
    out: dict[str, Any] = {
        "predicted": said.as_dict() | {"class": predicted},
        "measured": None,
        "agree": None,
    }
    if isinstance(found[0], Problem):
        return out | {"problems": [p.as_dict() for p in found if isinstance(p, Problem)]}
    step, measured = found
    assert not isinstance(step, Problem)
    return out | {"measured": step.as_dict() | {"class": measured}, "agree": measured == predicted}


def as_dict(outcome: Outcome) -> dict[str, Any]:
    """Return the JSON form: the value of ``try``."""
    learnt = outcome.learnt
    before = sorted(learnt.tried, key=lambda t: t.number)
    return {
        "machine": learnt.cluster.machine,
        "ledger": str(learnt.ledger),
        "profile": None if learnt.profile is None else learnt.profile.as_dict(),
        "tries": [t.as_dict() for t in before],
        "before": [
            {
                "number": t.number,
                "layout_text": t.plan.layout.text(),
                "step_time_s": t.plan.prediction.step_time_s if t.plan.prediction else None,
            }
            for t in before
        ],
        "after": [
            {
                "number": number,
                "layout_text": plan.layout.text(),
                "predicted_step_time_s": plan.prediction.step_time_s if plan.prediction else None,
                "measured_step_time_s": now.step_time_s if now is not None else None,
            }
            for number, (plan, now) in enumerate(outcome.after, start=1)
        ],
        "memory_class": outcome.memory_class,
    }


def as_text(shown: dict[str, Any]) -> str:
    """Return the printed form of ``as_dict``."""
    lines: list[str] = []
    for one in shown["tries"]:
        lines += ["", f"#{one['number']} {one['layout_text']}"]
        lines += [f"    failed: {p['code']} {p['found']}" for p in one["problems"]]
        if one["terms"] is not None:
            lines.append(_terms_table(one["terms"]))
        if one["disturbed"]:
            stolen = one["stolen_share"]
            waited = (
                "" if stolen is None else f" (its ranks waited {100 * stolen:.0f} % of a step for a core)"
            )
            lines.append(f"    its steps were disturbed{waited}: it is not used in the fit")
    lines += ["", *_learnt(shown)]
    rows = [
        (
            str(a["number"]),
            _place(a["layout_text"], shown["before"]),
            a["layout_text"],
            _seconds(a["predicted_step_time_s"]),
            _seconds(a["measured_step_time_s"]),
        )
        for a in shown["after"]
    ]
    lines += [
        "the ranking with what was learnt (measured where it ran):",
        table(("#", "was", "layout", "predicted", "measured"), rows, right=(0, 1, 3, 4)),
    ]
    return "\n".join(lines)


def _terms_table(terms: dict[str, dict[str, float]]) -> str:
    rows: list[tuple[str, str, str, str]] = []
    for name, pair in terms.items():
        what, _, unit = name.rpartition("_")
        show, kind = (format_seconds, "time") if unit == "s" else (format_bytes, "memory")
        error = f"{100 * (pair['predicted'] / pair['measured'] - 1):+.1f} %" if pair["measured"] else "-"
        term = f"{what.replace('_', ' ')} ({kind})"
        rows.append((term, show(pair["predicted"]), show(pair["measured"]), error))
    return table(("term", "predicted", "measured", "error"), rows, right=(1, 2, 3))


def _learnt(shown: dict[str, Any]) -> list[str]:
    profile = shown["profile"]
    found = shown["memory_class"]
    said = f"memory class predicted: {found['predicted']['then']}"
    if found["measured"] is None:
        said += f"; not measured: {found['problems'][0]['found']}"
    else:
        same = "the same" if found["agree"] else "another"
        said += (
            f"; from three measured steps {same}: {found['measured']['found']}: {found['measured']['then']}"
        )
    if profile is None:
        return ["nothing was learnt: no run was quiet enough to be used", said]
    factors = ", ".join(f"{name} x {value:.2f}" for name, value in profile["factors"].items())
    told = (
        "" if profile["held_out_pct"] is None else f"; each from the others {profile['held_out_pct']:.1f} %"
    )
    return [
        f"learnt from {profile['runs']} runs of this machine ({profile['left_out']} not used): seconds of {factors}",
        f"error of step times {profile['before_pct']:.1f} % by the probe, {profile['after_pct']:.1f} % fitted{told}",
        f"ledger: {shown['ledger']}; later plans on this probe use it",
        said,
    ]


def _place(layout_text: str, before: list[dict[str, Any]]) -> str:
    return next((str(b["number"]) for b in before if b["layout_text"] == layout_text), "-")


def _seconds(value: float | None) -> str:
    return "-" if value is None else format_seconds(value)
