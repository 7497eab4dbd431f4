"""LoRA through ``peft``: its layers put into the model, with initial values that no layout changes.

peft's own module does the forward (the target's output plus alpha / rank times B A x), so a run trains what a user of
peft would train, and the saved factors load there again. Nothing of it communicates: the factors are parameters of
their block like any other.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.base.errors import ExitCode, MeshwrightError, Problem, problem, refuse
from meshwright.model.adapters import target_names
from meshwright.model.spec import ModelSpec, TensorSpec

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
    if tensor.name.endswith("lora_B.weight"):
        return torch.zeros(tensor.shape)
    digest = hashlib.sha256(f"{seed}:{tensor.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    bound = 1.0 / math.sqrt(tensor.shape[1])
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

    dtype = next(causal_lm.parameters()).dtype
    inject_adapter_in_model(lora_config(spec), causal_lm, adapter_name=NAME)  # pyright: ignore[reportArgumentType]
    factors = {
        name.replace(f".{NAME}.", "."): p for name, p in causal_lm.named_parameters() if ".lora_" in name
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


def base_layer(layer: nn.Module) -> nn.Module:
    """Return the model's own layer below an adapter, or ``layer`` itself where there is none."""
    return layer.get_submodule("base_layer") if hasattr(layer, "base_layer") else layer


def adapter_output(layer: Any, x: Tensor) -> Tensor:
    """Return what an adapter adds to the output of the layer below: (alpha / rank) B A x."""
    a, b = layer.lora_A[NAME], layer.lora_B[NAME]
    return b(a(x.to(a.weight.dtype))) * layer.scaling[NAME]
