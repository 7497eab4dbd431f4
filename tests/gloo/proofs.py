"""Proofs on the session's pool of ranks: the product's own path, with the pool in the launcher's place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.layout.parse import parse_layout
from meshwright.mesh.env import RankFacts
from meshwright.model.adapters import adapted
from meshwright.model.read_hf import read_model, spec_from_config
from meshwright.model.spec import AdapterSpec
from meshwright.orchestrate.proving import (
    DEFAULT_SEQ_LEN,
    ProofOptimizer,
    proof_plan,
    run_proof,
    synthetic_batches,
)

TINY = "recipes/models/tiny-llama"

SMALL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 67,
    "max_position_embeddings": 64,
}
"""Odd on purpose: 5 layers, 67 tokens of vocabulary (no degree divides it)."""


def on_pool(rank: int, world: int, worker: Any, work: Any) -> Any:
    facts = RankFacts(rank=rank, world_size=world, local_rank=rank, local_world_size=world)
    return worker(facts, work)


def prove(
    pool: Any,
    layout: str,
    *,
    config: dict[str, Any] | str = TINY,
    steps: int = 2,
    precision: str = "fp64",
    global_batch: int | None = None,
    freeze: tuple[str, ...] = (),
    adapter: AdapterSpec | None = None,
    valid: str = "unequal",
    seq_len: int = DEFAULT_SEQ_LEN,
    fault: Any = None,
    optimizer: Any = None,
    max_norm: float | None = 1.0,
    simulated: bool = False,
    packed: bool = False,
    joined: bool = False,
) -> dict[str, Any]:
    """Prove ``layout``; ``joined``: the tokens and labels of packed rows, whose documents then see each other."""
    spec = read_model(config) if isinstance(config, str) else spec_from_config(config, "small")
    spec = adapted(spec, adapter)
    wanted = replace(parse_layout(layout), precision=precision)
    plan = proof_plan(
        spec, wanted, model_path="test", seq_len=seq_len, global_batch=global_batch, freeze=freeze
    )

    batches = None
    if joined:
        made = synthetic_batches(plan, spec, steps, 0, valid, packed=True)
        batches = [batch._replace(positions_GT=None) for batch in made]

    def execute(worker: Any, nproc: int, work: Any) -> list[Any]:
        return pool.run(on_pool, nproc, worker, work, timeout_s=120.0)

    return run_proof(
        plan,
        spec,
        steps=steps,
        seed=0,
        valid=valid,
        optimizer=optimizer or ProofOptimizer(),
        max_norm=max_norm,
        show=lambda line: None,
        fault=fault,
        execute=execute,
        simulated=simulated,
        packed=packed,
        batches=batches,
    )
