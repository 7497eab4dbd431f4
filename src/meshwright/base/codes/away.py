"""Codes about parameters that rest away from the device, and fp8 (E290-E294)."""

from __future__ import annotations

from typing import Final

from meshwright.base.codes.info import CodeInfo

CODES: Final[tuple[CodeInfo, ...]] = (
    CodeInfo(
        code="E290",
        title="Parameters cannot be offloaded on this layout yet",
        kind="code",
        why="what this key does with parameters or their gradients is not built for parameters that come and go",
        needs="dp with any zero over all of dp, pp with gpipe, 1f1b or interleaved, any recompute, no adapter",
        do="offload=optimizer, or set the key back",
        page="""offload=parameters and parameters-nvme bring each block's parameters before it runs and let them go after
it. The tensor, context and expert axes, replicas of the shard group (HSDP), backwards in two halves, compiled blocks and
adapters each keep or use parameters in another way, which is not built together with that. offload=optimizer and
optimizer-nvme go with all of them.""",
    ),
    CodeInfo(
        code="E291",
        title="fp8 can be planned but not run",
        kind="code",
        why="the price of fp8 is known; no part of it is proved here, and a CPU has no fp8 products to prove it with",
        needs="precision=bf16, fp16, fp32 or fp64",
        do="precision=bf16",
        page="""precision=fp8 (fp8-rowwise, fp8-blockwise) is priced by estimate and plan: the blocks' linear layers
multiply in 8 bits, everything else is as in bf16. train and prove refuse it before a process starts.""",
    ),
)
