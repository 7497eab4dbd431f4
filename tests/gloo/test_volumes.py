"""Volumes of real steps: 2M, 2M, 2M, 3M for ZeRO 0, 1, 2, 3, and what accumulation makes of them."""

from __future__ import annotations

import pytest
from proofs import prove

pytestmark = pytest.mark.gloo

EVEN = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
"""Every dim 0 is a multiple of 4, so that sharding pads nothing."""


def volume_in_m(result, num_parameters: int, ranks: int) -> float:
    """Return the recorded data-parallel ring volume per rank, in units of M (N - 1) / N, M = parameter bytes."""
    share = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}
    sent = sum(
        share[line["kind"]] * line["num_bytes"]
        for line in result["ledger"]["recorded"]
        if line["axis"].startswith("dp_")
    )
    return sent / (8 * num_parameters)  # float64


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("zero", "single", "four"), [(0, 2, 2), (1, 2, 2), (2, 2, 5), (3, 3, 12)])
def test_recorded_volume(pool, zero, single, four, ranks):
    from meshwright.model.read_hf import spec_from_config

    count = spec_from_config(EVEN, "even").num_parameters
    for accumulation, want in ((1, single), (4, four)):
        result = prove(
            pool,
            f"dp={ranks},zero={zero}",
            config=EVEN,
            steps=1,
            global_batch=ranks * accumulation,
            seq_len=8,
        )
        assert result["ledger"]["matches"], result["ledger"]
        assert volume_in_m(result, count, ranks) == pytest.approx(want)
