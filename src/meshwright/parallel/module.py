"""Any ``nn.Module`` with repeated blocks: what it is made of, and its data parallelism for a user's own loop."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from meshwright.base.errors import MeshwrightError, Problem, problem, refuse
from meshwright.layout.layout import Layout
from meshwright.layout.parse import parse_layout
from meshwright.layout.precision import precision_table
from meshwright.mesh import contract
from meshwright.mesh.device_mesh import build_mesh
from meshwright.mesh.env import check_world_size
from meshwright.parallel.precision import dtype_of, forward_context
from meshwright.parallel.products import Products, use_products
from meshwright.parallel.replicate import Replicate
from meshwright.parallel.zero import Zero, shard
from meshwright.program.plan import Plan


def find_blocks(model: nn.Module, path: str | None = None) -> tuple[str, list[nn.Module]]:
    """Return the dotted path and the modules of the list of repeated blocks that holds most parameters.

    Raises:
        MeshwrightError: E549 when there is none, or ``path`` names none.
    """
    found: list[tuple[int, str, list[nn.Module]]] = []
    for name, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and (path is None or name == path):
            members = list(module.children())
            if len(members) >= 2 and len({type(m) for m in members}) == 1:
                found.append((sum(p.numel() for p in module.parameters()), name, members))
    found = [f for f in found if f[0] > 0]
    if not found:
        lists = [n for n, m in model.named_modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
        raise MeshwrightError(
            problem(
                "E549",
                where=f"blocks={path}" if path else type(model).__name__,
                found="no list of at least two blocks of one class with parameters; lists seen: "
                + (", ".join(lists[:8]) or "none"),
            )
        )
    # An outer list wins over the lists inside its members.
    found.sort(key=lambda f: (-f[0], len(f[1])))
    return found[0][1], found[0][2]


def describe_module(model: nn.Module) -> dict[str, Any]:
    """Return the description of a module (see ``api.inspect``)."""
    seen: dict[int, str] = {}
    tied: list[list[str]] = []
    for name, p in model.named_parameters(remove_duplicate=False):
        if id(p) in seen:
            tied.append([seen[id(p)], name])
        else:
            seen[id(p)] = name
    params = dict(model.named_parameters())
    dtypes: dict[str, int] = {}
    for p in params.values():
        key = str(p.dtype).removeprefix("torch.")
        dtypes[key] = dtypes.get(key, 0) + p.numel()
    out: dict[str, Any] = {
        "name": type(model).__name__,
        "num_parameters": sum(p.numel() for p in params.values()),
        "num_trainable_parameters": sum(p.numel() for p in params.values() if p.requires_grad),
        "parameter_bytes": sum(p.numel() * p.element_size() for p in params.values()),
        "buffer_bytes": sum(b.numel() * b.element_size() for b in model.buffers()),
        "dtypes": dtypes,
        "tied": tied,
    }
    flags: list[str] = []
    try:
        path, blocks = find_blocks(model)
        sizes = [sum(p.numel() for p in b.parameters()) for b in blocks]
        inside = {id(p) for b in blocks for p in b.parameters()}
        out["blocks"] = {
            "path": path,
            "count": len(blocks),
            "class": type(blocks[0]).__name__,
            "parameters": sizes,
        }
        out["parameters_outside_blocks"] = sum(p.numel() for p in params.values() if id(p) not in inside)
        if len(blocks) > 40:
            flags.append("more than 40 layers")
    except MeshwrightError:
        out["blocks"] = None
        flags.append("no repeated blocks: sharding by block is not possible")
    classes = {type(m).__name__ for m in model.modules()}
    if any("moe" in c.lower() or "expert" in c.lower() for c in classes):
        flags.append("MoE")
    if tied:
        flags.append("tied parameters")
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()):
        flags.append("batch norm: its statistics are per rank")
    out["flags"] = flags
    return out


OWN: Final = {"loss": "eager", "recompute": "none", "offload": "none", "compile": "off"}
"""Keys of a layout that a user's own loop and module decide, with the value that says so."""

OWN_PRECISIONS: Final = ("fp32", "bf16", "fp64")


def _refuse_axes(layout: Layout) -> None:
    problems = [
        problem(
            "E900",
            where=f"layout.{axis}",
            found=f"{axis}={getattr(layout, axis)} in a user's own loop",
            needs="dp, zero and shard only: the other axes also change the loop",
            do=f"{axis}=1, or meshwright train for a Hugging Face model",
        )
        for axis in ("tp", "pp", "cp", "ep")
        if getattr(layout, axis) > 1
    ]
    problems += [
        problem(
            "E900",
            where=f"layout.{key}",
            found=f"{key}={getattr(layout, key)} in a user's own loop, where nothing would do it",
            needs=f"{key}={default}: the model's own code decides that",
            do=f"{key}={default}, or meshwright train for a Hugging Face model",
        )
        for key, default in OWN.items()
        if getattr(layout, key) != default
    ]
    if layout.precision not in OWN_PRECISIONS:
        scaled = "gradients that are scaled, and a step that all ranks skip together"
        problems.append(
            problem(
                "E900",
                where="layout.precision",
                found=f"precision={layout.precision} in a user's own loop",
                needs=f"one of {', '.join(OWN_PRECISIONS)}"
                + (f": fp16 needs {scaled}" if layout.precision == "fp16" else ""),
                do="precision=bf16, or meshwright train for a Hugging Face model",
            )
        )
    refuse(problems)


def _storage_problems(model: nn.Module, storage: str) -> list[Problem]:
    """Return E557 when trainable parameters are not in the dtype of the layout's parameters at rest."""
    wrong = [(n, p) for n, p in model.named_parameters() if p.requires_grad and p.dtype != dtype_of(storage)]
    if not wrong:
        return []
    name, first = wrong[0]
    return [
        problem(
            "E557",
            where=name,
            found=f"{len(wrong)} trainable parameters are not {storage}; the first is {first.dtype}".replace(
                "torch.", ""
            ),
        )
    ]


def _refuse_other_modules(model: nn.Module) -> None:
    """Refuse modules that are not alike on all ranks, before any of their bytes are sent.

    Communication: one all_gather of names, dtypes and shapes on the default group.
    """
    mine = {
        n: f"{t.dtype} {list(t.shape)}".removeprefix("torch.")
        for n, t in [*model.named_parameters(), *model.named_buffers()]
    }
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    names = {n: None for rank in ranks for n in rank}
    refuse(
        [
            problem(
                "E558",
                where=name,
                found="; ".join(f"rank {k}: {rank.get(name, 'none')}" for k, rank in enumerate(ranks)),
            )
            for name in names
            if len({rank.get(name) for rank in ranks}) > 1
        ]
    )


def parallelize_module(
    model: nn.Module,
    plan: Plan | Layout | str,
    *,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float],
    eps: float,
    optimizer: Callable[[Sequence[dict[str, Any]]], torch.optim.Optimizer] | None,
    rate: Callable[[int], float] | None,
    blocks: str | None,
    matmul: str = "machine",
) -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Do what ``api.parallelize`` says."""
    layout = parse_layout(plan) if isinstance(plan, str) else plan.layout if isinstance(plan, Plan) else plan
    _refuse_axes(layout)
    refuse(contract.missing(pipeline=False, saving=False))  # stages are refused above
    world = dist.get_world_size() if dist.is_initialized() else 1
    refuse(check_world_size(layout.world_size, world))
    rank = dist.get_rank() if dist.is_initialized() else 0
    device_type = next(model.parameters()).device.type
    view = build_mesh(layout, rank, device_type)
    table = precision_table(layout)
    _, members = find_blocks(model, blocks)
    refuse(_storage_problems(model, table.storage))
    if world > 1:
        _refuse_other_modules(model)
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.detach(), src=0)
    matrices = {n for n, p in model.named_parameters() if p.ndim >= 2}
    engine: Replicate | Zero
    mesh = view.submesh("dp_replicate", "dp_shard")
    if layout.zero >= 1 and layout.dp_shard > 1:
        assert mesh is not None
        low = table.gather != table.storage
        engine = shard(
            model,
            members,
            mesh,
            layout.zero,
            param_dtype=dtype_of(table.gather) if low else None,
            reduce_dtype=dtype_of(table.reduce) if low else None,
            average=True,
            keep_root=True,
        )
        _drop_after_evaluation(model, engine)
    else:
        inside = {id(p) for b in members for p in b.parameters()}
        root = [p for p in model.parameters() if p.requires_grad and id(p) not in inside]
        units = [("root", root)] + [
            (f"block {i}", [p for p in b.parameters() if p.requires_grad]) for i, b in enumerate(members)
        ]
        engine = Replicate(units, view.groups.get("dp_replicate"), average=True)
        engine.finish_with_backward()
        if table.autocast:
            _autocast(model, lambda: forward_context(table, device_type))
    engine.before_backward(last=True)
    _add_no_sync(model, engine)
    _hold(model, use_products(matmul, device_type))
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for n, p in named if n in matrices], "weight_decay": weight_decay},
        {"params": [p for n, p in named if n not in matrices], "weight_decay": 0.0},
    ]
    groups = [g for g in groups if g["params"]]
    made = (
        optimizer(groups) if optimizer else torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(made, rate or (lambda step: 1.0))
    return model, made, scheduler


def _autocast(model: nn.Module, context: Callable[[], Any]) -> None:
    forward = model.forward

    def autocast_forward(_self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with context():
            return forward(*args, **kwargs)

    model.forward = types.MethodType(autocast_forward, model)  # pyright: ignore[reportAttributeAccessIssue]


def _drop_after_evaluation(model: nn.Module, engine: Zero) -> None:
    """Drop what a forward without gradients gathered: no backward does, and an update would not reach the copies."""

    def drop(*_: Any) -> None:
        if not torch.is_grad_enabled():
            engine.reshard()

    model.register_forward_hook(drop)


def _hold(model: nn.Module, products: Products | None) -> None:
    """Keep ``products`` until the model is gone (outside of it: a copy of the model is none of theirs)."""
    if products is not None:
        weakref.finalize(model, products.close).atexit = False


def _add_no_sync(model: nn.Module, engine: Replicate | Zero) -> None:
    """Give the model a ``no_sync()`` context: backwards inside it only accumulate."""

    @contextmanager
    def no_sync(_self: nn.Module) -> Iterator[None]:
        engine.before_backward(last=False)
        try:
            yield
        finally:
            engine.before_backward(last=True)

    holder: Any = model
    holder.no_sync = types.MethodType(no_sync, model)
