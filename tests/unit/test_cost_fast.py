"""Columns against single predictions on random layouts, and the units against the program's."""

import random

import pytest
from tests.unit.test_cluster_load import PROBE

from meshwright.cluster.load import cluster_from_probe, read_cluster
from meshwright.cluster.spec import ClusterSpec
from meshwright.cost.fast import columns
from meshwright.cost.pieces import make_pricer
from meshwright.cost.predict import predict_with
from meshwright.cost.units import stage_tensors, stage_units
from meshwright.layout.batch import derive_batch
from meshwright.layout.check import divisors
from meshwright.layout.cut import even_cut, resolve_cut
from meshwright.layout.layout import Layout
from meshwright.model.read_hf import read_model
from meshwright.program import units as program_units
from meshwright.schedule.generate import generate


def random_layouts(
    spec_layers: int, gpus: int, count: int, seed: int, precision: str
) -> list[tuple[Layout, int]]:
    draw = random.Random(seed)
    out: list[tuple[Layout, int]] = []
    while len(out) < count:
        pp = draw.choice([d for d in divisors(gpus) if d <= spec_layers])
        dp = gpus // pp
        zero = draw.choice([0, 1, 2, 3]) if dp > 1 else 0
        shard = draw.choice([d for d in divisors(dp) if d > 1]) if zero else 1
        layout = Layout(
            dp=dp,
            zero=zero,
            shard=shard,
            pp=pp,
            micro_batch=draw.choice([1, 2, 4]),
            schedule=draw.choice(["gpipe", "1f1b"]),
            precision=precision,
        )
        if pp > 1 and draw.random() < 0.5:
            even = even_cut(spec_layers, pp)
            moved = draw.randint(0, min(2, min(even) - 1))
            giver, taker = draw.sample(range(pp), 2)
            change = {giver: -moved, taker: moved}
            layout = layout.with_cut(tuple(n + change.get(s, 0) for s, n in enumerate(even)))
        out.append((layout, dp * layout.micro_batch * draw.choice([1, 2, 4, 8, 16])))
    return out


CASES = [
    ("llama-2-7b", read_cluster("a100-80gb-x8", 16), 2048, "bf16"),
    ("llama-2-7b", read_cluster("aws-p4d", 32), 2048, "fp32"),
    ("qwen2.5-0.5b", read_cluster("v100-32gb-x8"), 1024, "fp16"),
    ("smollm2-135m", cluster_from_probe(PROBE), 128, "fp32"),
]


@pytest.mark.parametrize(("model", "cluster", "seq_len", "precision"), CASES)
def test_columns_equal_single_predictions(model: str, cluster: ClusterSpec, seq_len: int, precision: str):
    spec = read_model(model)
    pricer = make_pricer(spec, cluster, seq_len, precision)
    drawn = random_layouts(spec.num_layers, cluster.num_gpus, 120, 7, precision)
    layouts = [layout for layout, _ in drawn]
    batches = [derive_batch(layout, batch, seq_len) for layout, batch in drawn]
    priced = columns(pricer, layouts, batches)
    worst_memory = worst_time = 0.0
    for i, (layout, batch) in enumerate(zip(layouts, batches, strict=True)):
        fixed = layout.with_cut(priced.cuts[i])
        exact = predict_with(pricer, fixed, batch, generate(layout.schedule, layout.pp, batch.accumulation))
        worst_memory = max(worst_memory, abs(float(priced.peak[i]) / exact.peak_memory_bytes - 1))
        worst_time = max(worst_time, abs(float(priced.step[i]) / exact.step_time_s - 1))
        assert exact.time.total == pytest.approx(exact.step_time_s, rel=1e-12)
        assert exact.memory.total == exact.peak_memory_bytes
        assert all(v >= 0 for v in exact.memory.as_dict().values())
        assert all(v >= 0 for v in exact.time.as_dict().values())
        assert exact.step_time_low_s < exact.step_time_s < exact.step_time_high_s
    print(f"{model} on {cluster.name}: memory {100 * worst_memory:.4f} %, time {100 * worst_time:.3f} %")
    assert worst_memory < 0.01
    assert worst_time < 0.05


@pytest.mark.parametrize("model", ["llama-2-7b", "smollm2-135m", "gpt2", "mixtral-8x7b", "deepseek-v3"])
@pytest.mark.parametrize("text", [(1, 1), (1, 4), (2, 3)])
def test_units_are_those_of_the_program(model: str, text: tuple[int, int]):
    pp, shards = text
    spec = read_model(model)
    pricer = make_pricer(spec, read_cluster("a100-80gb-x8"), 128, "bf16")
    layout = Layout(pp=pp, dp=shards, zero=3 if shards > 1 else 0, shard=shards)
    layout = layout.with_cut(resolve_cut(spec, layout, 128))
    ours = stage_units(pricer, pp, 1, 1, shards)
    block = 0
    for stage in range(pp):
        theirs = program_units.stage_units(spec, layout, stage)
        assert [t.name for t in stage_tensors(pricer, stage, pp)] == [t.name for t in theirs[0].tensors]
        assert ours.root[stage].full == theirs[0].padded_numel(shards)
        for unit in theirs[1:]:
            assert ours.kinds[pricer.kind_of[block]].full == unit.padded_numel(shards)
            block += 1
    assert block == spec.num_layers
