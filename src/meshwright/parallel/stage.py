"""Cutting an unchanged Hugging Face model into pipeline stages.

A stage is the user's own model with the blocks of other stages taken out. Nothing is rewritten: every
decoder of transformers takes ``inputs_embeds``, runs the blocks it holds and then its final norm, so a later
stage passes the received hidden states as ``inputs_embeds`` and an earlier stage has no norm and no head.
Blocks keep their global index as their name, so parameter names are those of the whole model.

Shape suffixes: B micro-batch, T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.model.logits import AfterHead, after_head
from meshwright.model.spec import ModelSpec
from meshwright.parallel.loss import IGNORE


class RouterTerm(Protocol):
    """A term of the loss from the logits of a mixture's routers (see ``parallel.router_loss``)."""

    def recording(self) -> AbstractContextManager[None]:
        """Note the logits of the forward inside."""
        ...

    def shape(self, batch: int) -> tuple[int, int, int]:
        """Return the shape of what travels between stages for ``batch`` sequences."""
        ...

    def noted(self, like: Tensor) -> Tensor:
        """Return what the term needs of the routers that were noted; ``like`` has the sequences as its first dim."""
        ...

    def loss(self, noted_2BE: Tensor, labels_BT: Tensor) -> Tensor:
        """Return the term of what all stages noted, summed like the token losses."""
        ...


class StageBlocks(nn.ModuleList):
    """The blocks of one stage under their global indices; iterates and slices like the whole list."""

    def __init__(self, blocks: Sequence[tuple[int, nn.Module]]) -> None:
        super().__init__()
        for index, block in blocks:
            self._modules[str(index)] = block

    def __getitem__(self, index: Any) -> Any:
        return list(self._modules.values())[index]

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(list(self._modules.values()))  # pyright: ignore[reportArgumentType]


class NoPositions(nn.Module):
    """Learned positions of a later stage: they were added on the first stage, so this adds zero."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size

    def forward(self, *given: Any, position_ids: Tensor | None = None) -> Tensor:
        """Return zeros, [1, T, D], whatever ``position_ids`` [1, T] are; OPT names its mask and cache before them."""
        ids: Tensor = given[0] if position_ids is None else position_ids
        return torch.zeros(1, ids.shape[-1], self.hidden_size, device=ids.device)


def get_module(root: nn.Module, path: str) -> nn.Module:
    """Return the module at a dotted ``path`` below ``root``."""
    return root.get_submodule(path)


def set_module(root: nn.Module, path: str, module: nn.Module) -> None:
    """Put ``module`` at a dotted ``path`` below ``root``."""
    parent, _, name = path.rpartition(".")
    setattr(root.get_submodule(parent) if parent else root, name, module)


def token_loss_sum(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """Return the sum over valid tokens of the cross-entropy, as a scalar in at least float32.

    ``labels_BT`` are already shifted (the target of position t stands at t) and hold ``IGNORE`` where there is
    no loss. With no valid token the sum is 0 and its gradient is 0, not NaN.
    """
    logits = logits_BTV if logits_BTV.dtype == torch.float64 else logits_BTV.float()
    return F.cross_entropy(
        logits.view(-1, logits.shape[-1]), labels_BT.reshape(-1), ignore_index=IGNORE, reduction="sum"
    )


def changed_logits(logits_BTV: Tensor, after: AfterHead) -> Tensor:
    """Return the model's logits of its head's product (see ``model.logits``)."""
    if after.divisor != 1.0:
        logits_BTV = logits_BTV / after.divisor
    return logits_BTV if after.cap is None else torch.tanh(logits_BTV / after.cap) * after.cap


class StageModule(nn.Module):
    """One stage of the user's model, or the whole of it when there is one stage.

    ``forward(x, labels)``: the first stage takes token ids [B, T]; later stages take hidden states [B, T, D].
    All but the last return hidden states [B, T, D] in ``wire_dtype``; the last returns the summed loss of
    the valid tokens (a scalar), so that logits live no longer than the loss needs them. Where gradients are made, the
    routers' term is added to it, in a pipeline by ``with_router_term``; without gradients (an evaluation) the loss is
    that of the tokens alone.
    """

    def __init__(
        self, causal_lm: nn.Module, spec: ModelSpec, *, first: bool, last: bool, wire_dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.is_first = first
        self.is_last = last
        self.wire_dtype = wire_dtype
        self.base_path = spec.paths.base
        self.head_path = spec.paths.head
        self.after_head = after_head(spec)
        self.forward_context: Callable[[], AbstractContextManager[object]] = nullcontext
        self.chunked_loss: Callable[[nn.Module, Tensor, Tensor], Tensor] | None = None
        self.loss_sum: Callable[[Tensor, Tensor], Tensor] = token_loss_sum
        self.router_loss: RouterTerm | None = None
        self.told: Callable[[Tensor | None], dict[str, Any]] = told_positions
        """What the decoder is told of positions, from those of packed rows [B, T] or None (see ``parallel.context``)."""

    @property
    def is_whole(self) -> bool:
        """Whether this stage is the whole model."""
        return self.is_first and self.is_last

    def logits(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return logits [B, T, V] of the last stage (this rank's columns of V where a tensor axis cuts it)."""
        if self.is_whole:
            return self.causal_lm(input_ids=x, use_cache=False, **self.told(positions)).logits
        head = self.causal_lm.get_submodule(self.head_path)
        return changed_logits(head(self._hidden(x, positions)), self.after_head)

    def _hidden(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        base = self.causal_lm.get_submodule(self.base_path)
        inputs = {"input_ids": x} if self.is_first else {"inputs_embeds": x}
        return base(**inputs, use_cache=False, **self.told(positions)).last_hidden_state

    def forward(self, x: Tensor, labels: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """Return hidden states, or the summed loss on the last stage (see the class).

        ``positions`` [B, T] begin again at 0 with each packed document; None where a row is one document. Every
        stage is given them: each of them builds its own mask.
        """
        router = self.router_loss
        if router is None or not torch.is_grad_enabled():
            return self._forward(x, labels, positions)
        with router.recording():
            out = self._forward(x, labels, positions)
        if not self.is_whole or labels is None:
            return out
        return out + router.loss(router.noted(labels), labels)

    def _forward(self, x: Tensor, labels: Tensor | None, positions: Tensor | None) -> Tensor:
        with self.forward_context():
            if self.chunked_loss is not None and labels is not None:
                return self.chunked_loss(
                    self.causal_lm.get_submodule(self.head_path), self._hidden(x, positions), labels
                )
            if self.is_last:
                out = self.logits(x, positions)
            else:
                out = self._hidden(x, positions).to(self.wire_dtype)
        if not self.is_last and out._is_view():
            # FSDP2 hooks onto the output, and an in-place use of a view would lose that hook.
            out = out.clone()
        return out if labels is None else self.loss_sum(out, labels)


def with_router_term(
    module: StageModule, out: Tensor, noted_2BE: Tensor | None, like: Tensor, labels_BT: Tensor | None
) -> Tensor | tuple[Tensor, Tensor]:
    """Return what a pipeline's stage hands on in a step: ``out``, with what the routers' term needs or with the term.

    Args:
        module: the stage, just run forward to ``out``.
        out: hidden states, or the loss on the last stage.
        noted_2BE: what the stages before have noted; None on the first.
        like: the stage's input, [B, ...].
        labels_BT: of the last stage.
    """
    router = module.router_loss
    if router is None:
        return out
    here_2BE = router.noted(like)
    whole_2BE = here_2BE if noted_2BE is None else noted_2BE + here_2BE
    if not module.is_last:
        return out, whole_2BE
    assert labels_BT is not None
    return out + router.loss(whole_2BE, labels_BT)


def told_positions(packed_BT: Tensor | None) -> dict[str, Any]:
    """Return what a decoder that holds whole rows is told of positions: nothing, or those of packed documents.

    With positions that begin again and neither a mask nor a cache, transformers masks attention by document.
    """
    return {} if packed_BT is None else {"position_ids": packed_BT, "attention_mask": None}


def at_positions(positions_ABT: Tensor | None, micro_batch: int) -> dict[str, Tensor]:
    """Return the keyword argument of a stage's forward for one micro-batch; none where rows are one document."""
    return {} if positions_ABT is None else {"positions": positions_ABT[micro_batch]}


def cut_stages(
    causal_lm: nn.Module,
    spec: ModelSpec,
    layers: Sequence[int],
    stages: Sequence[int],
    wire_dtype: torch.dtype,
) -> dict[int, StageModule]:
    """Return several stages of one ``causal_lm``: each has its own shell around its own blocks, nothing is copied.

    A tied embedding and head on two of the stages become two parameters of equal value.
    """
    shells = {stage: causal_lm if len(stages) == 1 else _shell(causal_lm, spec) for stage in stages}
    return {stage: cut_stage(shells[stage], spec, layers, stage, wire_dtype) for stage in stages}


def _shell(causal_lm: nn.Module, spec: ModelSpec) -> nn.Module:
    """Return ``causal_lm`` with the modules that hold stage parts copied, and all they hold shared."""
    paths = spec.paths
    parts = [paths.base, paths.blocks, paths.embedding, paths.final_norm, paths.head, *paths.embedding_extras]
    parts += [paths.positions] if paths.positions else []
    parents: set[str] = {paths.base}
    for part in parts:
        names = part.split(".")[:-1]
        parents |= {".".join(names[: n + 1]) for n in range(len(names))}
    shell = _shallow(causal_lm)
    for path in sorted(parents - {""}, key=lambda p: p.count(".")):
        set_module(shell, path, _shallow(get_module(shell, path)))
    return shell


def _shallow(module: nn.Module) -> nn.Module:
    """Return a copy of ``module`` with registers of its own, which hold the same parameters and modules."""
    out = copy.copy(module)
    for name, value in vars(module).items():
        if isinstance(value, dict):  # registers of parameters, buffers, modules and hooks
            out.__dict__[name] = copy.copy(value)  # pyright: ignore[reportUnknownArgumentType]
    return out


def cut_stage(
    causal_lm: nn.Module, spec: ModelSpec, layers: Sequence[int], stage: int, wire_dtype: torch.dtype
) -> StageModule:
    """Return stage ``stage`` of ``causal_lm``, which is changed in place: parts of other stages are dropped.

    ``layers`` are the layers per stage. A tied head that lands on another stage than its embedding keeps its own
    copy of the weight there.
    """
    first, last = stage == 0, stage == len(layers) - 1
    if not (first and last):
        start = sum(layers[:stage])
        blocks = list(get_module(causal_lm, spec.paths.blocks).children())
        kept = [(i, blocks[i]) for i in range(start, start + layers[stage])]
        set_module(causal_lm, spec.paths.blocks, StageBlocks(kept))
        _narrow_config(get_module(causal_lm, spec.paths.base), start, layers[stage])
        head = get_module(causal_lm, spec.paths.head)
        if not first:
            weight = head.get_parameter("weight")
            if spec.tied_embeddings and last:
                head = _shallow(head)
                head.register_parameter("weight", nn.Parameter(weight.detach().clone(), weight.requires_grad))
                set_module(causal_lm, spec.paths.head, head)
            set_module(causal_lm, spec.paths.embedding, nn.Identity())
            if spec.paths.positions:
                set_module(causal_lm, spec.paths.positions, NoPositions(spec.hidden_size))
            for extra in spec.paths.embedding_extras:
                set_module(causal_lm, extra, nn.Identity())
            base: Any = get_module(causal_lm, spec.paths.base)
            for name, nothing in ON_EMBEDDING.items():
                if hasattr(base, name):
                    setattr(base, name, nothing)
        if not last:
            set_module(causal_lm, spec.paths.final_norm, nn.Identity())
            set_module(causal_lm, spec.paths.head, nn.Identity())
    return StageModule(causal_lm, spec, first=first, last=last, wire_dtype=wire_dtype)


ON_EMBEDDING: Final[Mapping[str, float]] = MappingProxyType(
    {"embedding_multiplier": 1.0, "embedding_dropout": 0.0}
)
"""What a decoder does to its input besides modules: attribute, and the value that does nothing on a later stage."""


def _narrow_config(base: nn.Module, start: int, count: int) -> None:
    """Give the decoder a config of the layers it still has: some models index it by position in the loop."""
    config: Any = copy.deepcopy(base.config)
    types = getattr(config, "layer_types", None)
    if types is not None:
        config.layer_types = list(types[start : start + count])
    for name in ("num_hidden_layers", "n_layer"):
        if name in vars(config):
            setattr(config, name, count)
    base.config = config  # pyright: ignore[reportAttributeAccessIssue]


def logical_name(name: str) -> str:
    """Return the Hugging Face parameter name of a StageModule's parameter ``name``.

    Beside an adapter a layer's own parameters stand one level deeper ("base_layer"), and the adapter's below its name
    ("default"); logical names have neither.
    """
    name = name.removeprefix("causal_lm.")
    if ".lora_" in name:
        return name.replace(".default.", ".")
    return name.replace(".base_layer.", ".")
