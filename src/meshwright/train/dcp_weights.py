"""Weights out of checkpoints of other programs (torch's distributed checkpoint, DeepSpeed), by the model's names.

Only the parameters are read: optimizer state and other entries are left out. Names may have a common prefix
("model.", "app.model.", "module."), which is found by looking for all names of the model behind it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from meshwright.checkpoint.foreign import Foreign, matched, open_foreign
from meshwright.model.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class DcpWeights(Mapping[str, torch.Tensor]):
    """Weights by the model's tensor names; a tensor is put together from its pieces when it is asked for.

    Attributes:
        source: the checkpoint.
        keys_of: for each tensor name the name in the checkpoint.
        left_out: names that are no weights of the model.
    """

    source: Foreign
    keys_of: Mapping[str, str]
    left_out: tuple[str, ...] = ()
    seconds: float = 0.0

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return one tensor in its stored dtype, on the CPU."""
        return self.source.read(self.keys_of[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys_of)

    def __len__(self) -> int:
        return len(self.keys_of)

    @property
    def tokenizer_folder(self) -> Path | None:
        """None: such a checkpoint has no tokenizer."""
        return None


def load_stored(path: str, spec: ModelSpec) -> DcpWeights:
    """Return the weights for ``spec`` out of the checkpoint in ``path``: every tensor of the model, a tied one once.

    Raises:
        MeshwrightError: E621 missing tensors, E622 others, E623 another shape, E580-E585 what is wrong with the files,
            E710 an index that is not one of tensors.
    """
    begin = time.monotonic()
    source = open_foreign(Path(path).expanduser())
    keys, left = matched(source, spec, f"model.weights={path}")
    return DcpWeights(source=source, keys_of=keys, left_out=left, seconds=time.monotonic() - begin)
