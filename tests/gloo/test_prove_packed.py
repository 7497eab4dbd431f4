"""Packed rows in every layout against one device: documents do not see each other, also across ranks and stages."""

from __future__ import annotations

from typing import Any

import pytest
from proofs import prove
from test_prove_context import GPT2, LLAMA, MISTRAL, MIXTRAL, PHI3, QWEN3, proven

from meshwright.layout.parse import parse_layout
from meshwright.prove.ladder import Rung, climb

pytestmark = pytest.mark.gloo

LAYOUTS = [
    "cp=2",
    "cp=4",
    "cp=2,cp_style=ulysses",
    "cp=4,cp_style=ulysses",
    "cp=2,pp=2,schedule=1f1b",
    "dp=2,zero=1",
    "dp=2,zero=3",
    "tp=2",
    "dp=2,zero=2,pp=2",
    "cp=2,cp_style=ulysses,pp=2,schedule=zb-h1",
    "cp=2,recompute=full",
    "cp=2,cp_style=ulysses,recompute=selective",
    "cp=2,tp=2",
    "cp=2,tp=2,cp_style=ulysses,sp=off,loss=chunked",
    "cp=2,dp=2,zero=1",
    "pp=2,schedule=zbv,chunks=2",
    "cp=2,dp=2,zero=3,micro_batch=2",
    "cp=2,dp=2,zero=2,pp=2",
]
LONGER = QWEN3 | {"num_hidden_layers": 4}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_h75_h62_packed_rows_in_every_layout(pool: Any, layout: str) -> None:
    """H75: documents stay apart across ranks; H62: every stage masks by document. Two steps with other borders each."""
    result = proven(pool, layout, config=LONGER, packed=True, global_batch=8)
    assert result["notes"] == ["rows are packed: documents do not see each other"]


@pytest.mark.parametrize("config", [MISTRAL, GPT2, PHI3, MIXTRAL, LLAMA], ids=lambda c: c["model_type"])
@pytest.mark.parametrize("layout", ["cp=2", "cp=2,cp_style=ulysses", "dp=2,zero=1"])
def test_families(pool: Any, config: dict[str, Any], layout: str) -> None:
    """Windows of five positions inside documents, learned positions that begin again, fused matrices, experts."""
    proven(pool, layout, config=config, packed=True, steps=1)


@pytest.mark.parametrize(
    ("layout", "seq_len"),
    [
        ("cp=4", 27),
        ("cp=2", 31),
        ("cp=4,cp_style=ulysses", 30),
        ("cp=2,tp=2", 29),
        ("cp=2,cp_style=ulysses", 5),
    ],
)
@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=lambda c: c["model_type"])
def test_h71_packed_rows_that_do_not_split_are_padded(
    pool: Any, config: dict[str, Any], layout: str, seq_len: int
) -> None:
    """GPT-2's table of positions is just as long as the row."""
    if config is GPT2:
        config = GPT2 | {"n_positions": seq_len}
    proven(pool, layout, config=config, packed=True, seq_len=seq_len, steps=1)


@pytest.mark.parametrize(
    "layout", ["cp=2,cp_style=ulysses", "cp=2,recompute=full", "cp=2,pp=2", "dp=2", "tp=2,sp=off"]
)
def test_packed_rows_with_dropout(pool: Any, layout: str) -> None:
    config = GPT2 | {"n_layer": 4, "resid_pdrop": 0.2, "embd_pdrop": 0.1, "attn_pdrop": 0.3}
    proven(pool, layout, config=config, packed=True, seq_len=27)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["cp=2,dp=2,ep=2,zero=1", "dp=2,ep=2"])
def test_packed_rows_with_experts(pool: Any, layout: str) -> None:
    proven(pool, layout, config=MIXTRAL, packed=True)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("layout", ["cp=2", "cp=2,cp_style=ulysses,zero=3"])
@pytest.mark.parametrize("dropped", [0.0, 0.2])
def test_lower_precision(pool: Any, layout: str, precision: str, dropped: float) -> None:
    """A key's bias has no gradient in exact arithmetic, and Adam makes steps of its rounding noise: it is left out."""
    config = GPT2 | {"resid_pdrop": dropped, "attn_pdrop": dropped}
    result = proven(pool, layout, config=config, packed=True, precision=precision)
    assert result["weights"]["not_compared"] == [
        f"transformer.h.{i}.attn.c_attn.bias (32 of 96 entries)" for i in range(2)
    ]


@pytest.mark.slow
def test_the_ladder_of_packed_rows(pool: Any) -> None:
    """Every rung takes packed rows, the one whose shards are threads of one process too."""

    def at_rung(rung: Rung) -> dict[str, Any]:
        return prove(pool, rung.layout.text(), config=QWEN3, steps=1, simulated=rung.simulated, packed=True)

    result = climb(parse_layout("dp=2,zero=2,tp=2,cp=2,precision=fp64"), at_rung, lambda line: None)
    assert result["passed"], result["ladder"]
    assert any(line["simulated"] for line in result["ladder"])


def forgets_documents(model: Any, step: int) -> None:
    """Attend over the whole row from the second step on, at the right positions, on the ranks of one coordinate."""
    if step == 0 and model.view.coords["cp"] == 1:
        for stage in model.stages.values():
            told = stage.told
            stage.told = lambda packed, told=told: {"position_ids": told(packed)["position_ids"]}


def forgets_positions(model: Any, step: int) -> None:
    if step == 0 and model.view.rank == 1:
        for stage in model.stages.values():
            told, at = stage.told, model.context.position_ids
            stage.told = lambda packed, told=told, at=at: told(packed) | {"position_ids": at}


@pytest.mark.parametrize("fault", [forgets_documents, forgets_positions])
def test_a_rank_that_forgets_documents_or_positions_is_found(pool: Any, fault: Any) -> None:
    result = prove(pool, "cp=2", config=LLAMA, packed=True, steps=2, fault=fault)
    assert not result["passed"]
    assert result["gradients"]["worst"]["step"] == 2


def test_packing_changes_the_loss(pool: Any) -> None:
    """Documents of a row that see each other give another loss: the batches do hold several to a row."""
    on = prove(pool, "dp=1", config=LLAMA, packed=True, steps=1)
    off = prove(pool, "dp=1", config=LLAMA, packed=True, steps=1, joined=True)
    assert abs(on["loss"]["reference"][0] - off["loss"]["reference"][0]) > 1e-4


PADDED = ((3, 4), (5, 8))
"""Real tokens of two documents, and the lengths that they are padded to: rows of 12 tokens, 6 on each of two ranks."""


def _padded_logits(rank: int, world: int, config: dict[str, Any], styles: tuple[str, ...]) -> list[Any]:
    """Return per style this rank's positions and logits [1, L, V] of the padded documents in one row."""
    import torch

    from meshwright.mesh.device_mesh import build_mesh
    from meshwright.model.read_hf import spec_from_config
    from meshwright.parallel.apply import apply_plan
    from meshwright.program.make import make_plan

    spec = spec_from_config(config, "padded")
    ids, places = _padded_row()
    out: list[Any] = []
    for style in styles:
        layout = parse_layout(f"cp={world},cp_style={style},precision=fp64")
        plan = make_plan(spec, layout, 1, ids.shape[-1], "padded")
        model = apply_plan(plan, spec, build_mesh(plan.layout, rank), seed=0)
        axis = model.context
        assert axis is not None
        with torch.no_grad():
            out.append((axis.positions, model.stages[0].logits(axis.part(ids, 0), places)))
    return out


def _padded_row() -> tuple[Any, Any]:
    """Return the token ids and the positions [1, 12] of the documents of ``PADDED``; the padding is token 0."""
    import torch

    ids = torch.zeros(1, sum(padded for _, padded in PADDED), dtype=torch.int64)
    places = torch.cat([torch.arange(padded) for _, padded in PADDED])[None]
    at = 0
    for number, (real, padded) in enumerate(PADDED):
        ids[0, at : at + real] = torch.arange(1, real + 1) * (number + 2)
        at += padded
    return ids, places


def test_h77_real_tokens_of_padded_documents_have_their_own_logits(pool: Any) -> None:
    """H77: documents of 3 and 5 padded to 4 and 8 over two ranks: real tokens have the logits of their document alone.

    Positions go up to 7, beyond the 6 tokens of a rank: a table of rotations cut to the local length, or one that counts
    real instead of padded lengths, gives other logits. Ring and Ulysses; rotations (Llama) and a learned table (GPT-2).
    """
    import torch

    from meshwright.parallel.build import build_model

    ids, _ = _padded_row()
    for config in (LLAMA, GPT2):
        alone = build_model(config, seed=0, dtype=torch.float64).eval()
        found = pool.run(_padded_logits, 2, config, ("ring", "ulysses"))
        for parts in zip(*found, strict=True):  # of both ranks, per style
            whole = torch.empty(ids.shape[-1], parts[0][1].shape[-1], dtype=torch.float64)
            for positions, logits in parts:
                whole[positions] = logits[0]
            at = 0
            for real, padded in PADDED:
                with torch.no_grad():
                    want = alone(input_ids=ids[:, at : at + real], use_cache=False).logits[0]
                assert float((whole[at : at + real] - want).abs().max()) <= 1e-12 * float(want.abs().max())
                at += padded
