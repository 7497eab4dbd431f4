"""A checkpoint's adapter as peft writes it, or merged into the weights it stands beside.

One process, no process group; memory holds the factors (and, when merging, one block of the model).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata

from meshwright.base.errors import ExitCode, MeshwrightError, problem
from meshwright.base.files import whole_folder
from meshwright.checkpoint.load import load_checkpoint, stored_tensors
from meshwright.checkpoint.manifest import MODEL, read_manifest
from meshwright.checkpoint.metadata import read_index, read_tensor
from meshwright.model.adapters import adapted, adapter_from_dict, is_second_factor
from meshwright.model.read_hf import spec_from_config
from meshwright.model.spec import AdapterSpec, ModelSpec, TensorSpec
from meshwright.parallel.adapters import add_adapters, lora_config, peft_factors
from meshwright.parallel.stage import logical_name

PREFIX = "base_model.model."
"""What peft puts before the module names of the model below."""


def adapter_of(manifest: Mapping[str, Any]) -> AdapterSpec | None:
    """Return the adapter that the manifest's plan trained, or None."""
    held = (manifest.get("plan") or {}).get("adapter")
    return None if held is None else adapter_from_dict(held)


def adapted_spec(checkpoint: Path, config: Mapping[str, Any], adapter: AdapterSpec | None) -> ModelSpec:
    """Return the model of ``config`` with the adapter's tensors."""
    name = str(config.get("model_type", ""))
    return adapted(spec_from_config(dict(config), name=name, source=str(checkpoint)), adapter)


def read_factors(
    checkpoint: Path, index: Metadata, tensors: Iterator[TensorSpec] | list[TensorSpec]
) -> dict[str, Tensor]:
    """Return the adapter's factors whole, by logical name.

    Raises:
        MeshwrightError: E275 when one is missing, empty or of another shape; E711 when it cannot be read.
    """
    stored = stored_tensors(index)
    wrong: list[str] = []
    factors: dict[str, Tensor] = {}
    for tensor in tensors:
        entry = stored.get(f"{MODEL}{tensor.name}")
        if entry is None or tuple(entry.size) != tensor.shape or 0 in entry.size:
            found = "missing" if entry is None else f"{list(entry.size)}, not {list(tensor.shape)}"
            wrong.append(f"{tensor.name} {found}")
        else:
            factors[tensor.name] = read_tensor(checkpoint, index, f"{MODEL}{tensor.name}")
    if wrong:
        text = f"{len(wrong)} factors: " + "; ".join(wrong[:3])
        raise MeshwrightError(problem("E275", where=str(checkpoint), found=text))
    return factors


def export_adapter(
    checkpoint: Path, out: Path, config: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, Any]:
    """Write ``adapter_model.safetensors`` and ``adapter_config.json`` of a checkpoint to ``out``; return what it is.

    Raises:
        MeshwrightError: E275 for a factor that is not whole, E273 without peft, E703 when ``out`` cannot be written.
    """
    manifest = read_manifest(checkpoint)
    spec = adapted_spec(checkpoint, config, adapter_of(manifest))
    index = read_index(checkpoint)
    factors = read_factors(checkpoint, index, [t for t in spec.tensors() if t.role == "adapter"])
    named = peft_factors(spec, factors)
    saved = {f"{PREFIX}{name}": t.to(dtype).contiguous() for name, t in named.items()}
    described: Any = lora_config(spec)
    described.base_model_name_or_path = str(manifest["plan"].get("model_path", ""))
    described.inference_mode = True
    try:
        with whole_folder(out) as temporary:
            save_file(saved, temporary / "adapter_model.safetensors", metadata={"format": "pt"})
            described.save_pretrained(str(temporary))
    except OSError as error:
        raise MeshwrightError(
            problem("E703", where=str(out), found=f"{type(error).__name__}: {error}"), ExitCode.ENVIRONMENT
        ) from error
    untrained = sum(1 for name, t in factors.items() if is_second_factor(name) and not t.any())
    return {
        "checkpoint": str(checkpoint),
        "out": str(out),
        "step": manifest["step"],
        "dtype": str(dtype).removeprefix("torch."),
        "tensors": len(saved),
        "bytes": sum(t.numel() * t.element_size() for t in saved.values()),
        "untrained": untrained,
        "files": ["adapter_model.safetensors", "adapter_config.json"],
    }


def merged(
    checkpoint: Path, index: Metadata, spec: ModelSpec, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return ``tensors`` with W + (alpha / rank) B A for every W that has an adapter, added in float64.

    Raises:
        MeshwrightError: E275 for a factor that is not whole.
    """
    assert spec.adapter is not None
    named = {t.name: t for t in spec.tensors() if t.role == "adapter"}
    out = dict(tensors)
    for name in tensors:
        stem = name.removesuffix(".weight")
        names = (f"{stem}.lora_A.weight", f"{stem}.lora_B.weight", f"{name}_lora_A", f"{name}_lora_B")
        pair = [named[n] for n in names if n in named]
        if not pair:
            continue
        a, b = read_factors(checkpoint, index, pair).values()
        delta = (b.double() @ a.double()) * (spec.adapter.alpha / spec.adapter.rank)
        weight = tensors[name]
        delta = delta.T if spec.family == "gpt2" else delta
        out[name] = (weight.double() + delta).to(weight.dtype)
    return out


def load_base(checkpoint: Path, model: nn.Module) -> nn.Module:
    """Return ``model``, which has no adapter, filled with the checkpoint's weights without their adapter."""
    index = read_index(checkpoint)
    for name, p in model.named_parameters():
        p.data = read_tensor(checkpoint, index, f"{MODEL}{name}").to(p.dtype)
    return model


def load_adapted(checkpoint: Path, model: nn.Module, spec: ModelSpec) -> nn.Module:
    """Return ``model`` with its adapter, filled from the checkpoint by the loader that resumes runs."""
    if spec.adapter is not None:
        add_adapters(model, spec, seed=0)
    params = {logical_name(n): p for n, p in model.named_parameters()}
    load_checkpoint(path=checkpoint, params=params, optimizer=None, tied={}, verify=False)
    return model
