"""What a run computes and keeps each class of tensors in: number format and bytes, of one copy of the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from meshwright.layout.layout import Layout
from meshwright.layout.precision import PrecisionTable, precision_table
from meshwright.model.spec import ModelSpec, TensorSpec
from meshwright.program.units import frozen_names

CLASSES: Final = {
    "embedding": "embedding",
    "position": "embedding",
    "attention_in": "attention",
    "attention_out": "attention",
    "mlp_in": "feed-forward",
    "mlp_out": "feed-forward",
    "shared_in": "feed-forward",
    "shared_out": "feed-forward",
    "router": "router",
    "expert_in": "experts",
    "expert_out": "experts",
    "norm": "norms",
    "head": "head",
    "adapter": "adapters",
}
LOOKED_UP: Final = ("embedding", "norms")
"""Classes without a matrix product: autocast leaves them in the format that they rest in."""

LINEAR: Final = ("attention", "feed-forward")
"""Classes whose products fp8 casts."""


@dataclass(frozen=True, kw_only=True)
class TensorClass:
    """One class of tensors of a run.

    Attributes:
        name: the class.
        tensors: how many there are; a tied one is counted with the tensor whose storage it shares.
        elements: in all of them.
        trainable: those of them that are trained.
        storage: format at rest.
        compute: format in which they are used.
        reduction: format of their gradients on the wire; "none" where all are frozen.
        master: format of what the optimizer updates; "none" where all are frozen.
        storage_bytes: of one copy of them.
        gradient_bytes: of one copy of their gradients at rest.
        optimizer_bytes: of one copy of the optimizer's state for them.
    """

    name: str
    tensors: int
    elements: int
    trainable: int
    storage: str
    compute: str
    reduction: str
    master: str
    storage_bytes: int
    gradient_bytes: int
    optimizer_bytes: int


def tensor_classes(
    spec: ModelSpec, layout: Layout, frozen: Sequence[str], optimizer_states: int = 2
) -> tuple[TensorClass, ...]:
    """Return the classes of tensors of a run, in the model's order. ``optimizer_states``: values kept per parameter."""
    table = precision_table(layout)
    rest = frozen_names(spec, tuple(frozen))
    groups: dict[str, list[TensorSpec]] = {}
    for tensor in spec.tensors():
        if tensor.tied_to is None:
            groups.setdefault(CLASSES[tensor.role], []).append(tensor)
    found: list[TensorClass] = []
    for name, tensors in groups.items():
        elements = sum(t.numel for t in tensors)
        trainable = sum(t.numel for t in tensors if t.name not in rest)
        found.append(
            TensorClass(
                name=name,
                tensors=len(tensors),
                elements=elements,
                trainable=trainable,
                storage=table.storage,
                compute=_compute(name, table),
                reduction=table.reduce if trainable else "none",
                master=table.master if trainable else "none",
                storage_bytes=elements * table.bytes_of("storage"),
                gradient_bytes=trainable * table.bytes_of("gradient"),
                optimizer_bytes=trainable * table.bytes_of("optimizer") * optimizer_states,
            )
        )
    return tuple(found)


def _compute(name: str, table: PrecisionTable) -> str:
    if name in LOOKED_UP:
        return table.storage if table.autocast else table.gather
    return table.linear if name in LINEAR else table.compute


def states_of(optimizer: Any) -> int:
    """Return the values that an optimizer of a run file keeps per parameter: AdamW 2, SGD 1 with momentum, else 0."""
    if optimizer.name == "sgd":
        return 1 if optimizer.momentum else 0
    return 2
