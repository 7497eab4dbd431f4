"""Whether two models give the same logits: an exported folder beside the checkpoint that it was made from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from meshwright.base.errors import ExitCode, MeshwrightError, problem
from meshwright.checkpoint.hf_folder import cast
from meshwright.model.read_hf import spec_from_config

_LOGIT_TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.bfloat16: 2e-2,
    torch.float16: 2e-3,
}
"""Largest |difference| / largest |logit| that the reloaded model may show: a few roundings of its dtype."""


def model_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what transformers is told beside the config, so that every dtype can be computed."""
    if spec_from_config(dict(config), name="", source="").moe is None:
        return {}
    return {"experts_implementation": "eager"}  # the fused kernels take neither float64 nor every size


def logit_difference(
    model: Any, reloaded: Any, info: Mapping[str, Any], out: Path, *, seq_len: int = 32
) -> dict[str, Any]:
    """Return how far the logits of ``reloaded`` (of the folder ``out``) are from those of ``model``.

    Both run on the CPU on the same random tokens, ``model`` in the dtype of ``reloaded``. Shapes: [2, seq_len] tokens.

    Args:
        model: filled from the checkpoint.
        reloaded: filled from the files of ``out``.
        info: what the loader of ``reloaded`` reports, by kind; anything in it is wrong.
        out: the folder, for messages.
        seq_len: tokens in a row, or fewer where the model takes fewer.

    Raises:
        MeshwrightError: E715 when the loader misses or ignores a tensor or the logits differ.
    """
    kind = next(reloaded.parameters()).dtype
    wrong = {k: sorted(map(str, v)) for k, v in info.items() if v}
    if wrong:
        raise MeshwrightError(
            problem("E715", where=str(out), found=f"transformers reports {wrong}"), ExitCode.NO
        )
    cast(model, kind)
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
