"""LoRA through ``peft``: its layers put into the model, with initial values that no layout changes.

peft's own module does the forward (the target's output plus alpha / rank times B A x), so a run trains what a user of
peft would train, and the saved factors load there again. Nothing of it communicates: the factors are parameters of
their block like any other.

Beside a mixture's experts peft adds B A to the stacked tensor in every forward, which costs a product and a copy of the
tensor's size. Here each expert's rows are multiplied with its own factors, which are stacked like the experts and cut
like them; ``peft_factors`` gives them the names and shapes that peft reads.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.base.errors import ExitCode, MeshwrightError, Problem, problem, refuse
from meshwright.model.adapters import expert_targets, factor_stem, is_second_factor, target_names
from meshwright.model.spec import ModelSpec, TensorSpec
from meshwright.parallel.expert import whole_forward
from meshwright.parallel.stage import get_module, logical_name

NAME = "default"
"""The name under which peft keeps the adapter in its modules."""


def missing_peft() -> list[Problem]:
    """Return E273 when peft is not installed."""
    if importlib.util.find_spec("peft") is not None:
        return []
    return [problem("E273", where="adapter", found="the module peft is not installed")]


def initial_factor(tensor: TensorSpec, seed: int) -> Tensor:
    """Return the first value of an adapter's factor in float32: B zero, A uniform in +-1 / sqrt(in).

    Drawn from ``seed`` and the tensor's name alone, so it depends neither on the layout nor on the order of modules.
    """
    if is_second_factor(tensor.name):
        return torch.zeros(tensor.shape)
    digest = hashlib.sha256(f"{seed}:{tensor.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    bound = 1.0 / math.sqrt(tensor.shape[-1])
    return (2.0 * torch.rand(tensor.shape, generator=generator) - 1.0) * bound


def lora_config(spec: ModelSpec) -> object:
    """Return peft's ``LoraConfig`` of the adapter of ``spec``."""
    from peft import LoraConfig

    assert spec.adapter is not None
    return LoraConfig(
        r=spec.adapter.rank,
        lora_alpha=spec.adapter.alpha,  # pyright: ignore[reportArgumentType] - peft divides by the rank, any number does
        lora_dropout=0.0,
        target_modules=list(target_names(spec, spec.adapter)),
        target_parameters=list(expert_targets(spec, spec.adapter)) or None,
        fan_in_fan_out=spec.family == "gpt2",
        bias="none",
        task_type="CAUSAL_LM",
    )


def add_adapters(causal_lm: nn.Module, spec: ModelSpec, seed: int) -> None:
    """Put the adapter of ``spec`` into ``causal_lm``, in place; its factors get the model's dtype.

    Raises:
        MeshwrightError: E273 without peft, E275 when peft made other factors than ``spec`` describes.
    """
    refuse(missing_peft(), ExitCode.ENVIRONMENT)
    from peft import inject_adapter_in_model

    assert spec.adapter is not None
    dtype = next(causal_lm.parameters()).dtype
    config: Any = lora_config(spec)
    if config.target_modules:
        config.target_parameters = None
        inject_adapter_in_model(config, causal_lm, adapter_name=NAME)
    _add_to_experts(causal_lm, spec, dtype)
    factors = {
        logical_name(name): p
        for name, p in causal_lm.named_parameters()
        if "lora_A" in name or "lora_B" in name
    }
    wanted = {t.name: t for t in spec.tensors() if t.role == "adapter"}
    made = {name: tuple(p.shape) for name, p in factors.items()}
    if made != {name: t.shape for name, t in wanted.items()}:
        differ = sorted(set(made.items()) ^ {(n, t.shape) for n, t in wanted.items()})
        raise MeshwrightError(
            problem(
                "E275", where="adapter", found=f"{len(made)} factors, {len(wanted)} described: {differ[:3]}"
            )
        )
    with torch.no_grad():
        for name, p in factors.items():
            p.data = initial_factor(wanted[name], seed).to(dtype)


def _add_to_experts(causal_lm: nn.Module, spec: ModelSpec, dtype: torch.dtype) -> None:
    """Give the experts of ``causal_lm`` factors without values, and a forward that multiplies with them."""
    assert spec.adapter is not None
    for tensor in spec.tensors():
        if tensor.role != "adapter" or not tensor.of_experts:
            continue
        path, _, name = tensor.name.rpartition(".")
        experts: Any = get_module(causal_lm, path)
        device = next(experts.parameters(recurse=False)).device
        experts.register_parameter(name, nn.Parameter(torch.empty(tensor.shape, dtype=dtype, device=device)))
        experts.lora_scaling = spec.adapter.alpha / spec.adapter.rank
        experts.forward = partial(whole_forward, experts, num_experts=int(experts.num_experts))


def peft_factors(spec: ModelSpec, factors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return an adapter's factors, given by logical name, under the names and in the shapes that peft gives them.

    Where several tensors of one module have an adapter, peft wraps the module once for each, the first innermost. Its A
    is [experts * rank, in] and its B [out, rank * experts], the expert running fastest.
    """
    out = dict(factors)
    wrapped: dict[str, list[TensorSpec]] = {}
    for tensor in spec.tensors():
        if tensor.role != "adapter" and tensor.of_experts and f"{factor_stem(tensor)}A" in factors:
            wrapped.setdefault(tensor.name.rpartition(".")[0], []).append(tensor)
    for path, tensors in wrapped.items():
        for depth, tensor in enumerate(reversed(tensors)):
            a_ERD, b_EOR = (out.pop(f"{factor_stem(tensor)}{which}") for which in "AB")
            inside = f"{path}{'.base_layer' * depth}"
            out[f"{inside}.lora_A.weight"] = a_ERD.flatten(0, 1)
            out[f"{inside}.lora_B.weight"] = b_EOR.permute(1, 2, 0).flatten(1)
    return out


def base_layer(layer: nn.Module) -> nn.Module:
    """Return the model's own layer below an adapter, or ``layer`` itself where there is none."""
    return layer.get_submodule("base_layer") if hasattr(layer, "base_layer") else layer


def adapter_output(layer: Any, x: Tensor) -> Tensor:
    """Return what an adapter adds to the output of the layer below: (alpha / rank) B A x."""
    a, b = layer.lora_A[NAME], layer.lora_B[NAME]
    return b(a(x.to(a.weight.dtype))) * layer.scaling[NAME]
