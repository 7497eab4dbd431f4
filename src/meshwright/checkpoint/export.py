"""A checkpoint as Hugging Face files: one process, no process group, block by block.

Tensors are put together from their shards one block at a time, given the names that transformers writes (a
fused expert tensor becomes one per expert), and written as safetensors shards. A tied head is left out, as
transformers leaves it out.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata

from meshwright.base.errors import ExitCode, MeshwrightError, problem, refuse
from meshwright.checkpoint.adapter import (
    adapted_spec,
    adapter_of,
    export_adapter,
    load_adapted,
    load_base,
    merged,
)
from meshwright.checkpoint.inspect import find_checkpoint
from meshwright.checkpoint.load import stored_tensors
from meshwright.checkpoint.manifest import (
    MODEL,
    damage_problem,
    find_damage,
    listed,
    read_manifest,
    sync_folder,
)
from meshwright.checkpoint.metadata import read_index, read_tensor
from meshwright.checkpoint.stream import Row, ShardFiles, rows_of
from meshwright.model.read_hf import spec_from_config
from meshwright.model.spec import ModelSpec

MAX_SHARD_BYTES: Final = 2 * 10**9
"""Bytes of tensors in one safetensors file, unless one block is larger."""

DTYPES: Final = {
    "fp64": torch.float64,
    "float64": torch.float64,
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}
"""Dtypes that a file may be written in, by the names a user may give."""

_BLOCK = re.compile(r"^(.*?\.\d+)\.")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
_LOGIT_TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.bfloat16: 2e-2,
    torch.float16: 2e-3,
}
"""Largest |difference| / largest |logit| that the reloaded model may show: a few roundings of its dtype."""


def export_hf(
    checkpoint: Path,
    out: Path,
    *,
    dtype: torch.dtype | str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    merge: bool = False,
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

    Raises:
        MeshwrightError: E701, E702, E709, E710, E711 as in loading; E712 ``out`` is not empty, E713 no model
            config, E714 dtype, E719 the tensors are not those of the model, E703 ``out`` cannot be written.
    """
    manifest = read_manifest(checkpoint)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise MeshwrightError(problem("E712", where=str(out), found="it exists and is not an empty folder"))
    config = model_config(checkpoint, manifest)
    refuse([damage_problem(checkpoint, d) for d in find_damage(checkpoint, manifest["files"])])
    index = read_index(checkpoint)
    spec = adapted_spec(checkpoint, config, adapter_of(manifest))
    kind = _target_dtype(index, dtype)
    if spec.adapter is not None and not merge:
        return export_adapter(checkpoint, out, config, kind)
    skeleton = _meta_model(config)
    names = _names(checkpoint, index, spec, skeleton)
    temporary = out.with_name(f".{out.name}.tmp-{uuid.uuid4().hex[:12]}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        shards = ShardFiles(temporary, max_shard_bytes, _coming(names, skeleton, kind))
        for block in _blocks(names):
            tensors = {name: read_tensor(checkpoint, index, f"{MODEL}{name}") for name in block}
            if spec.adapter is not None:
                tensors = merged(checkpoint, index, spec, tensors)
            tensors = {name: tensor.to(kind) for name, tensor in tensors.items()}
            shards.add(_hub_tensors(skeleton, tensors))
        files = shards.finish()
        architectures = [type(skeleton).__name__]
        kept = {k: v for k, v in config.items() if k not in ("torch_dtype", "dtype", "architectures")}
        _write_json(
            temporary / "config.json", {"architectures": architectures, "dtype": _dtype_name(kind)} | kept
        )
        tokenizer = _copy_tokenizer(manifest, temporary)
        for path in temporary.iterdir():
            _sync_file(path)
        sync_folder(temporary)
        os.rename(temporary, out)
        sync_folder(out.parent)
    except OSError as error:
        raise MeshwrightError(
            problem("E703", where=str(out), found=f"{type(error).__name__}: {error}"), ExitCode.ENVIRONMENT
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return {
        "checkpoint": str(checkpoint),
        "out": str(out),
        "step": manifest["step"],
        "dtype": _dtype_name(kind),
        "tensors": len(shards.places),
        "bytes": shards.bytes,
        "files": files,
        "tied_left_out": [t.name for t in spec.tensors() if t.tied_to is not None],
        "tokenizer": tokenizer,
    }


def export_command(
    dir: str, out: str, check_logits: bool = False, dtype: str | None = None, merge: bool = False
) -> dict[str, Any]:
    """Export the checkpoint at ``dir`` (or the newest of a run folder) to ``out``; with ``check_logits`` prove it.

    Raises:
        MeshwrightError: E281 for ``merge`` without an adapter; what ``export_hf`` and ``compare_logits`` raise.
    """
    checkpoint = find_checkpoint(Path(dir))
    if merge and adapter_of(read_manifest(checkpoint)) is None:
        found = f"{checkpoint} holds no adapter: its weights are whole already"
        raise MeshwrightError(problem("E281", where="--merge-adapter", found=found))
    done = export_hf(checkpoint, Path(out), dtype=dtype, merge=merge)
    if check_logits:
        done["check_logits"] = compare_logits(checkpoint, Path(out))
    return done


def compare_logits(checkpoint: Path, out: Path, *, seq_len: int = 32) -> dict[str, Any]:
    """Return how far the logits of the folder ``out``, reloaded by transformers, are from the checkpoint's.

    The second model is built from the config and filled from the checkpoint by the loader that resumes runs,
    not from the exported files. Both run on the CPU on the same random tokens.

    Raises:
        MeshwrightError: E715 when transformers misses or ignores a tensor or the logits differ.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    manifest = read_manifest(checkpoint)
    config = model_config(checkpoint, manifest)
    options: dict[str, Any] = {}
    if spec_from_config(config, name="", source=str(checkpoint)).moe is not None:
        options["experts_implementation"] = "eager"  # the fused kernels take neither float64 nor every size
    spec = adapted_spec(checkpoint, config, adapter_of(manifest))
    reloaded, info = _reloaded(checkpoint, out, config, options)
    kind = next(reloaded.parameters()).dtype
    wrong = {k: sorted(map(str, v)) for k, v in info.items() if v}
    if wrong:
        raise MeshwrightError(
            problem("E715", where=str(out), found=f"transformers reports {wrong}"), ExitCode.NO
        )
    stored = stored_tensors(read_index(checkpoint))
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(config["model_type"], **_arguments(config)), dtype=torch.float32, **options
    )
    _cast(model, next(e.properties.dtype for k, e in stored.items() if k.startswith(MODEL)))
    load_adapted(checkpoint, model, spec)
    _cast(model, kind)
    generator = torch.Generator().manual_seed(0)
    vocab = model.get_input_embeddings().weight.shape[0]
    length = min(seq_len, int(getattr(model.config, "max_position_embeddings", seq_len)))
    tokens = torch.randint(0, vocab, (2, length), generator=generator)
    with torch.no_grad():
        one = model.eval()(input_ids=tokens).logits.double()
        two = reloaded.eval()(input_ids=tokens).logits.double()
    difference, largest = (one - two).abs().max().item(), one.abs().max().item()
    tolerance = _LOGIT_TOLERANCE[kind] * largest
    answer = {
        "max_abs_diff": difference,
        "max_abs_logit": largest,
        "tolerance": tolerance,
        "tokens": list(tokens.shape),
    }
    if not difference <= tolerance:  # a NaN is not within any tolerance
        raise MeshwrightError(
            problem(
                "E715",
                where=str(out),
                found=f"logits differ by {difference:.3g} (largest logit {largest:.3g}, tolerance {tolerance:.3g})",
            ),
            ExitCode.NO,
        )
    return answer


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
        AutoConfig.for_model(config["model_type"], **_arguments(config)), dtype=torch.float32, **options
    )
    stored = stored_tensors(read_index(checkpoint))
    _cast(base, next(e.properties.dtype for k, e in stored.items() if k.startswith(MODEL)))
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


def _arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in config.items() if k not in ("torch_dtype", "dtype", "model_type", "auto_map")}


def _meta_model(config: Mapping[str, Any]) -> nn.Module:
    """Return transformers' model of ``config`` without storage: names, shapes and how transformers writes them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            AutoConfig.for_model(config["model_type"], **_arguments(config)), dtype=torch.float32
        )


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the parameters, not the buffers (rotary frequencies stay in float32, as transformers keeps them)."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def _target_dtype(index: Metadata, dtype: torch.dtype | str | None) -> torch.dtype:
    if isinstance(dtype, str):
        if dtype not in DTYPES:
            raise MeshwrightError(
                problem("E714", where="dtype", found=f"{dtype!r} is not one of {', '.join(DTYPES)}")
            )
        return DTYPES[dtype]
    if dtype is not None:
        return dtype
    kinds = {e.properties.dtype for k, e in stored_tensors(index).items() if k.startswith(MODEL)}
    if len(kinds) != 1:
        held = ", ".join(sorted(_dtype_name(k) for k in kinds)) or "none"
        raise MeshwrightError(
            problem("E714", where="dtype", found=f"the stored parameters have several dtypes: {held}")
        )
    return kinds.pop()


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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


def _blocks(names: list[str]) -> Iterator[list[str]]:
    """Yield the names in order, those of one repeated block together and every other tensor alone."""
    groups: dict[str, list[str]] = {}
    for name in names:
        match = _BLOCK.match(name)
        groups.setdefault(match.group(1) if match else name, []).append(name)
    yield from groups.values()


def _hub_tensors(skeleton: nn.Module, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the tensors under the names and in the cut in which transformers writes this model."""
    from transformers.core_model_loading import revert_weight_conversion

    made: Any = revert_weight_conversion(skeleton, dict(tensors))  # pyright: ignore[reportArgumentType]
    return made


def _coming(names: list[str], skeleton: nn.Module, kind: torch.dtype) -> Iterator[Row]:
    """Yield name, dtype and shape of every tensor that the files will hold, in order, without any data."""
    shapes = {n: tuple(t.shape) for n, t in skeleton.state_dict().items()}
    for block in _blocks(names):
        empty = {n: torch.empty(shapes[n], dtype=kind, device="meta") for n in block}
        yield from rows_of(_hub_tensors(skeleton, empty))


def _copy_tokenizer(manifest: Mapping[str, Any], folder: Path) -> list[str]:
    """Copy the run's tokenizer files into ``folder`` where they are still there; return their names."""
    place = manifest.get("tokenizer")
    if not isinstance(place, str) or not place:
        return []
    source = Path(place)
    home = source if source.is_dir() else source.parent
    if source.is_file() and source.suffix == ".json":
        shutil.copyfile(source, folder / "tokenizer.json")
    for name in _TOKENIZER_FILES:
        if (home / name).is_file() and not (folder / name).exists():
            shutil.copyfile(home / name, folder / name)
    if (folder / "tokenizer.json").is_file() and not (folder / "tokenizer_config.json").exists():
        _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    return sorted(name for name in _TOKENIZER_FILES if (folder / name).is_file())


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _sync_file(path: Path) -> None:
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
