"""Models for the exact tier: fewer blocks of a known one, and a description of one that no family file knows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from torch import nn

from meshwright.base.errors import MeshwrightError, problem
from meshwright.model.adapters import adapted
from meshwright.model.families import BY_MODEL_TYPE
from meshwright.model.read_hf import spec_from_config
from meshwright.model.spec import AttentionSpec, BlockSpec, ModelSpec, ModulePaths, TensorSpec
from meshwright.parallel.build import build_model
from meshwright.parallel.module import find_blocks
from meshwright.program.units import frozen_names

UNKNOWN: Final = "unknown"
"""The family name of a model that no family file describes."""

_LENGTHS: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
"""Keys of a config that may hold the number of blocks."""


def uniform(spec: ModelSpec, frozen: tuple[str, ...]) -> bool:
    """Return whether all blocks are alike and the config says how many, so that fewer of them are a model too.

    ``frozen``: patterns of what does not train; blocks that differ in it are not alike.
    """
    if not any(spec.config.get(key) == spec.num_layers for key in _LENGTHS):
        return False
    kinds = spec.config.get("layer_types")
    if isinstance(kinds, list) and len(set(map(str, kinds))) > 1:
        return False
    names = frozen_names(spec, frozen)
    return len({_shape_of(block, names) for block in spec.blocks}) == 1


def _shape_of(block: BlockSpec, frozen: frozenset[str]) -> tuple[Any, ...]:
    suffixes = tuple(
        (t.name.partition(f".{block.index}.")[2], t.shape, t.role, t.name in frozen) for t in block.tensors
    )
    return block.kind, block.ffn_size, block.sliding_window, block.moe, suffixes


def reduced(spec: ModelSpec, blocks: int) -> ModelSpec:
    """Return the same model with ``blocks`` blocks: lists of the config with one entry a block are cut too."""
    config: dict[str, Any] = dict(spec.config)
    for key, value in spec.config.items():
        if key in _LENGTHS and value == spec.num_layers:
            config[key] = blocks
        elif isinstance(value, list) and len(value) == spec.num_layers:
            config[key] = (list(value) * -(-blocks // spec.num_layers))[:blocks]
    if spec.family == UNKNOWN:
        return unknown_spec(config, spec.name)
    made = spec_from_config(config, spec.name)
    return made if spec.adapter is None else adapted(made, spec.adapter)


def is_known(config: Mapping[str, Any]) -> bool:
    """Return whether a family file describes the model of ``config``."""
    return str(config.get("model_type")) in BY_MODEL_TYPE


def unknown_spec(config: Mapping[str, Any], name: str) -> ModelSpec:
    """Return what transformers' own module says of a model: its tensors, its list of blocks, where its parts are.

    Enough for data parallelism over its blocks; what tensors do is not known, so no other axis can cut them.

    Raises:
        MeshwrightError: E811 when transformers cannot build it, E549 without a list of blocks, E468 when it is not
            a causal language model of the usual parts.
    """
    model: Any = build_model(config, seed=0, device="meta")
    path, blocks = find_blocks(model)
    paths = {id(m): n for n, m in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    base = str(getattr(model, "base_model_prefix", ""))
    if embedding is None or head is None or id(embedding) not in paths or not hasattr(model, base):
        raise MeshwrightError(
            problem(
                "E468", where="model", found=f"{type(model).__name__} has no embedding and head of its own"
            )
        )
    tied = head.weight is embedding.weight
    tensors = [_tensor(n, p) for n, p in model.named_parameters()]
    inside = tuple(
        BlockSpec(
            index=i,
            kind="dense",
            ffn_size=0,
            tensors=tuple(t for t in tensors if t.name.startswith(f"{path}.{i}.")),
        )
        for i in range(len(blocks))
    )
    held = {t.name for block in inside for t in block.tensors}
    start = f"{paths[id(embedding)]}.weight"
    top = f"{paths[id(head)]}.weight"
    heads = [replace(t, role="head") for t in tensors if t.name == top and not tied]
    if tied:
        heads = [replace(_tensor(top, head.weight), role="head", tied_to=start)]
    rest = tuple(t for t in tensors if t.name not in held | {start, top})
    vocab, hidden = embedding.weight.shape
    heads_of = int(config.get("num_attention_heads") or config.get("n_head") or 1)
    return ModelSpec(
        name=name,
        family=UNKNOWN,
        architecture=type(model).__name__,
        hidden_size=int(hidden),
        ffn_size=0,
        vocab_size=int(vocab),
        max_position_embeddings=int(getattr(model.config, "max_position_embeddings", 0) or 1 << 30),
        attention=AttentionSpec(
            kind="gqa",
            num_heads=heads_of,
            num_kv_heads=heads_of,
            head_dim=max(1, int(hidden) // heads_of),
            value_head_dim=max(1, int(hidden) // heads_of),
        ),
        moe=None,
        tied_embeddings=tied,
        gated_mlp=False,
        activation="",
        norm="rmsnorm",
        dropout=0.0,
        embedding=tuple(replace(t, role="embedding") for t in tensors if t.name == start),
        blocks=inside,
        final=rest,
        head=tuple(heads),
        paths=ModulePaths(
            base=base, embedding=paths[id(embedding)], blocks=path, final_norm="", head=paths[id(head)]
        ),
        source="transformers' own module",
        config={"model_type": model.config.model_type, **config},
    )


def _tensor(name: str, p: nn.Parameter) -> TensorSpec:
    shape = tuple(p.shape)
    return TensorSpec(
        name=name,
        shape=shape,
        dims=tuple(f"dim {k}" for k in range(len(shape))),
        role="norm" if len(shape) < 2 else "mlp_in",
    )
