"""Played ranks against real ones: the live bytes of a step, to the byte, on gloo."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from meshwright.base.records import MemoryBytes
from meshwright.exact.children import play_ranks
from meshwright.exact.play import Optimizer
from meshwright.exact.rank import RankTask
from meshwright.layout.parse import parse_layout
from meshwright.layout.ranks import coordinates
from meshwright.mesh.device_mesh import build_mesh
from meshwright.model.read_hf import spec_from_config
from meshwright.parallel.apply import apply_plan, needs_tied_group
from meshwright.program.make import make_plan
from meshwright.program.plan import Plan
from meshwright.schedule.text import parse_schedule
from meshwright.train.memory import LiveBytes, watch_step
from meshwright.train.offload import make_optimizer
from meshwright.train.optim import Rate
from meshwright.train.scale import loss_scale_for
from meshwright.train.step import train_step

pytestmark = pytest.mark.gloo

WIDE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
MIXTURE = WIDE | {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "num_hidden_layers": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
DROPPING = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "vocab_size": 64,
    "n_positions": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
SEQ_LEN = 32


class Settled(LiveBytes):
    """Live bytes that wait after a collective until gloo's thread has let go of the tensors it worked on.

    That thread needs Python's lock to free a tensor that Python knows, and gets it when the main thread rests.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.waits:
            self.waits -= 1
            time.sleep(5e-4)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if func.namespace == "c10d":
            self.waits = 4
        return out


def plan_of(layout: str, config: dict[str, Any] = WIDE) -> tuple[Any, Plan]:
    spec, parsed = spec_from_config(config, "wide"), parse_layout(layout)
    ranks = parsed.pp if parsed.pp > 1 else 1
    sequences = 2 * parsed.dp * ranks * parsed.micro_batch
    return spec, make_plan(spec, parsed, sequences, SEQ_LEN, "wide")


def measured(rank: int, world: int, layout: str, config: dict[str, Any]) -> MemoryBytes:
    """The live bytes of a real rank's third step, at their peak."""
    spec, plan = plan_of(layout, config)
    view = build_mesh(plan.layout, rank, tied=needs_tied_group(plan, spec))
    model = apply_plan(plan, spec, view, seed=0)
    optimizer = make_optimizer(
        model.trainable(), model.decays, Optimizer(), offload=plan.layout.offload, folder=None, rank=rank
    )
    b = plan.batch
    generator = torch.Generator().manual_seed(rank)
    shape = (2, b.accumulation, b.micro_batch, b.seq_len)
    inputs, labels = (t.clone() for t in torch.randint(0, 64, shape, generator=generator))
    rate = Rate(name="constant", peak=1e-3, warmup_steps=0, total_steps=9)
    scale = loss_scale_for(plan.layout.precision)

    def step(number: int) -> None:
        train_step(model, optimizer, inputs, labels, step=number, rate=rate, max_norm=1.0, scale=scale)

    step(1)
    step(2)
    counter = Settled()
    with watch_step(model, optimizer, (inputs, labels), counter):
        step(3)
    return counter.memory()


def played(layout: str, ranks: list[int], config: dict[str, Any]) -> list[MemoryBytes]:
    spec, plan = plan_of(layout, config)
    homes = parse_schedule(plan.schedule_text, name=plan.layout.schedule).stage_ranks
    tasks = [
        RankTask(
            position=str(rank),
            rank=rank,
            stages=tuple(s for s, home in enumerate(homes) if home == coordinates(plan.layout, rank)["pp"]),
            plan=plan,
            spec=spec,
            gloo=True,
        )
        for rank in ranks
    ]
    return [found.memory for found in play_ranks(tasks)]


def compare(pool: Any, layout: str, config: dict[str, Any] = WIDE) -> None:
    world = parse_layout(layout).world_size
    real = pool.run(measured, world, layout, config)
    apart = plan_of(layout, config)[1].layout
    ranks = [r for r in range(world) if all(c == 0 for a, c in coordinates(apart, r).items() if a != "pp")]
    for rank, exact in zip(ranks, played(layout, ranks, config), strict=True):
        assert exact.total == real[rank].total, (layout, rank, exact, real[rank])
        assert exact == real[rank]


@pytest.mark.parametrize("layout", ["dp=2,zero=3,tp=2,recompute=full", "pp=2"])
def test_played_bytes_are_those_of_a_real_step(pool, layout):
    compare(pool, layout)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        "dp=2",
        "dp=2,zero=1",
        "dp=2,zero=2",
        "dp=2,zero=3",
        "dp=4,zero=3",
        "dp=4,zero=3,shard=2",
        "dp=4,zero=3,precision=fp32",
        "dp=2,zero=3,recompute=selective",
        "dp=2,zero=3,loss=chunked",
        "dp=2,zero=3,offload=optimizer",
        "tp=2",
        "tp=2,loss=chunked,recompute=full",
        "cp=2",
        "dp=2,cp=2,zero=3",
        "cp=2,cp_style=ulysses,recompute=full",
        "pp=2,schedule=interleaved",
        "pp=4",
        "pp=2,schedule=gpipe,recompute=full",
        "pp=2,schedule=zb-h1",
        "pp=2,schedule=zbv",
        "dp=2,pp=2,zero=1",
        "dp=2,pp=2,zero=3",
        "tp=2,pp=2",
        "dp=2,zero=3,precision=fp16,micro_batch=2",
    ],
)
def test_more_played_bytes_are_those_of_a_real_step(pool, layout):
    compare(pool, layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp=2,zero=3", "dp=2", "tp=2", "pp=2"])
@pytest.mark.parametrize("config", [MIXTURE, DROPPING], ids=["experts", "dropout"])
def test_played_bytes_of_experts_and_dropout(pool, layout, config):
    """Without ep the rows of all experts are sorted and stay here: how a router chooses changes no size."""
    compare(pool, layout, config)


@pytest.mark.slow
def test_balanced_experts_are_near_those_of_a_fresh_router(pool):
    """With ep a rank holds the rows that others send; a fresh router is nearly balanced."""
    layout = "dp=2,ep=2,zero=2"
    real = pool.run(measured, 2, layout, MIXTURE)
    (exact,) = played(layout, [0], MIXTURE)
    assert exact.total == pytest.approx(max(r.total for r in real), rel=0.05)
    assert (exact.parameters, exact.optimizer) == (real[0].parameters, real[0].optimizer)
