"""The precision table in torch's terms: dtypes by name, and the context that a forward runs in."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

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


_SOFTMAX = (torch.nn.functional.softmax, torch.softmax, torch.Tensor.softmax)
"""Functions that take a dtype to compute in: routers of mixtures ask for float32."""


class Float64Throughout(TorchFunctionMode):
    """Keeps float64 values float64 where a model asks for float32.

    transformers' norms compute in float32 whatever the dtype, which is a floor for low precisions and a loss for
    float64: a sum that differs in its last bit is then rounded to another float32 number now and then.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Leave out a cast from float64 to float32, also inside a softmax; run everything else unchanged."""
        wanted = (*args[1:], *(kwargs or {}).values())
        if func in _SOFTMAX and torch.float32 in wanted and args[0].dtype == torch.float64:
            return func(args[0], *args[1:], **{**(kwargs or {}), "dtype": torch.float64})
        casts = func in (torch.Tensor.to, torch.Tensor.type)
        narrows = func is torch.Tensor.float or (casts and torch.float32 in wanted)
        if narrows and args[0].dtype == torch.float64:
            return args[0]
        return func(*args, **(kwargs or {}))


def forward_context(table: PrecisionTable, device_type: str) -> AbstractContextManager[object]:
    """Return the context of a forward: autocast where the table says so, float64 kept as it is, else nothing.

    Autocast's cache of cast weights is off: each weight is used once in a forward, and a cache would keep the casts of
    all blocks until the forward ends (2 bytes per parameter), also of those that are recomputed.
    """
    if table.compute == "fp64":
        return Float64Throughout()
    if table.autocast:
        return torch.autocast(device_type, dtype=dtype_of(table.compute), cache_enabled=False)
    return nullcontext()
