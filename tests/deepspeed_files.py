"""Checkpoints as DeepSpeed writes them (names of files, keys, order, padding, its own classes in the pickle), for tests.

Written from the format that a real checkpoint of DeepSpeed 0.19.8 shows; compared with it where that is installed.
"""

from __future__ import annotations

import contextlib
import math
import sys
import types
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VERSION = "0.19.8"


@contextlib.contextmanager
def their_classes() -> Iterator[tuple[Any, Any]]:
    """Yield DeepSpeed's classes of a loss scaler and of a stage by their own names; gone afterwards."""
    import enum

    names = ("deepspeed", "deepspeed.runtime", "deepspeed.runtime.fp16", "deepspeed.runtime.zero")
    names += ("deepspeed.runtime.fp16.loss_scaler", "deepspeed.runtime.zero.config")
    modules = {name: types.ModuleType(name) for name in names}
    scaler = type("LossScaler", (), {"__module__": names[4]})
    stage = enum.IntEnum(
        "ZeroStageEnum", {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3}
    )
    stage.__module__ = names[5]
    modules[names[4]].LossScaler = scaler  # type: ignore[attr-defined]
    modules[names[5]].ZeroStageEnum = stage  # type: ignore[attr-defined]
    kept = {name: sys.modules.get(name) for name in names}
    sys.modules.update(modules)
    try:
        yield scaler, stage
    finally:
        for name, module in kept.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def write_deepspeed(
    folder: Path,
    weights: Mapping[str, Tensor],
    *,
    stage: int,
    world: int,
    frozen: Sequence[str] = (),
    shared: Mapping[str, str] | None = None,
    bf16: bool = False,
    step: int = 7,
    sub_group: int = 10**9,
    gap: int = 0,
    tag: str = "global_step7",
) -> Path:
    """Write the float32 ``weights`` as ``folder/tag`` with ``latest``; return the tag's folder.

    Two groups of parameters (matrices, vectors) as with weight decay; ``sub_group`` elements at most in one flat
    vector of ZeRO 3, as its ``sub_group_size``; ``gap`` elements behind every parameter of ZeRO 1 and 2.
    """
    out = folder / tag
    out.mkdir(parents=True)
    (folder / "latest").write_text(tag)
    trained = {n: t for n, t in weights.items() if n not in frozen}
    groups = [{n: t for n, t in trained.items() if (t.ndim > 1) == wide} for wide in (True, False)]
    if stage == 3:
        groups = [part for group in groups for part in _sub_groups(group, sub_group)]
    low = torch.bfloat16 if bf16 else torch.float32
    with their_classes() as (scaler, enum):
        for rank in range(world):
            vectors = [_part(group, stage, world, rank, gap) for group in groups]
            key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
            inner = {
                "state": {
                    k: {"step": torch.tensor(float(step)), "exp_avg": v * 0} for k, v in enumerate(vectors)
                },
                "param_groups": [{"lr": 1e-3, "params": [0]}],
            }
            state: dict[str, Any] = {
                "loss_scaler": scaler(),
                "zero_stage": enum(stage),
                "partition_count": world if stage == 3 else [world] * len(groups),
                "optimizer_state_dict" if stage == 3 else "base_optimizer_state": inner,
                key: vectors,
                "param_alignment_paddings": [[gap] * len(g) for g in groups] if stage < 3 else None,
                "ds_version": VERSION,
            }
            name = f"{'bf16_' if bf16 else ''}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            torch.save({"optimizer_state_dict": state, "ds_config": {}, "ds_version": VERSION}, out / name)
        for rank in range(world if stage == 3 else 1):
            whole = stage < 3
            model = {
                "module": OrderedDict(
                    (n, t.to(low) if whole else torch.empty(0, dtype=low)) for n, t in weights.items()
                ),
                "buffer_names": [],
                "param_shapes": [OrderedDict((n, t.shape) for n, t in g.items()) for g in groups],
                "frozen_param_shapes": OrderedDict((n, weights[n].shape) for n in frozen)
                if stage > 1
                else None,
                "frozen_param_fragments": OrderedDict(
                    (n, weights[n].to(low) if whole else _piece(weights[n].to(low), world, rank))
                    for n in frozen
                )
                if stage > 1
                else None,
                "shared_params": dict(shared or {}),
                "global_steps": step,
                "dp_world_size": world,
                "mp_world_size": 1,
                "ds_version": VERSION,
            }
            prefix = "" if whole else f"zero_pp_rank_{rank}_"
            torch.save(model, out / f"{prefix}mp_rank_00_model_states.pt")
    return out


def _sub_groups(group: Mapping[str, Tensor], limit: int) -> list[dict[str, Tensor]]:
    out: list[dict[str, Tensor]] = [{}]
    for name, tensor in group.items():
        if out[-1] and sum(t.numel() for t in out[-1].values()) + tensor.numel() > limit:
            out.append({})
        out[-1][name] = tensor
    return out


def _piece(tensor: Tensor, world: int, rank: int) -> Tensor:
    """Return a rank's equal piece of a parameter, padded."""
    size = math.ceil(tensor.numel() / world)
    flat = torch.cat(
        [tensor.reshape(-1), torch.full((size * world - tensor.numel(),), 99.0, dtype=tensor.dtype)]
    )
    return flat[rank * size : (rank + 1) * size].clone()


def _part(group: Mapping[str, Tensor], stage: int, world: int, rank: int, gap: int) -> Tensor:
    """Return a rank's flat vector of one group."""
    if stage == 3:
        return torch.cat([_piece(t, world, rank) for t in group.values()])
    flat = torch.cat([torch.cat([t.reshape(-1), torch.full((gap,), 99.0)]) for t in group.values()])
    flat = torch.cat([flat, torch.full((-flat.numel() % (2 * world),), 99.0)])
    size = flat.numel() // world
    return flat[rank * size : (rank + 1) * size].clone()
