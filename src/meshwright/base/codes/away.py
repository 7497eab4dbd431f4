"""Codes about parameters that rest away from the device, and fp8 (E290-E291)."""

from __future__ import annotations

from typing import Final

from meshwright.base.codes.info import CodeInfo

CODES: Final[tuple[CodeInfo, ...]] = (
    CodeInfo(
        code="E290",
        title="Parameters cannot be offloaded under this schedule yet",
        kind="code",
        why="a weight half adds gradients outside the hooks that bring a block's gradients back to the device",
        needs="zero >= 1 over several ranks, or gpipe, 1f1b or interleaved",
        do="zero = 1 | schedule=1f1b | offload=optimizer",
        page="""offload=parameters and parameters-nvme with zero=0 bring each block's parameters before it runs and its
gradients before backward adds to them, and let both go after. Schedules with backwards in two halves (zb-h1, zbv,
dualpipev and schedule files) add a block's gradients later, and are not built together with that. With zero from 1 FSDP2
brings shards, under every schedule; all other keys go with both.""",
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
