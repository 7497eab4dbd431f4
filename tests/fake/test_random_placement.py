"""Random layouts x models: each is refused with a code, or every rank builds its part and nothing is lost or doubled.

One process plays every rank in turn, in a child of its own: torch keeps what it found out about a mesh (DTensor's
sharding rules hold the mesh, and with it the coordinate), and later ranks of this session would be given another's.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.testing._internal.distributed.fake_pg import FakeStore

from family_configs import NEWER, PHI3
from meshwright.base.errors import MeshwrightError
from meshwright.layout.layout import Layout
from meshwright.layout.parse import complete
from meshwright.mesh.device_mesh import build_mesh
from meshwright.model.adapters import adapted, parse_adapter
from meshwright.model.read_hf import spec_from_config
from meshwright.model.spec import ModelSpec
from meshwright.orchestrate.proving import proof_plan
from meshwright.parallel.apply import apply_plan, needs_tied_group
from meshwright.parallel.placement import account, placed
from meshwright.program.plan import Plan

LARGEST_WORLD = 16
QUICK_WORLD = 4
"""Ranks of the largest world that the quick test builds."""
COMMON = {
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 37,
    "max_position_embeddings": 32,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "num_hidden_layers": 4, **COMMON},
    "qwen3 tied": {
        "model_type": "qwen3",
        "num_hidden_layers": 5,
        "head_dim": 4,
        "tie_word_embeddings": True,
        **COMMON,
    },
    "mixtral": {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "num_hidden_layers": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        **COMMON,
    },
    "gpt2 tied": {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 16,
        "n_layer": 4,
        "n_head": 4,
        "vocab_size": 37,
        "n_positions": 32,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
}
CONFIGS |= {
    name: config | {"vocab_size": 37, "n_layer" if "n_layer" in config else "num_hidden_layers": 4}
    for name, config in {"phi3": PHI3, **NEWER}.items()
}
SPECS = {name: spec_from_config(config, name) for name, config in CONFIGS.items()}
SPECS["gpt2 with dropout"] = spec_from_config(
    CONFIGS["gpt2 tied"] | {"resid_pdrop": 0.1, "attn_pdrop": 0.2}, "gpt2 with dropout"
)
for name in ("llama", "mixtral", "phi3"):
    SPECS[f"{name} with LoRA"] = adapted(SPECS[name], parse_adapter("lora:3"))
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipev")


@pytest.fixture(autouse=True)
def no_agreement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers of a pipeline send each other their shapes; ranks that are not there send fresh memory."""
    monkeypatch.setattr(_PipelineScheduleRuntime, "_initialize_stages", lambda *_: None)


@contextmanager
def rank_of(world: int, rank: int) -> Iterator[None]:
    """Be ``rank`` of a job of ``world`` ranks whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


@st.composite
def random_layouts(draw: st.DrawFn) -> Layout:
    degree = st.sampled_from([1, 1, 2, 2, 4, 3])
    borrowed = st.sampled_from([1, 1, 1, 2, 4])
    values: dict[str, Any] = {k: draw(degree) for k in ("dp", "tp", "pp")}
    values |= {k: draw(borrowed) for k in ("cp", "ep")}
    values["zero"] = draw(st.integers(0, 3))
    values["schedule"] = draw(st.sampled_from(SCHEDULES))
    values["micro_batch"] = draw(st.sampled_from([1, 2]))
    for key, choices in (
        ("shard", st.sampled_from([1, 2, 4])),
        ("sp", st.booleans()),
        ("kv_heads", st.just("replicate")),
        ("loss", st.sampled_from(["eager", "chunked", "parallel"])),
        ("recompute", st.sampled_from(["none", "selective", "full"])),
        ("cp_style", st.sampled_from(["ring", "ulysses"])),
        ("cut", st.sampled_from(["even", "auto", "1/3", "2/1/1"])),
        ("order", st.sampled_from([("dp", "tp", "cp", "pp"), ("pp", "cp", "dp", "tp")])),
    ):
        if draw(st.integers(0, 5)) == 0:
            values[key] = draw(choices)
    return complete(values)


def plan_of(spec: ModelSpec, layout: Layout) -> Plan | None:
    """Return the plan, or None where it is refused (then every Problem has its code, numbers and way out)."""
    try:
        return proof_plan(spec, layout, model_path="test", seq_len=16, global_batch=None, freeze=())
    except MeshwrightError as error:
        refused = error.problems
    assert refused
    assert all(p.code and p.found and p.do for p in refused)
    return None


def check_all_ranks(spec: ModelSpec, plan: Plan) -> None:
    ranks: list[Any] = []
    for rank in range(plan.world_size):
        with rank_of(plan.world_size, rank):
            view = build_mesh(plan.layout, rank, tied=needs_tied_group(plan, spec))
            model = apply_plan(plan, spec, view, seed=0)
            ranks.append(placed(model.params, model.stage_of, view.coords["tp"]))
            assert all(torch.isfinite(p.detach()).all() for p in model.params.values())
    result = account(spec, plan.layout, ranks)
    assert result["complete"], (plan.layout.text(), result)


def one_case(layout: Layout, name: str, ran: set[str], largest: int) -> None:
    spec = SPECS[name]
    plan = plan_of(spec, layout)
    if plan is None or plan.world_size > largest:
        return
    check_all_ranks(spec, plan)
    ran.add(plan.layout.text())


def draw_cases(count: int, largest: int) -> set[str]:
    ran: set[str] = set()

    @settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(random_layouts(), st.sampled_from(sorted(SPECS)))
    def every_case(layout: Layout, name: str) -> None:
        one_case(layout, name, ran, largest)

    every_case()
    return ran


def ran_in_a_child(count: int, largest: int) -> int:
    """Return how many layouts ran, of ``count`` draws in a forked process."""
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe(duplex=False)

    def work() -> None:
        try:
            theirs.send((len(draw_cases(count, largest)), ""))
        except BaseException:  # the parent shows it
            theirs.send((0, traceback.format_exc()))

    child = context.Process(target=work)
    child.start()
    theirs.close()
    ran, error = mine.recv()
    child.join()
    assert not error, error
    return ran


def test_random_layouts_are_refused_or_complete() -> None:
    assert ran_in_a_child(300, QUICK_WORLD) >= 20


@pytest.mark.slow
def test_thousands_of_random_layouts() -> None:
    assert ran_in_a_child(6000, LARGEST_WORLD) >= 300
