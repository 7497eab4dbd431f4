"""A checkpoint as Hugging Face files: one process, no process group, block by block.

Tensors are put together from their shards one block at a time, given the names that transformers writes (a
fused expert tensor becomes one per expert), and written as safetensors shards. A tied head is left out, as
transformers leaves it out.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata

from meshwright.base.errors import MeshwrightError, problem, refuse
from meshwright.checkpoint.adapter import (
    adapted_spec,
    adapter_of,
    export_adapter,
    load_adapted,
    load_base,
    merged,
)
from meshwright.checkpoint.foreign import is_anothers
from meshwright.checkpoint.foreign_export import compare_foreign, export_foreign, read_config
from meshwright.checkpoint.hf_folder import (
    MAX_SHARD_BYTES,
    arguments,
    cast,
    dtype_name,
    meta_model,
    refuse_full,
    target_dtype,
    write_folder,
)
from meshwright.checkpoint.inspect import find_checkpoint
from meshwright.checkpoint.load import stored_tensors
from meshwright.checkpoint.logits import logit_difference, model_options
from meshwright.checkpoint.manifest import (
    MODEL,
    damage_problem,
    find_damage,
    listed,
    read_manifest,
)
from meshwright.checkpoint.metadata import read_index, read_tensor
from meshwright.model.spec import ModelSpec


def export_hf(
    checkpoint: Path,
    out: Path,
    *,
    dtype: torch.dtype | str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    merge: bool = False,
    config: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Write the parameters of ``checkpoint`` as a Hugging Face folder ``out``; return what was written.

    A checkpoint of an adapter becomes a folder as peft writes it, or with ``merge`` the whole model with the
    adapter added to its weights.

    The folder has config.json with the dtype of the tensors, one or more safetensors files and, when the run's
    tokenizer is still where the manifest says, the tokenizer; it gets its name when everything is written.
    Memory: one block (or the embedding, when that is larger) in the dtype of the files, and one tensor.

    Args:
        checkpoint: a folder ``step-N``.
        out: a folder that does not exist yet or is empty.
        dtype: what the tensors are cast to; None keeps the stored dtype.
        max_shard_bytes: bytes of tensors in one file.
        merge: add an adapter to the weights.
        config: content of the model's config.json; None takes the one that the manifest keeps.

    Raises:
        MeshwrightError: E701, E702, E709, E710, E711 as in loading; E712 ``out`` is not empty, E713 no model
            config, E714 dtype, E719 the tensors are not those of the model, E703 ``out`` cannot be written.
    """
    manifest = read_manifest(checkpoint)
    refuse_full(out)
    config = config if config is not None else model_config(checkpoint, manifest)
    refuse([damage_problem(checkpoint, d) for d in find_damage(checkpoint, manifest["files"])])
    index = read_index(checkpoint)
    spec = adapted_spec(checkpoint, config, adapter_of(manifest))
    held = {e.properties.dtype for k, e in stored_tensors(index).items() if k.startswith(MODEL)}
    kind = target_dtype(held, dtype)
    if spec.adapter is not None and not merge:
        return export_adapter(checkpoint, out, config, kind)
    skeleton = meta_model(config)
    names = _names(checkpoint, index, spec, skeleton)

    def read(block: list[str]) -> Mapping[str, Tensor]:
        tensors = {name: read_tensor(checkpoint, index, f"{MODEL}{name}") for name in block}
        return tensors if spec.adapter is None else merged(checkpoint, index, spec, tensors)

    written = write_folder(
        out,
        skeleton=skeleton,
        config=config,
        names=names,
        dtype=kind,
        max_shard_bytes=max_shard_bytes,
        read=read,
        tokenizer=manifest.get("tokenizer"),
    )
    return {
        "checkpoint": str(checkpoint),
        "out": str(out),
        "step": manifest["step"],
        "dtype": dtype_name(kind),
        "tensors": written.tensors,
        "bytes": written.bytes,
        "files": written.files,
        "tied_left_out": [t.name for t in spec.tensors() if t.tied_to is not None],
        "tokenizer": written.tokenizer,
    }


def export_command(
    dir: str,
    out: str,
    check_logits: bool = False,
    dtype: str | None = None,
    merge: bool = False,
    config: str | None = None,
) -> dict[str, Any]:
    """Export the checkpoint at ``dir`` (or the newest of a run folder) to ``out``; with ``check_logits`` prove it.

    A checkpoint of torch (FSDP) or DeepSpeed becomes a folder too, with ``config`` or the config.json beside it.

    Raises:
        MeshwrightError: E281 for ``merge`` without an adapter, E287 for what needs a base in 4 bits; what ``export_hf``,
            ``export_foreign`` and the comparison raise.
    """
    given = read_config(Path(config)) if config is not None else None
    if is_anothers(Path(dir)):
        if merge:
            raise MeshwrightError(
                problem("E281", where="--merge-adapter", found=f"{dir} is not of a run of this program")
            )
        done = export_foreign(Path(dir), Path(out), dtype=dtype, config=given)
        if check_logits:
            done["check_logits"] = compare_foreign(Path(dir), Path(out), config=given)
        return done
    checkpoint = find_checkpoint(Path(dir))
    if merge and adapter_of(read_manifest(checkpoint)) is None:
        found = f"{checkpoint} holds no adapter: its weights are whole already"
        raise MeshwrightError(problem("E281", where="--merge-adapter", found=found))
    adapter = adapter_of(read_manifest(checkpoint))
    if adapter is not None and adapter.kind == "qlora" and (merge or check_logits):
        asked = "--merge-adapter" if merge else "--check-logits"
        found = f"{checkpoint} was trained on a base in 4 bits ({adapter.levels}), which it does not hold"
        raise MeshwrightError(problem("E287", where=asked, found=found))
    own = given.content if given is not None else None
    done = export_hf(checkpoint, Path(out), dtype=dtype, merge=merge, config=own)
    if check_logits:
        done["check_logits"] = compare_logits(checkpoint, Path(out), config=own)
    return done


def compare_logits(
    checkpoint: Path, out: Path, *, seq_len: int = 32, config: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return how far the logits of the folder ``out``, reloaded by transformers, are from the checkpoint's.

    The second model is built from the config and filled from the checkpoint by the loader that resumes runs,
    not from the exported files. Both run on the CPU on the same random tokens.

    Raises:
        MeshwrightError: E715 when transformers misses or ignores a tensor or the logits differ.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    manifest = read_manifest(checkpoint)
    config = config if config is not None else model_config(checkpoint, manifest)
    options = model_options(config)
    spec = adapted_spec(checkpoint, config, adapter_of(manifest))
    reloaded, info = _reloaded(checkpoint, out, config, options)
    stored = stored_tensors(read_index(checkpoint))
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(config["model_type"], **arguments(config)), dtype=torch.float32, **options
    )
    cast(model, next(e.properties.dtype for k, e in stored.items() if k.startswith(MODEL)))
    load_adapted(checkpoint, model, spec)
    return logit_difference(model, reloaded, info, out, seq_len=seq_len)


def _reloaded(
    checkpoint: Path, out: Path, config: Mapping[str, Any], options: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Return the model that the files of ``out`` make, and what was wrong with them, as their library reports it.

    For an adapter the model below it, of the checkpoint, with the files of ``out`` read by peft.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if not (out / "adapter_config.json").is_file():
        return AutoModelForCausalLM.from_pretrained(  # pyright: ignore[reportReturnType]
            out, output_loading_info=True, local_files_only=True, **options
        )
    from peft import PeftModel

    base = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(config["model_type"], **arguments(config)), dtype=torch.float32, **options
    )
    stored = stored_tensors(read_index(checkpoint))
    cast(base, next(e.properties.dtype for k, e in stored.items() if k.startswith(MODEL)))
    load_base(checkpoint, base)
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="`is_gradient_checkpointing` is deprecated"
        )  # peft's own call
        return PeftModel.from_pretrained(base, str(out), local_files_only=True), {}


def model_config(checkpoint: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model's config.json content that the manifest's plan keeps.

    Raises:
        MeshwrightError: E713 when there is none.
    """
    config = (manifest.get("plan") or {}).get("model_config")
    if not isinstance(config, dict) or "model_type" not in config:
        raise MeshwrightError(
            problem("E713", where=str(checkpoint), found="the manifest has no plan.model_config")
        )
    return config


def _names(checkpoint: Path, index: Metadata, spec: ModelSpec, skeleton: nn.Module) -> list[str]:
    """Return the model's tensors in module order, every one of which the checkpoint must have in its shape."""
    factors = {t.name for t in spec.tensors() if t.role == "adapter"}
    stored = {k.removeprefix(MODEL): e for k, e in stored_tensors(index).items() if k.startswith(MODEL)}
    stored = {name: entry for name, entry in stored.items() if name not in factors}
    tied = {t.name for t in spec.tensors() if t.tied_to is not None}
    wanted = {n: tuple(t.shape) for n, t in skeleton.state_dict().items() if n not in tied}
    faults = [
        (text, names)
        for text, names in (
            ("are missing", [n for n in wanted if n not in stored]),
            ("do not belong to the model", [n for n in stored if n not in wanted]),
            (
                "have another shape",
                [n for n, s in wanted.items() if n in stored and tuple(stored[n].size) != s],
            ),
        )
        if names
    ]
    refuse(
        [
            problem(
                "E719",
                where=str(checkpoint),
                found=f"{len(names)} of {len(wanted)} tensors {text}: {listed(names)}",
            )
            for text, names in faults
        ]
    )
    return list(wanted)
