"""The precision table in torch's terms: dtypes by name, and the context that a forward runs in."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from meshwright.layout.precision import PrecisionTable

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def dtype_of(name: str) -> torch.dtype:
    """Return torch's dtype of our dtype name."""
    return DTYPES[name]


def forward_context(table: PrecisionTable, device_type: str) -> AbstractContextManager[object]:
    """Return the context of a forward: autocast where the table says so, else nothing."""
    if table.autocast:
        return torch.autocast(device_type, dtype=dtype_of(table.compute))
    return nullcontext()
