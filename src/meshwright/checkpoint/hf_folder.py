"""Writing a model as a Hugging Face folder, block by block, from any source of tensors by name."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from meshwright.base.errors import ExitCode, MeshwrightError, problem
from meshwright.base.files import whole_folder
from meshwright.checkpoint.stream import Row, ShardFiles, rows_of

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


@dataclass(frozen=True, kw_only=True)
class Written:
    """What a folder holds: tensors, their bytes, its safetensors files and its tokenizer files."""

    tensors: int
    bytes: int
    files: list[str]
    tokenizer: list[str]


def refuse_full(out: Path) -> None:
    """Refuse a folder to write that has something in it.

    Raises:
        MeshwrightError: E712.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise MeshwrightError(problem("E712", where=str(out), found="it exists and is not an empty folder"))


def write_folder(
    out: Path,
    *,
    skeleton: nn.Module,
    config: Mapping[str, Any],
    names: list[str],
    dtype: torch.dtype,
    max_shard_bytes: int,
    read: Callable[[list[str]], Mapping[str, Tensor]],
    tokenizer: Any,
) -> Written:
    """Write config.json, safetensors files and the tokenizer aside, bring them to the disk, and rename to ``out``.

    Memory: one block in the dtype of the files, and what ``read`` holds.

    Args:
        out: a folder that is not there yet or is empty.
        skeleton: transformers' model without storage.
        config: content of config.json.
        names: the tensors, in the order of the files.
        dtype: what they are cast to.
        max_shard_bytes: bytes of tensors in one file.
        read: returns the tensors of one block by name.
        tokenizer: folder or file of the tokenizer, or None.

    Raises:
        MeshwrightError: E703 when ``out`` cannot be written.
    """
    try:
        with whole_folder(out) as temporary:
            shards = ShardFiles(temporary, max_shard_bytes, _coming(names, skeleton, dtype))
            for block in _blocks(names):
                tensors = {name: tensor.to(dtype) for name, tensor in read(block).items()}
                shards.add(_hub_tensors(skeleton, tensors))
            files = shards.finish()
            kept = {k: v for k, v in config.items() if k not in ("torch_dtype", "dtype", "architectures")}
            named = {"architectures": [type(skeleton).__name__], "dtype": dtype_name(dtype)}
            _write_json(temporary / "config.json", named | kept)
            copied = _copy_tokenizer(tokenizer, temporary)
    except OSError as error:
        raise MeshwrightError(
            problem("E703", where=str(out), found=f"{type(error).__name__}: {error}"), ExitCode.ENVIRONMENT
        ) from error
    return Written(tensors=len(shards.places), bytes=shards.bytes, files=files, tokenizer=copied)


def arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of config.json that transformers takes as arguments of a config, as a copy of its own."""
    left_out = ("torch_dtype", "dtype", "model_type", "auto_map")
    return copy.deepcopy({k: v for k, v in config.items() if k not in left_out})


def meta_model(config: Mapping[str, Any]) -> nn.Module:
    """Return transformers' model of ``config`` without storage: names, shapes and how transformers writes them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            AutoConfig.for_model(config["model_type"], **arguments(config)), dtype=torch.float32
        )


def expected_tensors(config: Mapping[str, Any]) -> tuple[dict[str, tuple[int, ...]], str]:
    """Return name and shape of every tensor that transformers writes of a model, and the prefix of its base model.

    Tied tensors are named once; none has memory. Raises whatever transformers raises for a config that it does not know.
    """
    skeleton = meta_model(config)
    names = [name for name, _ in skeleton.named_parameters()]
    rows = _coming(names, skeleton, torch.float32)
    return {row.name: row.shape for row in rows}, f"{getattr(skeleton, 'base_model_prefix', '')}."


def cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the parameters, not the buffers (rotary frequencies stay in float32, as transformers keeps them)."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def target_dtype(kinds: Set[torch.dtype], dtype: torch.dtype | str | None) -> torch.dtype:
    """Return what the tensors of a folder are cast to: as asked, else the one dtype ``kinds`` that they have.

    Raises:
        MeshwrightError: E714 an unknown name, or several dtypes and none asked for.
    """
    if isinstance(dtype, str):
        if dtype not in DTYPES:
            raise MeshwrightError(
                problem("E714", where="dtype", found=f"{dtype!r} is not one of {', '.join(DTYPES)}")
            )
        return DTYPES[dtype]
    if dtype is not None:
        return dtype
    if len(kinds) != 1:
        held = ", ".join(sorted(dtype_name(k) for k in kinds)) or "none"
        raise MeshwrightError(
            problem("E714", where="dtype", found=f"the stored parameters have several dtypes: {held}")
        )
    return next(iter(kinds))


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name as config.json writes it."""
    return str(dtype).removeprefix("torch.")


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


def _copy_tokenizer(place: Any, folder: Path) -> list[str]:
    """Copy the tokenizer files at ``place`` into ``folder`` where they are still there; return their names."""
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
