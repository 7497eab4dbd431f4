"""Weights of another program's checkpoint as a Hugging Face folder: one process, tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshwright.base.errors import MeshwrightError, problem, refuse
from meshwright.checkpoint.foreign import Foreign, config_beside, matched, no_config, open_foreign
from meshwright.checkpoint.hf_folder import (
    MAX_SHARD_BYTES,
    arguments,
    dtype_name,
    meta_model,
    refuse_full,
    target_dtype,
    write_folder,
)
from meshwright.checkpoint.logits import logit_difference, model_options
from meshwright.checkpoint.manifest import listed
from meshwright.model.read_hf import spec_from_config
from meshwright.model.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A model's config.json: its content, and the folder that it lies in (where its tokenizer may be too)."""

    content: dict[str, Any]
    folder: Path


def read_config(place: Path) -> ModelConfig:
    """Return the config.json at ``place`` (the file, or a folder with it).

    Raises:
        MeshwrightError: E713 when there is none that names a model_type.
    """
    file = place / "config.json" if place.is_dir() else place
    try:
        content: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        found = f"{type(error).__name__}: {error}"
        raise MeshwrightError(problem("E713", where=str(file), found=found)) from error
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        raise MeshwrightError(problem("E713", where=str(file), found="it has no model_type"))
    return ModelConfig(content=content, folder=file.parent)


def _opened(path: Path, config: ModelConfig | None) -> tuple[Foreign, ModelConfig, ModelSpec, dict[str, str]]:
    """Return the checkpoint, the model's config and tensors, and the checkpoint's name of each tensor."""
    foreign = open_foreign(path)
    if config is None:
        beside = config_beside(foreign.folder)
        if beside is None:
            raise no_config(foreign.folder)
        config = read_config(beside)
    spec = spec_from_config(config.content, name=config.content["model_type"], source=str(config.folder))
    keys, _ = matched(foreign, spec, str(foreign.folder))
    return foreign, config, spec, keys


def export_foreign(
    path: Path,
    out: Path,
    *,
    dtype: torch.dtype | str | None = None,
    config: ModelConfig | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> dict[str, Any]:
    """Write the weights of the checkpoint of torch (FSDP) or DeepSpeed in ``path`` to ``out``; return what was written.

    Memory: one block in the dtype of the files and one tensor. The tokenizer beside the config goes along.

    Args:
        path: the checkpoint.
        out: a folder that does not exist yet or is empty.
        dtype: what the tensors are cast to; None keeps the stored dtype.
        config: the model's config.json; None takes the one beside the checkpoint, or in the folder above.
        max_shard_bytes: bytes of tensors in one file.

    Raises:
        MeshwrightError: E580-E585 and E710, E711 about the files; E713 no config; E621-E623 tensors that are not
            those of the model, E714 dtype, E712 and E703 about ``out``.
    """
    refuse_full(out)
    foreign, config, spec, keys = _opened(path, config)
    kind = target_dtype({foreign.entries[k][1] for k in keys.values()}, dtype)
    skeleton = meta_model(config.content)
    tied = [t.name for t in spec.tensors() if t.tied_to is not None]
    names = [n for n in skeleton.state_dict() if n not in tied]
    unknown = [n for n in names if n not in keys]
    if unknown:
        found = (
            f"{len(unknown)} of {len(names)} tensors of transformers' module are not known: {listed(unknown)}"
        )
        refuse([problem("E719", where=str(config.folder), found=found)])
    written = write_folder(
        out,
        skeleton=skeleton,
        config=config.content,
        names=names,
        dtype=kind,
        max_shard_bytes=max_shard_bytes,
        read=lambda block: {name: foreign.read(keys[name]).to(kind) for name in block},
        tokenizer=str(config.folder),
    )
    return {
        "checkpoint": str(foreign.folder),
        "kind": foreign.kind,
        "out": str(out),
        "step": foreign.step,
        "dtype": dtype_name(kind),
        "tensors": written.tensors,
        "bytes": written.bytes,
        "files": written.files,
        "tied_left_out": tied,
        "tokenizer": written.tokenizer,
    }


def compare_foreign(path: Path, out: Path, *, config: ModelConfig | None = None) -> dict[str, Any]:
    """Return how far the logits of the folder ``out``, reloaded by transformers, are from the checkpoint's.

    The second model is filled from the checkpoint by name, not from the exported files.

    Raises:
        MeshwrightError: E715 when transformers misses or ignores a tensor or the logits differ.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    foreign, config, _, keys = _opened(path, config)
    options = model_options(config.content)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        out, output_loading_info=True, local_files_only=True, **options
    )
    reloaded, info = loaded
    made: Mapping[str, Any] = arguments(config.content)
    model: Any = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(config.content["model_type"], **made), dtype=torch.float32, **options
    )
    for name, parameter in model.named_parameters():
        if name in keys:  # a tied head is the parameter that it is tied to
            parameter.data = foreign.read(keys[name])
    return logit_difference(model, reloaded, info, out)
