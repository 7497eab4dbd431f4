"""What ``plan`` says beside its list: a named layout, the Pareto set, sensitivity, the decision tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from meshwright.cli.output import table

if TYPE_CHECKING:
    from meshwright.cluster.spec import ClusterSpec
    from meshwright.model.spec import ModelSpec
    from meshwright.program.plan import Plan
    from meshwright.search.asked import Asked
    from meshwright.search.search import SearchResult


@dataclass(frozen=True)
class Request:
    """What was asked of the planner: its model, cluster and sizes, and the other arguments of the search."""

    spec: ModelSpec
    cluster: ClusterSpec
    seq_len: int
    global_batch: int
    search: dict[str, Any]


def named(request: Request, text: str, best: Plan | None) -> Asked:
    """Return the answer about the layout in ``text``.

    Raises:
        MeshwrightError: E11x for a text that is not a layout, E405 a figure is not known.
    """
    from meshwright.layout.parse import parse_layout, written_keys
    from meshwright.search.asked import ask

    layout = parse_layout(text, "--why")
    if "precision" not in written_keys(text) and best is not None:
        layout = replace(layout, precision=best.layout.precision)
    prediction = None if best is None else best.prediction
    shown = "" if best is None else replace(best.layout, cut="auto").text()
    return ask(
        request.spec, request.cluster, layout, request.seq_len, request.global_batch, prediction, shown
    )


def cheapest(request: Request) -> tuple[Request, dict[str, Any]]:
    """Return the request on as many of its nodes as cost least, and what each number of them costs, in JSON form.

    Raises:
        MeshwrightError: E410 no price is known; what the search raises.
    """
    from meshwright.cluster.load import with_gpus
    from meshwright.search.price import price_sentence, sizes

    found = sizes(request.spec, request.cluster, request.seq_len, request.global_batch, **request.search)
    best = found[0]
    prices = {"sizes": [s.as_dict() for s in found], "why": price_sentence(found)}
    if best.price is None or best.num_gpus == request.cluster.num_gpus:
        return request, prices
    return replace(request, cluster=with_gpus(request.cluster, best.num_gpus)), prices


def not_built(request: Request, plan: Plan) -> list[str]:
    """Return what of a plan cannot run yet, each in words; empty for what runs."""
    from meshwright.layout.check import check_built
    from meshwright.layout.check_offload import precision_built

    found = check_built(plan.layout, request.spec) + precision_built(plan.layout)
    return [p.found for p in found if p.severity == "error"]


def told_apart(result: SearchResult) -> tuple[int, str]:
    """Return how many plans, the best with them, cannot be told apart, and the sentence that says so ("" for one)."""
    from meshwright.search.compare import apart_sentence, like_the_best

    predictions = [p.prediction for p in result.plans if p.prediction is not None]
    return like_the_best(predictions), apart_sentence(predictions)


def explained(request: Request, result: SearchResult) -> dict[str, Any]:
    """Return the decision tree with its layout judged, and what better clusters would give, in JSON form."""
    from meshwright.search.search import default_precision
    from meshwright.search.tree import decide
    from meshwright.search.whatif import sensitivity

    best = result.plans[0] if result.plans else None
    precision = best.layout.precision if best else request.search.get("precision")
    precision = None if precision == "any" else precision
    tree = decide(
        request.spec,
        request.cluster,
        request.seq_len,
        precision or default_precision(request.cluster),
    )
    judged = named(request, tree.layout.text(), best)
    agrees = best is not None and replace(best.layout, cut="auto") == tree.layout
    changes = sensitivity(
        request.spec, request.cluster, request.seq_len, request.global_batch, best, **request.search
    )
    return {
        "tree": tree.as_dict() | {"agrees": agrees, "why": list(judged.sentences)},
        "sensitivity": [c.as_dict() for c in changes],
    }


def explained_text(held: dict[str, Any]) -> str:
    """Return the printed form of ``explained``."""
    tree = held["tree"]
    rows = [(s["rule"], s["found"], s["then"]) for s in tree["steps"]]
    verdict = "the search agrees." if tree["agrees"] else "the search chose otherwise."
    lines = [
        "the five-minute decision tree, as a cross-check:",
        table(("rule", "here", "then"), rows),
        f"its layout: {tree['layout_text']}; {verdict}",
        *(f"  {sentence}" for sentence in tree["why"]),
        "",
        "if one thing were better:",
        *(f"  {c['why']}" for c in held["sensitivity"]),
    ]
    return "\n".join(lines)


def front_text(items: Sequence[dict[str, Any]]) -> str:
    """Return the Pareto set: faster only with more memory, one line each."""
    from meshwright.base.units import format_bytes, format_seconds

    rows = [
        (
            format_seconds(i["predicted"]["step_time_s"]),
            format_bytes(i["predicted"]["peak_memory_bytes"]),
            i["layout_text"],
        )
        for i in items
    ]
    return "the Pareto set, each faster than the next and larger:\n" + table(("step", "peak", "layout"), rows)
