"""Weights out of a torch distributed checkpoint (FSDP, or a checkpoint of our own): by name, without running its pickle.

Only the parameters are read: optimizer state and other entries are left out. Names may have a common prefix
("model.", "app.model.", "module."), which is found by looking for all names of the model behind it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import Metadata

from meshwright.base.errors import problem, refuse
from meshwright.checkpoint.load import stored_tensors
from meshwright.checkpoint.manifest import METADATA, listed
from meshwright.checkpoint.metadata import read_index, read_tensor
from meshwright.model.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class DcpWeights(Mapping[str, torch.Tensor]):
    """Weights by the model's tensor names; a tensor is put together from its pieces when it is asked for.

    Attributes:
        keys_of: for each tensor name the key in the checkpoint.
        left_out: keys that are no weights of the model.
    """

    folder: Path
    index: Metadata
    keys_of: Mapping[str, str]
    left_out: tuple[str, ...] = ()
    seconds: float = 0.0

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return one tensor in its stored dtype, on the CPU."""
        return read_tensor(self.folder, self.index, self.keys_of[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys_of)

    def __len__(self) -> int:
        return len(self.keys_of)

    @property
    def tokenizer_folder(self) -> Path | None:
        """None: such a checkpoint has no tokenizer."""
        return None


def is_dcp(path: str) -> bool:
    """Return whether ``path`` is a folder that torch's distributed checkpoint wrote."""
    return (Path(path).expanduser() / METADATA).is_file()


def load_dcp(path: str, spec: ModelSpec) -> DcpWeights:
    """Return the weights for ``spec`` out of the checkpoint in ``path``: every tensor of the model, a tied one once.

    Raises:
        MeshwrightError: E621 missing tensors, E623 another shape, E710 an index that is not one of tensors.
    """
    begin = time.monotonic()
    folder = Path(path).expanduser()
    index = read_index(folder, only_tensors=False)
    stored = {k: tuple(e.size) for k, e in stored_tensors(index).items()}
    needed = {t.name: tuple(t.shape) for t in spec.tensors() if t.tied_to is None}
    prefix = _prefix(list(needed), stored)
    keys = {name: prefix + name for name in needed}
    missing = [n for n, k in keys.items() if k not in stored]
    shapes = [
        f"{n} is {list(stored[k])}, the model's is {list(needed[n])}"
        for n, k in keys.items()
        if k in stored and stored[k] != needed[n]
    ]
    where = f"model.weights={path}"
    refuse(
        [
            problem(
                code,
                where=where,
                found=f"{len(names)} of {len(needed)} tensors: {listed(names)} (prefix {prefix!r})",
            )
            for code, names in (("E621", missing), ("E623", shapes))
            if names
        ]
    )
    left = tuple(sorted(index.state_dict_metadata.keys() - set(keys.values())))
    return DcpWeights(
        folder=folder, index=index, keys_of=keys, left_out=left, seconds=time.monotonic() - begin
    )


def _prefix(needed: list[str], stored: Mapping[str, object]) -> str:
    """Return what stands before the model's names: of all that occur, the one with most of them behind it."""
    found = {key.removesuffix(name) for name in needed[:3] for key in stored if key.endswith(name)}
    if not found:
        return ""
    return max(sorted(found, key=len), key=lambda p: sum(p + name in stored for name in needed))
