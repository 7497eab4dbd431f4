"""Context parallelism on the user's own model: each sequence is cut over ``cp``, attention reaches across the cut.

Maths: everything but attention works token by token, so a rank computes it for the tokens it holds (``layout.context``
says which), at their true positions; labels are shifted before the cut, so that a loss at a border is like any other.
A length that does not divide is padded at its end: no query sees a later key, so nothing real sees the padding, and it
has no label. Gradients of parameters are sums over the ranks of ``cp``, as over replicas.

Communication: in attention only (``parallel.ring``, ``parallel.ulysses``); the gradients with those of ``dp``.

The model is not edited: its attention modules call what stands in transformers' attention registry under the name that
its config has. Ours reads the module's ``ContextAxis``; the mask function of the same name makes no mask, because
ours follows from positions. What a model passes beyond that is refused, never dropped.

Packed documents: the model is told positions that begin again, and in place of a mask the document of every position of
the whole rows, which transformers hands to each attention as it is. Dropout of attention probabilities is that of
``parallel.dropout``, by positions in the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.base.errors import MeshwrightError, problem
from meshwright.layout.context import Run, padded_length, runs
from meshwright.mesh.device_mesh import MeshView
from meshwright.model.spec import ModelSpec
from meshwright.parallel.dropout import ATTRIBUTE as PLACE
from meshwright.parallel.dropout import Drops, Place
from meshwright.parallel.ring import ring_attention, ring_of
from meshwright.parallel.tiles import Rule, positions_of
from meshwright.parallel.ulysses import ulysses_attention

NAME = "meshwright_context"
"""Under which transformers' registries know our attention and mask functions."""

ATTRIBUTE = "meshwright_context_axis"
"""Attribute of an attention module that holds its ``ContextAxis``."""

WINDOW = "meshwright_window"
"""Attribute of an attention module that holds its sliding window: some models only tell it to the mask."""

WITHOUT_MEANING = frozenset(
    {"position_ids", "use_cache", "cache_position", "output_router_logits", "is_causal", "cache"}
)
"""Arguments of an attention function that change nothing here: no cache in training, and causality is the rule."""


@dataclass(frozen=True)
class ContextAxis:
    """This rank's place on the context axis.

    Attributes:
        positions: the positions that this rank holds, in order, int64 [L]; those from ``seq_len`` on are padding.
        position_ids: what the model is told, [1, L]: padding repeats the last position, which every table has.
    """

    group: dist.ProcessGroup
    style: str
    runs: tuple[tuple[Run, ...], ...]
    seq_len: int
    padded: int
    positions: Tensor
    position_ids: Tensor

    def part(self, x_ABT: Tensor, fill: int) -> Tensor:
        """Return this rank's tokens [A, B, L] of whole sequences [A, B, T], padded with ``fill``."""
        x_ABT = nn.functional.pad(x_ABT, (0, self.padded - x_ABT.shape[-1]), value=fill)
        return x_ABT.index_select(-1, self.positions)

    def told(self, packed_BT: Tensor | None) -> dict[str, Tensor]:
        """Return what a decoder is told of positions: this rank's, and with packed rows the documents [B, 1, 1, padded].

        ``packed_BT``: positions of whole rows that begin again at 0 with each document; None where a row is one. Each
        place of the padding is a document of its own.
        """
        if packed_BT is None:
            return {"position_ids": self.position_ids}
        whole_BT = nn.functional.pad(packed_BT, (0, self.padded - packed_BT.shape[-1]))
        documents_BT = (whole_BT == 0).cumsum(-1)
        return {
            "position_ids": whole_BT.index_select(-1, self.positions),
            "attention_mask": documents_BT[:, None, None, :],
        }

    def documents(self, mask: Tensor | None, rows: int) -> Tensor | None:
        """Return the documents [B, padded] that ``told`` gave in place of a mask, or None for anything else."""
        if mask is None or mask.dtype != torch.int64 or tuple(mask.shape) != (rows, 1, 1, self.padded):
            return None
        return mask[:, 0, 0]

    def attention(
        self,
        q_BHLE: Tensor,
        k_BKLE: Tensor,
        v_BKLF: Tensor,
        rule: Rule,
        scale: float,
        documents_BT: Tensor | None = None,
        drops: Drops | None = None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """Return the output [B, H, L, F] of this rank's queries over the keys of all ranks."""
        if self.style == "ulysses":
            return ulysses_attention(
                q_BHLE,
                k_BKLE,
                v_BKLF,
                group=self.group,
                rule=rule,
                scale=scale,
                documents_BT=documents_BT,
                drops=drops,
                sinks_H=sinks_H,
            )
        ring = ring_of(self.group, self.runs, rule, scale, documents_BT, drops, sinks_H)
        return ring_attention(q_BHLE, k_BKLE, v_BKLF, ring)


def use_context(causal_lm: nn.Module, spec: ModelSpec, view: MeshView, seq_len: int) -> ContextAxis:
    """Make a whole model's attention reach over ``cp``, and return this rank's place on it.

    Communication: none now; see the module.

    Raises:
        MeshwrightError: E262 when the model does not take its attention from transformers' registry.
    """
    layout = view.layout
    padded = padded_length(layout, seq_len)
    held = tuple(runs(layout.cp_style, layout.cp, i, padded) for i in range(layout.cp))
    positions = positions_of(held[view.coords["cp"]], view.device)
    axis = ContextAxis(
        group=view.groups["cp"],
        style=layout.cp_style,
        runs=held,
        seq_len=seq_len,
        padded=padded,
        positions=positions,
        position_ids=positions.clamp(max=seq_len - 1)[None],
    )
    take_over(causal_lm, spec, axis)
    return axis


def take_over(causal_lm: nn.Module, spec: ModelSpec, axis: ContextAxis) -> None:
    """Make the attention of a whole model that of ``axis``, in place.

    Raises:
        MeshwrightError: E262 when the model does not take its attention from transformers' registry.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, context_attention)
    AttentionMaskInterface.register(NAME, no_mask)
    model: Any = causal_lm
    model.set_attn_implementation(NAME)
    if model.config._attn_implementation != NAME:
        raise MeshwrightError(
            problem(
                "E262", where="model", found=f"{type(causal_lm).__name__} does not take another attention"
            )
        )
    for block in spec.blocks:
        for tensor in block.tensors:
            if tensor.role == "attention_in" and tensor.name.endswith(".weight"):
                module = causal_lm.get_submodule(tensor.name.rpartition(".")[0].rpartition(".")[0])
                setattr(module, ATTRIBUTE, axis)
                setattr(module, WINDOW, block.sliding_window)


def context_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return the attention output [B, L, H, F] as transformers' attention functions do; no attention weights.

    Query [B, H, L, E], key and value [B, K, L, E or F], this rank's tokens, rotated at their positions; ``s_aux`` [H] is
    a score of each head without a value.

    Raises:
        MeshwrightError: E262 for a mask, argument or dropout without masks by element that would change the result.
    """
    axis: ContextAxis | None = getattr(module, ATTRIBUTE, None)
    extra = {n for n, v in others.items() if n not in WITHOUT_MEANING and v is not None and v is not False}
    found = [f"the argument {name}" for name in sorted(extra)]
    if axis is None:
        found.append("an attention that the family's table does not name")
    documents = None if axis is None else axis.documents(attention_mask, query.shape[0])
    if attention_mask is not None and documents is None:
        found.append("an attention mask of its own")
    place: Place | None = getattr(module, PLACE, None)
    if dropout and place is None:
        found.append(f"dropout {dropout:g} of attention weights")
    if others.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        found.append("attention that is not causal")
    if found or axis is None:
        raise _not_done(type(module).__name__, found)
    window = sliding_window if sliding_window is not None else getattr(module, WINDOW, None)
    window = window if window is not None and window < axis.padded else None
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    device = query.device.type
    if torch.is_autocast_enabled(device):
        low = torch.get_autocast_dtype(device)
        query, key, value = query.to(low), key.to(low), value.to(low)
    with torch.autocast(device, enabled=False):
        drops = place.drops(query, dropout, axis.seq_len) if dropout and place is not None else None
        rule = Rule(window=window, cap=softcap)
        out = axis.attention(query, key, value, rule, scale, documents, drops, s_aux)
    return out.transpose(1, 2).contiguous(), None


def no_mask(*_: Any, attention_mask: Tensor | None = None, use_vmap: bool = False, **__: Any) -> None:
    """Return no mask: what sees what follows from the positions.

    Raises:
        MeshwrightError: E262 for a mask that the model was given or a rule of its own.
    """
    found = ["a mask of padding"] if attention_mask is not None else []
    if use_vmap:
        found.append("a rule of its own for what sees what")
    if found:
        raise _not_done("the model", found)


def _not_done(where: str, found: list[str]) -> MeshwrightError:
    return MeshwrightError(problem("E262", where=where, found="; ".join(found)))


def local_batch(
    axis: ContextAxis | None, inputs_ABT: Tensor, labels_ABT: Tensor, ignore: int
) -> tuple[Tensor, Tensor]:
    """Return this rank's token ids and labels, [A, B, L] each; the whole ones without a context axis."""
    if axis is None:
        return inputs_ABT, labels_ABT
    return axis.part(inputs_ABT, 0), axis.part(labels_ABT, ignore)
