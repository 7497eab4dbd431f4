"""Rules of a base in 4 bits (kind ``qlora``): where the tensor axis may cut it, and what does not run with it so far."""

from __future__ import annotations

from meshwright.base.errors import Problem, problem
from meshwright.layout.layout import Layout
from meshwright.model.quantised import (
    BLOCK,
    is_quantised,
    quantised_tensors,
    tensor_axis_cuts_blocks,
)
from meshwright.model.sharding import rule, tp_ranges
from meshwright.model.spec import ModelSpec, TensorSpec


def cut_inside_blocks(spec: ModelSpec, tp: int) -> TensorSpec | None:
    """Return a matrix whose blocks a tensor axis of ``tp`` would cut, or None. The degree divides heads and widths."""
    if tp == 1 or not is_quantised(spec):
        return None
    tensors = (t for t in quantised_tensors(spec) if tensor_axis_cuts_blocks(t, tp, spec.attention))
    return next(tensors, None)


def quantised_cuts(spec: ModelSpec, layout: Layout) -> list[Problem]:
    """Return E282 where the tensor axis would cut a matrix inside its 4-bit blocks."""
    tensor = cut_inside_blocks(spec, layout.tp)
    if tensor is None:
        return []
    dim = rule(tensor).tp_dim
    assert dim is not None
    start, size = tp_ranges(tensor, layout.tp, layout.tp - 1, spec.attention)[0]
    inner = 1 if dim == len(tensor.shape) - 1 else tensor.shape[-1]
    fewer = [d for d in range(layout.tp - 1, 0, -1) if layout.tp % d == 0]
    near = next(d for d in fewer if cut_inside_blocks(spec, d) is None)
    rest = layout.tp // near
    found = (
        f"tp = {layout.tp} cuts {tensor.name} {list(tensor.shape)} on dim {dim} at {start * inner} of its weights, "
        f"in parts of {size * inner}"
    )
    return [
        problem(
            "E282",
            where="layout.tp",
            found=found,
            needs=f"begin and size of every part a multiple of {BLOCK} weights",
            do=f"tp = {near}; the other {rest} as dp or pp",
        )
    ]


def quantised_built(spec: ModelSpec, layout: Layout) -> list[Problem]:
    """Return E283 for what does not run with a base in 4 bits so far, E284 for a mixture's experts."""
    if not is_quantised(spec):
        return []
    problems: list[Problem] = []
    for wrong, key, found, do in (
        (
            layout.compile != "off",
            "compile",
            f"compile={layout.compile}: what unpacks a matrix is one call of bitsandbytes",
            "compile=off",
        ),
        (
            layout.offload.startswith("parameters"),
            "offload",
            f"offload={layout.offload}: only whole parameters go away from the device",
            f"offload={layout.offload.replace('parameters', 'optimizer')} | none",
        ),
    ):
        if wrong:
            problems.append(problem("E283", where=f"layout.{key}", found=found, do=do))
    if spec.moe is not None:
        experts = sum(t.numel for t in spec.tensors() if t.role in ("expert_in", "expert_out"))
        found = f"{experts:,} of {spec.num_parameters:,} parameters of {spec.name!r} are of its experts"
        problems.append(problem("E284", where="adapter.kind", found=found))
    return problems
