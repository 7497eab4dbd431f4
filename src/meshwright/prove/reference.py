"""The one-device reference: a plain PyTorch loop over the user's model.

It shares no code with the runtime but, in float32, who multiplies matrices on this machine.

What it leaves behind, per step: the loss, the gradient norm, every raw gradient and every updated weight, as a
safetensors file that the ranks map into memory and compare their own shards with. Beside them, in float64, which entries
of a tensor have had no gradient but rounding so far.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.model.quantised import quantised_tensors
from meshwright.model.randomness import draws_alike, drops_probabilities
from meshwright.model.spec import AdapterSpec, ModelSpec
from meshwright.parallel.adapters import initial_factor
from meshwright.parallel.build import build_model, frozen_names
from meshwright.parallel.dropout import Dropout, use_dropout
from meshwright.parallel.precision import Float64Throughout, dtype_of
from meshwright.parallel.products import use_products


class TokenBatch(NamedTuple):
    """A global batch: token ids and shifted labels, [G, T] each, and positions of packed documents of the same shape."""

    inputs_GT: Tensor
    labels_GT: Tensor
    positions_GT: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What one device computed.

    Attributes:
        folder: holds ``step-K.safetensors`` with "gradient/NAME", "weight/NAME" and, where a tensor has such entries,
            "rounding/NAME": True where its gradient was rounding alone at every step so far.
        losses: loss per step.
        norms: gradient norm per step, before clipping.
        gradient_max: per step, the largest absolute gradient of each tensor.
        weight_max: per step, the largest absolute weight of each tensor.
        reordered: per step, the loss with its tokens summed in other orders in float32; empty in float64.
        rounding: by tensor that has such, the number of entries whose gradient was rounding alone at every step, and of
            all entries; float64 only.
    """

    folder: str
    losses: tuple[float, ...]
    norms: tuple[float, ...]
    gradient_max: tuple[dict[str, float], ...]
    weight_max: tuple[dict[str, float], ...]
    reordered: tuple[tuple[float, ...], ...] = ()
    rounding: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides what one device computes."""

    config: dict[str, Any]
    seed: int
    precision: str
    frozen: tuple[str, ...]
    optimizer: Any
    rates: tuple[float, ...]
    max_norm: float | None
    rows_at_once: int
    adapter: AdapterSpec | None = None
    device: str = "cpu"
    matmul: str = "machine"
    """Who multiplies float32 matrices on a CPU: what a run's ranks have (``run.matmul``)."""
    reverse_rows: bool = False
    """Take the rows of the batch in reverse order: the control that shows what summation order alone does. Of two parts
    that are added either order is the same sum, so then all rows are taken at once."""


def run_reference(
    recipe: Recipe,
    spec: ModelSpec,
    batches: Sequence[TokenBatch],
    folder: str,
    weights: Mapping[str, Tensor] | None = None,
) -> Reference:
    """Train on ``batches`` on one device and save what every step computed; Returns the Reference."""
    # multiplied by whom a run's are: what that does to the sums is in one device's own error
    held = use_products(recipe.matmul, torch.device(recipe.device).type)
    fp64 = recipe.precision == "fp64"
    dtype = torch.float64 if fp64 else torch.float32
    model = build_model(recipe.config, seed=recipe.seed, dtype=dtype, weights=weights).to(recipe.device)
    # Without dropout nothing else of a model is drawn at random; with it the masks are those of the layouts.
    dropout = Dropout(recipe.seed) if draws_alike(spec) else None
    if dropout is None:
        model.eval()
    else:
        use_dropout(model, dropout, attends=drops_probabilities(spec))
    frozen = frozen_names(spec, recipe.frozen)
    params = dict(model.named_parameters())
    _round_to_four_bits(params, spec)
    if recipe.adapter is not None:
        model, params = with_peft(model, spec, recipe.seed)
    for name, p in params.items():
        p.requires_grad_(name not in frozen)
    trainable = {n: p for n, p in params.items() if p.requires_grad}
    optimizer = _optimizer(trainable, recipe.optimizer)
    stacked = {t.name: t.shape for t in spec.tensors() if t.role == "adapter" and t.of_experts}
    routed = {"output_router_logits": True} if recipe.config.get("output_router_logits") else {}
    coefficient = getattr(model, "router_aux_loss_coef", 0.0)
    autocast = recipe.precision in ("bf16", "fp16")
    losses: list[float] = []
    reordered: list[tuple[float, ...]] = []
    rounding: dict[str, Tensor] | None = None
    norms: list[float] = []
    gradient_max: list[dict[str, float]] = []
    weight_max: list[dict[str, float]] = []
    Path(folder).mkdir(parents=True, exist_ok=True)
    for k, (inputs_GT, labels_GT, positions_GT) in enumerate(batches):
        rows_G = torch.arange(inputs_GT.shape[0])
        if recipe.reverse_rows:
            rows_G = rows_G.flip(0)
        inputs_GT, labels_GT = inputs_GT.to(recipe.device), labels_GT.to(recipe.device)
        optimizer.zero_grad()
        valid = int((labels_GT != -100).sum())
        # The routers' term is one of each sequence: transformers' own number of a batch of one.
        rows = 1 if routed else recipe.rows_at_once
        if recipe.reverse_rows and not routed and len(rows_G.split(rows)) == 2:
            rows = len(rows_G)
        loss = 0.0
        tokens: list[Tensor] = []
        for rows_B in rows_G.split(rows):
            x_BT, y_BT = inputs_GT[rows_B], labels_GT[rows_B]
            # Positions that begin again, without a mask: transformers keeps documents apart.
            packed = {} if positions_GT is None else {"position_ids": positions_GT[rows_B].to(recipe.device)}
            if dropout is not None:
                dropout.step, dropout.rows_B = k + 1, rows_B
            context = (
                Float64Throughout()
                if fp64
                else torch.autocast(recipe.device, dtype=dtype_of(recipe.precision), enabled=autocast)
            )
            with context:
                out = model(input_ids=x_BT, use_cache=False, **packed, **routed)
            logits_BTV = out.logits if fp64 else out.logits.float()
            token_losses = F.cross_entropy(
                logits_BTV.flatten(0, 1), y_BT.flatten(), ignore_index=-100, reduction="none"
            )
            part = token_losses.sum()
            tokens.append(token_losses.detach()[y_BT.flatten() != -100].cpu())
            if routed:
                part = part + coefficient * out.aux_loss * (y_BT != -100).sum()
            (part / valid).backward()
            loss += part.item() / valid
        gradients = {n: _gradient(p) for n, p in trainable.items()}
        norm = torch.stack([g.double().square().sum() for g in gradients.values()]).sum().sqrt().item()
        losses.append(loss)
        reordered.append(
            () if fp64 else tuple(loss + off / valid for off in _order_errors(torch.cat(tokens)))
        )
        norms.append(norm)
        kept = {f"gradient/{n}": _stacked(n, g, stacked).clone().cpu() for n, g in gradients.items()}
        if fp64:
            rounding = _rounding_alone({n: kept[f"gradient/{n}"] for n in gradients}, rounding)
            kept |= {f"rounding/{n}": mask for n, mask in rounding.items()}
        if recipe.max_norm is not None and norm > recipe.max_norm:
            for g in gradients.values():
                g.mul_(recipe.max_norm / norm)
        for group in optimizer.param_groups:
            group["lr"] = recipe.rates[k]
        optimizer.step()
        kept |= {f"weight/{n}": _stacked(n, p.detach(), stacked).clone().cpu() for n, p in params.items()}
        save_file(kept, str(Path(folder) / f"step-{k}.safetensors"))
        gradient_max.append({n: kept[f"gradient/{n}"].abs().max().item() for n in gradients})
        weight_max.append({n: kept[f"weight/{n}"].abs().max().item() for n in params})
    if held is not None:
        held.close()
    return Reference(
        folder=folder,
        losses=tuple(losses),
        norms=tuple(norms),
        gradient_max=tuple(gradient_max),
        weight_max=tuple(weight_max),
        reordered=tuple(reordered),
        rounding={n: (int(mask.sum()), mask.numel()) for n, mask in (rounding or {}).items()},
    )


NOISE = 1e-12
"""Share of the largest gradient below which an entry's gradient is rounding (a key's bias, with learned positions)."""


def _rounding_alone(
    gradients: Mapping[str, Tensor], before: Mapping[str, Tensor] | None
) -> dict[str, Tensor]:
    """Return by name, where there are any, the entries whose gradient is rounding alone, now and ``before``.

    An entry of exactly 0 (a token that no row holds) is none of them, but for a bias beside others that are: there 0 is
    what rounding left by chance.
    """
    largest = max((g.abs().max().item() for g in gradients.values() if g.numel()), default=0.0)
    found: dict[str, Tensor] = {}
    for name in gradients if before is None else before:
        g = gradients[name].abs()
        small = g <= NOISE * largest
        mask = small & (g > 0)
        if g.ndim == 1 and mask.any():
            mask = small
        if before is not None:
            mask &= before[name]
        if mask.any():
            found[name] = mask
    return found


ORDERS = 8
"""Orders of summation in which a low precision's loss is looked at."""


def _order_errors(token_losses_N: Tensor) -> list[float]:
    """Return how far sums of the tokens' losses in float32, one after the other in ``ORDERS`` orders, are from exact."""
    values = token_losses_N.float().numpy()
    exact = float(values.astype(np.float64).sum())
    draw = np.random.default_rng(0)
    return [
        float(np.add.accumulate(draw.permutation(values))[-1]) - exact for _ in range(ORDERS) if len(values)
    ]


def with_peft(model: nn.Module, spec: ModelSpec, seed: int) -> tuple[nn.Module, dict[str, nn.Parameter]]:
    """Return peft's model around ``model`` as peft's users make it, and its parameters by logical name.

    The factors get the initial values of a run, which are an input of the comparison like the weights.
    """
    import peft

    adapter = spec.adapter
    assert adapter is not None
    factors = [t for t in spec.tensors() if t.role == "adapter"]
    leaves = {t.name.split(".")[-3] for t in factors if not t.of_experts}
    experts = {".".join(t.name.split("_lora_")[0].split(".")[-2:]) for t in factors if t.of_experts}
    config = peft.LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,  # pyright: ignore[reportArgumentType]
        target_modules=sorted(leaves),
        target_parameters=sorted(experts) or None,
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():  # peft sees GPT-2's transposed layers by itself, and says so
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False")
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")  # its own call
        wrapped: Any = peft.get_peft_model(model, config)  # pyright: ignore[reportArgumentType]
    dtype = next(model.parameters()).dtype
    params: dict[str, nn.Parameter] = {}
    around = {n: m for n, m in wrapped.named_modules() if type(m).__name__ == "ParamWrapper"}
    for name, p in wrapped.named_parameters():
        module, _, kind = name.removesuffix(".default.weight").rpartition(".")
        logical = ".".join(part for part in name.split(".")[2:] if part not in ("base_layer", "default"))
        if module in around:
            path = ".".join(part for part in module.split(".")[2:] if part != "base_layer")
            logical = f"{path}.{around[module].parameter_name}_{kind}"
        params[logical] = p
    with torch.no_grad():
        for tensor in factors:
            value = initial_factor(tensor, seed).to(dtype)
            if tensor.of_experts and not value.any():
                value = value.new_zeros(params[tensor.name].shape)
            params[tensor.name].data = value.reshape(params[tensor.name].shape)
    return wrapped, params


def _round_to_four_bits(params: Mapping[str, Tensor], spec: ModelSpec) -> None:
    """Give the matrices that ``spec`` holds in 4 bits the values that bitsandbytes makes of them and back, in place."""
    for tensor in quantised_tensors(spec):
        from bitsandbytes import functional as bnb  # pyright: ignore[reportMissingImports]

        assert spec.adapter is not None
        p = params[tensor.name]
        options = {"compress_statistics": spec.adapter.double, "quant_type": spec.adapter.levels}
        # As one row: on CPUs bitsandbytes 0.50 unpacks a table wrongly whose rows are no multiples of a block.
        packed, state = bnb.quantize_4bit(p.detach().float().reshape(-1), blocksize=64, **options)
        p.data = bnb.dequantize_4bit(packed, state).view(p.shape).to(p.dtype)


def _stacked(name: str, tensor: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> Tensor:
    """Return a factor of experts stacked by expert; peft has A as [experts * rank, in], B as [out, rank * experts]."""
    shape = shapes.get(name)
    if shape is None:
        return tensor
    if name.endswith("_lora_A"):
        return tensor.view(shape)
    experts, out, rank = shape
    return tensor.view(out, rank, experts).permute(2, 0, 1).contiguous()


def _gradient(p: Tensor) -> Tensor:
    if p.grad is None:
        p.grad = torch.zeros_like(p)
    return p.grad


def _optimizer(trainable: Mapping[str, Tensor], settings: Any) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in trainable.values() if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trainable.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [g for g in groups if g["params"]]
    if settings.name == "sgd":
        return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum)
    return torch.optim.AdamW(groups, lr=settings.lr, betas=tuple(settings.betas), eps=settings.eps)
