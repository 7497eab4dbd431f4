"""The rules of the context axis: heads, padding, and what it cannot run so far."""

from __future__ import annotations

from meshwright.base.errors import Problem, problem
from meshwright.layout import built
from meshwright.layout.context import length_unit, padded_length
from meshwright.layout.layout import Layout
from meshwright.model.randomness import drops_probabilities, layout_dependent
from meshwright.model.spec import ModelSpec


def padding(layout: Layout, seq_len: int) -> list[Problem]:
    """Return W260 when the ranks of the context axis hold more positions than the sequence has."""
    padded, unit = padded_length(layout, seq_len), length_unit(layout)
    if layout.cp == 1 or padded == seq_len:
        return []
    below = seq_len // unit * unit
    fits = f"{below} | {padded}" if below else str(padded)
    by = f"cp = {layout.cp}, cp_style={layout.cp_style}" + (f", tp = {layout.tp}" if layout.sp else "")
    return [
        problem(
            "W260",
            where="seq_len",
            found=f"seq_len = {seq_len} does not split in {unit} pieces ({by}): padded to {padded}, "
            f"{100 * (padded - seq_len) / padded:.1f} % of the positions are computed for nothing",
            do=f"seq_len = {fits} pads nothing",
        )
    ]


def context_built(spec: ModelSpec, layout: Layout) -> list[Problem]:
    """Return what of ``spec`` the context axis cannot run so far (E260)."""
    cp = layout.cp
    if cp == 1:
        return []
    reasons: list[tuple[str, str, str]] = []
    if spec.family not in built.CONTEXT_FAMILIES:
        families = "one of " + ", ".join(built.CONTEXT_FAMILIES) + ", or cp = 1"
        do = f"cp = 1,dp = {layout.dp * cp}"
        reasons.append((f'cp = {cp} with "{spec.name}" of family {spec.family}', families, do))
    drawn = layout_dependent(spec)
    if drops_probabilities(spec) and drawn:
        what = f"attention dropout with {drawn[0]}, whose masks are drawn rank by rank, and cp = {cp}"
        reasons.append((what, "either of them 0, or cp = 1", "attention_dropout = 0"))
    return [problem("E260", where="layout.cp", found=f, needs=n, do=d) for f, n, d in reasons]
