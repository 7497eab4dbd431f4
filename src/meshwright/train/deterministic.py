"""``run.deterministic``: the settings under which two runs of one plan give the same bits, by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from meshwright.mesh.env import deterministic_environment


def deterministic_settings() -> dict[str, Any]:
    """Return what ``run.deterministic`` sets, by the name of the setting."""
    return {
        "torch.use_deterministic_algorithms": True,
        "torch.utils.deterministic.fill_uninitialized_memory": False,
        "torch.backends.cudnn.deterministic": True,
        "torch.backends.cudnn.benchmark": False,
        "torch.backends.cuda.enable_mem_efficient_sdp": False,
        **deterministic_environment(),
    }


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Make the settings of ``deterministic_settings`` in this process while the context is open, if ``wanted``.

    An operation that has no deterministic form on the device raises torch's own error, which names it.
    """
    if not wanted:
        yield
        return
    memory: Any = torch.utils.deterministic
    kept = (
        torch.are_deterministic_algorithms_enabled(),
        memory.fill_uninitialized_memory,
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
        torch.backends.cuda.mem_efficient_sdp_enabled(),
    )
    deterministic_environment(set_it=True)
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(kept[0])
        memory.fill_uninitialized_memory = kept[1]
        torch.backends.cudnn.deterministic = kept[2]
        torch.backends.cudnn.benchmark = kept[3]
        torch.backends.cuda.enable_mem_efficient_sdp(kept[4])
