"""The search in columns: bounds that hold, rules as masks, and the same answer as trying every layout."""

import itertools
import random
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from tests.unit.test_cluster_load import PLACED

from meshwright.base.errors import MeshwrightError
from meshwright.cluster.load import cluster_from_probe, read_cluster
from meshwright.cluster.spec import ClusterSpec
from meshwright.cost.bounds import chunks_held
from meshwright.cost.fast import columns
from meshwright.cost.pieces import Pricer, make_pricer
from meshwright.cost.predict import fits, predict_with
from meshwright.cost.replay import held_at_peak, makespans
from meshwright.cost.rows import rows_of
from meshwright.cost.slots import make_slot
from meshwright.cost.sweep import block_floors, sweep
from meshwright.cost.tables import make_tables
from meshwright.layout.batch import Batch, derive_batch
from meshwright.layout.check import check, divisors
from meshwright.layout.cut import resolve_cut
from meshwright.layout.layout import Layout
from meshwright.layout.parse import parse_layout, written_keys
from meshwright.model.adapters import adapted, parse_adapter
from meshwright.model.read_hf import read_model
from meshwright.model.spec import ModelSpec
from meshwright.schedule.clock import run_clock
from meshwright.schedule.generate import fewest_micro_batches, generate
from meshwright.search import best as best_first
from meshwright.search.best import Candidate, dominated, front_of
from meshwright.search.search import search
from meshwright.search.space import Space, all_blocks

ORDERS = (("tp", "cp", "dp", "pp"), ("tp", "cp", "pp", "dp"))
SCHEDULES = ("gpipe", "1f1b", "zb-h1", "interleaved", "zbv", "dualpipev")


def exact(pricer: Pricer, layout: Layout, batch: Batch):
    fixed = layout.with_cut(resolve_cut(pricer.spec, layout, batch.seq_len))
    schedule = generate(layout.schedule, layout.pp, batch.accumulation, layout.chunks)
    return predict_with(pricer, fixed, batch, schedule)


def drawn(spec: ModelSpec, cluster: ClusterSpec, seq_len: int, count: int, precision: str):
    """Random legal layouts over every axis, grouped by pp, chunks and placement."""
    draw, gpus = random.Random(3), cluster.num_gpus
    groups: dict[tuple[int, int, bool], list[tuple[Layout, Batch]]] = defaultdict(list)
    while sum(map(len, groups.values())) < count:
        tp = draw.choice([d for d in divisors(gpus) if d <= 8])
        pp = draw.choice([d for d in divisors(gpus // tp) if d <= min(16, spec.num_layers)])
        cp = draw.choice([d for d in divisors(gpus // tp // pp) if d <= 4])
        dp = gpus // tp // pp // cp
        zero = draw.choice([0, 1, 2, 3]) if dp * cp > 1 else 0
        shard = draw.choice([d * cp for d in divisors(dp) if d * cp > 1]) if zero else 1
        eps = [d for d in divisors(dp * cp) if spec.moe and spec.moe.num_experts % d == 0]
        schedule = draw.choice(SCHEDULES) if pp > 1 else "1f1b"
        layout = Layout(
            dp=dp, zero=zero, shard=shard, tp=tp, sp=tp > 1 and draw.random() < 0.7, pp=pp, cp=cp,
            ep=draw.choice(eps or [1]), schedule=schedule, order=draw.choice(ORDERS), precision=precision,
            chunks={"interleaved": draw.choice([2, 3]), "zbv": 2, "dualpipev": 2}.get(schedule, 1),
            micro_batch=draw.choice([1, 2]), recompute=draw.choice(["none", "selective", "full"]),
            loss=draw.choice(["eager", "chunked"]),
        )  # fmt: skip
        batch = derive_batch(layout, dp * layout.micro_batch * draw.choice([1, 2, 4, 8, 16, 32]), seq_len)
        problems = check(spec, layout, batch, cluster, for_run=False)
        if not [p for p in problems if p.severity == "error"]:
            groups[pp, layout.chunks, schedule in ("zbv", "dualpipev")].append((layout, batch))
    return list(groups.values())


CASES = [
    ("llama-2-7b", read_cluster("a100-80gb-x8", 64), 2048, "bf16"),
    ("mixtral-8x7b", read_cluster("aws-p4d", 32), 2048, "bf16"),
    ("gemma-2-9b", read_cluster("a100-80gb-x8", 32), 1024, "fp32"),
    ("smollm2-135m", cluster_from_probe(PLACED), 128, "fp32"),
]


@pytest.mark.parametrize(("model", "cluster", "seq_len", "precision"), CASES)
def test_the_fast_tier_never_exceeds_the_clock_and_holds_the_same_memory(
    model: str, cluster: ClusterSpec, seq_len: int, precision: str
):
    spec = read_model(model)
    pricer = make_pricer(spec, cluster, seq_len, precision)
    tables = make_tables(pricer)
    gaps: list[float] = []
    for group in drawn(spec, cluster, seq_len, 60, precision):
        rows = rows_of([x for x, _ in group], [b for _, b in group])
        slot = make_slot(pricer, group[0][0])
        priced = sweep(tables, rows, slot)
        floors = block_floors(tables, rows_of([_sparest(x) for x, _ in group], [b for _, b in group]), slot)
        for i, (layout, batch) in enumerate(group):
            one = exact(pricer, layout, batch)
            assert priced.least[i] <= one.step_time_s * (1 + 1e-9), layout.text()
            assert floors[0][i] <= one.step_time_s * (1 + 1e-9), layout.text()
            assert floors[1][i] <= one.peak_memory_bytes * (1 + 1e-9), layout.text()
            assert priced.peak[i] == pytest.approx(one.peak_memory_bytes, rel=0.006), layout.text()
            gaps.append(1 - float(priced.least[i]) / one.step_time_s)
    print(f"{model}: bounds are {100 * np.mean(gaps):.1f} % below the clock on average")


def named_model(text: str) -> ModelSpec:
    """A model, with "+lora:RANK" for adapters on it."""
    name, _, adapter = text.partition("+")
    return adapted(read_model(name), parse_adapter(adapter) if adapter else None)


PARTS = [
    ("mixtral-8x7b", "aws-p4d", 32, "none"),
    ("mixtral-8x7b", "aws-p4d", 32, "optimizer"),
    ("deepseek-v2-lite", "h100-x8", 16, "none"),
    ("llama-2-7b+lora:16", "a100-80gb-x8", 32, "none"),
    ("llama-2-7b+qlora:16", "a100-80gb-x8", 32, "none"),
    ("smollm2-135m+lora:16", "a100-80gb-x8", 32, "optimizer-nvme"),
    ("llama-2-7b", "a100-80gb-x8", 16, "optimizer"),
    ("smollm2-135m", "probe", 2, "optimizer-nvme"),
]


@pytest.mark.parametrize(("model", "name", "gpus", "offload"), PARTS)
def test_every_part_of_the_fast_tier_is_that_of_a_single_prediction(
    model: str, name: str, gpus: int, offload: str
):
    spec = named_model(model)
    cluster = cluster_from_probe(PLACED) if name == "probe" else read_cluster(name, gpus)
    precision = "fp32" if name == "probe" else "bf16"
    pricer = make_pricer(spec, cluster, 512, precision)
    tables = make_tables(pricer)
    seen: set[tuple[int, bool]] = set()
    for group in drawn(spec, cluster, 512, 40, precision):
        layouts = [replace(x, offload=offload) for x, _ in group]
        batches = [b for _, b in group]
        rows, slot = rows_of(layouts, batches), make_slot(pricer, layouts[0])
        priced, floors = sweep(tables, rows, slot), block_floors(tables, rows, slot)
        one = columns(pricer, layouts, batches)
        stages = slot.num_stages
        assert priced.forward[:, slot.run_of] == pytest.approx(one.forward[:, :stages], rel=1e-9)
        assert priced.backward[:, slot.run_of] == pytest.approx(one.backward[:, :stages], rel=1e-9)
        assert priced.send == pytest.approx(one.send, rel=1e-9)
        for field in (
            "resting",
            "trainable_resting",
            "away",
            "block",
            "tensor",
            "cast",
            "packed",
            "unpacked",
        ):
            got = getattr(priced.load, field)[:, slot.run_of]
            assert got == pytest.approx(getattr(one.load, field)[:, :stages], rel=1e-9), field
        if slot.chunks == 1:
            rest = one.once.max(axis=1) + one.optimizer + one.offload + one.other
            assert priced.rest == pytest.approx(rest, rel=1e-9)
        assert (floors[0] <= one.step * (1 + 1e-9)).all()
        seen |= {(x.ep, x.zero > 0) for x in layouts}
    if spec.moe is not None:
        assert len({ep for ep, zero in seen if zero}) > 2
        assert any(ep > 1 and not zero for ep, zero in seen)
    assert offload == "none" or (priced.load.away == 1).all()


def _sparest(layout: Layout) -> Layout:
    room = layout.dp * layout.cp
    return replace(layout, zero=3 if room > 1 else 0, shard=room if room > 1 else 1, order=ORDERS[0])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pp", [2, 3, 4, 8])
def test_many_layouts_on_the_clock_equal_one_at_a_time(schedule: str, pp: int):
    draw = np.random.default_rng(pp)
    chunks = {"interleaved": 3, "zbv": 2, "dualpipev": 2}.get(schedule, 1)
    least, step = fewest_micro_batches(schedule, pp)
    for m in {least, least + step, 2 * pp + (2 * pp) % step, 6 * pp * chunks}:
        if m < least or m % step:
            continue
        ahead, behind = draw.uniform(0.5, 1.5, (2, pp * chunks, 4))
        send = draw.uniform(0.0, 0.3, 4)
        got, played = makespans(schedule, pp, chunks, m, ahead, behind, send)
        full = generate(schedule, pp, m, chunks)
        for i in range(4):
            clock = run_clock(full, list(ahead[:, i]), list(behind[:, i]), float(send[i]))
            if played.num_micro_batches == m:
                assert got[i] == pytest.approx(clock.makespan_s, rel=1e-12)
            assert got[i] == pytest.approx(clock.makespan_s, rel=0.01)
            assert [int(n) for n in held_at_peak(full)[1]] == list(clock.peak_in_flight)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_chunks_in_flight_by_closed_form_are_those_of_the_rows(schedule: str):
    chunks = {"interleaved": 2, "zbv": 2, "dualpipev": 2}.get(schedule, 1)
    pricer = make_pricer(read_model("llama-2-7b"), read_cluster("a100-80gb-x8"), 128, "bf16")
    for pp, m in itertools.product([2, 4, 8], [1, 4, 8, 16, 32]):
        least, step = fewest_micro_batches(schedule, pp)
        if m < least or m % step:
            continue
        layout = Layout(pp=pp, chunks=chunks, schedule=schedule)
        slot = make_slot(pricer, layout, every=True)
        rows = rows_of([layout], [Batch(global_batch=m, micro_batch=1, accumulation=m, dp=1, seq_len=128)])
        total, split = chunks_held(rows, slot, np.array([float(m)]))
        held, sums = held_at_peak(generate(schedule, pp, m, chunks))
        if schedule != "zbv" or m >= 2 * pp:
            assert list(total[0]) == list(sums), (pp, m)
            assert (split[0] == held).all(), (pp, m)
        assert (total[0] >= sums - 1e-9).all()


def every_layout(spec: ModelSpec, cluster: ClusterSpec, seq_len: int, batch: int, pins: dict[str, object]):
    """All layouts of the space, one at a time through the rules."""
    gpus = cluster.num_gpus
    for tp, pp, cp in itertools.product(divisors(gpus), repeat=3):
        if gpus % (tp * pp * cp):
            continue
        dp = gpus // (tp * pp * cp)
        if cp > 1 and seq_len < 1024 * cp and "cp" not in pins:
            continue
        if batch % dp or pp > spec.num_layers or pins.get("cp", cp) != cp or pins.get("pp", pp) != pp:
            continue
        pipelines = [("1f1b", 1)]
        if pp > 1:
            pipelines += [("gpipe", 1), ("zb-h1", 1), ("zbv", 2), ("dualpipev", 2)]
            pipelines += [("interleaved", v) for v in range(2, 9)]
        for (schedule, chunks), micro, recompute, loss, sp, style, ep, zero, order in itertools.product(
            pipelines,
            [d for d in divisors(batch // dp) if d <= 64],
            ["none", "selective", "full"],
            ["eager", "chunked", "parallel"],
            [True, False],
            ["ring", "ulysses"] if cp > 1 else ["ring"],
            divisors(spec.moe.num_experts) if spec.moe else [1],
            [0, 1, 2, 3] if dp * cp > 1 else [0],
            ORDERS if pp > 1 and dp > 1 and gpus > cluster.gpus_per_node else ORDERS[:1],
        ):
            named = {
                "schedule": schedule,
                "micro_batch": micro,
                "recompute": recompute,
                "loss": loss,
                "sp": sp,
            }
            named["zero"] = zero
            if any(pins.get(k, v) != v for k, v in named.items()):
                continue
            m = batch // dp // micro
            if (schedule == "gpipe" and m == 1) or (loss == "parallel" and tp == 1 and "loss" not in pins):
                continue  # the same as 1f1b, and as eager
            kv = "replicate" if tp > 1 and spec.num_kv_heads % tp else "split"
            for shard in [d * cp for d in divisors(dp) if d * cp > 1] if zero else [1]:
                layout = Layout(
                    dp=dp, zero=zero, shard=shard, tp=tp, sp=sp, pp=pp, chunks=chunks, order=order, loss=loss,
                    kv_heads=kv, schedule=schedule, cp=cp, cp_style=style, ep=ep, micro_batch=micro,
                    recompute=recompute, offload=str(pins.get("offload", "none")),
                )  # fmt: skip
                found = derive_batch(layout, batch, seq_len)
                yield layout, found


BRUTE = [
    ("llama-2-7b", "a100-80gb-x8", 16, 2048, 16, "micro_batch=1,recompute=selective,loss=chunked,sp=on,pp=4,cp=1", True),
    ("llama-2-7b", "a100-40gb-x8", 8, 2048, 32, "recompute=full,loss=chunked,cp=1,micro_batch=1,sp=on", False),
    (
        *("mixtral-8x7b", "a100-80gb-x8", 64, 1024, 32),
        *("micro_batch=1,recompute=none,loss=parallel,schedule=1f1b,cp=2,pp=2,sp=on", True),
    ),
    (
        *("mixtral-8x7b", "a100-80gb-x8", 32, 2048, 32),
        *("micro_batch=1,recompute=full,loss=chunked,schedule=1f1b,pp=4,cp=1", False),
    ),
    ("llama-2-7b+lora:16", "a100-40gb-x8", 8, 2048, 32, "micro_batch=1,recompute=none,loss=chunked,sp=on", False),
    (
        *("llama-2-7b", "a100-40gb-x8", 8, 2048, 32),
        *("micro_batch=1,recompute=none,loss=chunked,cp=1,offload=optimizer", False),
    ),
    pytest.param(
        *("mixtral-8x7b", "a100-80gb-x8", 32, 2048, 32),
        *("micro_batch=2,recompute=full,loss=chunked,schedule=zbv,sp=on,cp=1", True),
        marks=pytest.mark.slow,
    ),
    pytest.param(
        *("mixtral-8x7b", "a100-80gb-x8", 64, 1024, 32),
        *("micro_batch=1,recompute=none,loss=parallel,cp=2,sp=on,zero=1,schedule=interleaved", True),
        marks=pytest.mark.slow,
    ),
    pytest.param(
        *("llama-2-13b", "a100-40gb-x8", 16, 2048, 48, "recompute=full,loss=chunked,cp=1,micro_batch=1", False),
        marks=pytest.mark.slow,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("model", "name", "gpus", "seq_len", "batch", "fix", "unbuilt"), BRUTE)
def test_the_search_equals_trying_every_layout(
    model: str,
    name: str,
    gpus: int,
    seq_len: int,
    batch: int,
    fix: str,
    unbuilt: bool,
    monkeypatch: pytest.MonkeyPatch,
):
    spec, cluster = named_model(model), read_cluster(name, gpus)
    parsed = parse_layout(fix)
    pins = {k: getattr(parsed, k) for k in written_keys(fix)}
    pricer = make_pricer(spec, cluster, seq_len, "bf16")
    legal = 0
    steps: list[float] = []
    peaks: list[int] = []
    both: list[tuple[float, int]] = []
    for layout, found in every_layout(spec, cluster, seq_len, batch, pins):
        problems = check(spec, layout, found, cluster, for_run=not unbuilt)
        if any(p.severity == "error" for p in problems):
            continue
        legal += 1
        one = exact(pricer, layout, found)
        if fits(one):
            steps.append(one.step_time_s)
            peaks.append(one.peak_memory_bytes)
            both.append((one.step_time_s, one.peak_memory_bytes))
    # small portions, so that a part of the space must be left out by its bounds
    few = max(10, legal // 50)
    for constant, size in (("FIRST_LAYOUTS", few), ("MORE_LAYOUTS", 2 * few), ("PLAYED", max(8, few // 4))):
        monkeypatch.setattr(best_first, constant, size)
    plain = search(spec, cluster, seq_len, batch, fix=fix, top=3, include_unbuilt=unbuilt)
    got = search(spec, cluster, seq_len, batch, fix=fix, top=3, include_unbuilt=unbuilt, pareto=True)
    assert plain.searched < legal
    assert [p.layout for p in plain.plans] == [p.layout for p in got.plans]
    small = search(spec, cluster, seq_len, batch, fix=fix, top=3, include_unbuilt=unbuilt, objective="memory")
    assert got.legal == legal
    assert [p.prediction.step_time_s for p in got.plans if p.prediction] == pytest.approx(
        sorted(steps)[:3], rel=1e-9
    )
    assert [p.prediction.peak_memory_bytes for p in small.plans if p.prediction] == pytest.approx(
        sorted(peaks)[:3], rel=1e-6
    )
    best = [x for x in sorted(set(both)) if not any(y[0] <= x[0] and y[1] <= x[1] and y != x for y in both)]
    front = [(p.prediction.step_time_s, p.prediction.peak_memory_bytes) for p in got.front if p.prediction]
    assert [x[0] for x in front] == pytest.approx([x[0] for x in best], rel=1e-6)
    print(f"{model} on {gpus}: {legal} layouts, {len(best)} on the front, {got.searched} priced")


@pytest.mark.parametrize(
    ("model", "gpus", "seq_len", "batch", "fix", "unbuilt"),
    [
        ("llama-2-13b", 16, 2048, 48, "recompute=full,loss=eager,cp=1", False),
        ("llama-2-13b", 16, 2048, 12, "recompute=none,loss=chunked,sp=on", True),
        ("qwen2.5-0.5b", 8, 1000, 24, "recompute=selective,micro_batch=1", True),
        ("qwen2.5-0.5b", 8, 1000, 24, "micro_batch=1", False),
        ("mixtral-8x7b", 16, 1020, 16, "recompute=none,loss=eager,schedule=1f1b", True),
        ("mixtral-8x7b", 16, 2048, 16, "recompute=none,loss=eager,schedule=1f1b", False),
        ("mixtral-8x7b", 16, 2048, 16, "loss=eager,schedule=1f1b,cp=2,micro_batch=1,pp=1", False),
        ("deepseek-v2-lite", 16, 2048, 16, "loss=eager,schedule=1f1b,micro_batch=1", False),
        ("llama-2-13b+lora:16", 16, 2048, 48, "recompute=full,loss=eager,schedule=1f1b", False),
        ("mixtral-8x7b+lora:8", 16, 2048, 16, "recompute=full,loss=eager,micro_batch=1,schedule=1f1b", True),
        ("mixtral-8x7b+lora:8", 8, 2048, 8, "recompute=full,loss=eager,micro_batch=1,schedule=1f1b", False),
        ("gpt2", 8, 1000, 24, "micro_batch=1,recompute=none,loss=eager", False),  # with dropout
    ],
)
def test_the_masks_are_the_rules(model: str, gpus: int, seq_len: int, batch: int, fix: str, unbuilt: bool):
    spec, cluster = named_model(model), read_cluster("a100-40gb-x8", gpus)
    parsed = parse_layout(fix)
    pins = {k: getattr(parsed, k) for k in written_keys(fix)}
    legal = refused = 0
    for layout, found in every_layout(spec, cluster, seq_len, batch, pins):
        problems = check(spec, layout, found, cluster, for_run=not unbuilt)
        broken = any(p.severity == "error" for p in problems)
        legal, refused = legal + (not broken), refused + broken
    space = Space(
        num_gpus=gpus,
        gpus_per_node=8,
        global_batch=batch,
        seq_len=seq_len,
        precision="bf16",
        pins=pins,
        include_unbuilt=unbuilt,
    )
    assert sum(int(b.count.sum()) for b in all_blocks(spec, space)) == legal
    assert legal > 100
    assert refused > 50


def test_the_front_and_what_it_dominates():
    layout = Layout()
    pricer = make_pricer(read_model("gpt2"), read_cluster("a100-80gb-x8"), 128, "bf16")
    rows = rows_of([layout], [Batch(global_batch=1, micro_batch=1, accumulation=1, dp=1, seq_len=128)])
    slot = make_slot(pricer, layout)
    made = [
        Candidate(rows=rows, row=0, slot=slot, seconds=s, peak=p, fits=True)
        for s, p in [(1.0, 9.0), (2.0, 5.0), (2.0, 6.0), (3.0, 5.5), (4.0, 1.0)]
    ]
    front = front_of(made)
    assert [(c.seconds, c.peak) for c in front] == [(1.0, 9.0), (2.0, 5.0), (4.0, 1.0)]
    got = dominated(front, np.array([0.9, 1.5, 2.0, 5.0]), np.array([99.0, 8.0, 5.0, 0.5]))
    assert list(got) == [False, False, True, False]


def test_a_million_layouts_in_little_memory():
    spec, cluster = read_model("llama-3.1-405b"), read_cluster("h100-x8", 16384)
    space = Space(
        num_gpus=16384,
        gpus_per_node=8,
        global_batch=2048,
        seq_len=8192,
        precision="bf16",
        pins={},
        include_unbuilt=True,
    )
    blocks = list(all_blocks(spec, space))
    assert sum(int(b.count.sum()) for b in blocks) > 5_000_000
    assert sum(c.nbytes for b in blocks for c in b.rows.codes.values()) < 50e6
    assert cluster.num_gpus == 16384


def test_a_pin_that_nothing_fits_names_the_nearest_values():
    spec, cluster = read_model("llama-2-7b"), read_cluster("a100-40gb-x8", 8)
    for fix, words in (
        ("tp=3", ("tp = 2 | 4",)),
        ("dp=3", ("dp = 2 | 4",)),
        ("pp=2,micro_batch=5", ("micro_batch = 4",)),
        ("schedule=zb-h1,zero=3,pp=2", ("zero = 2",)),
    ):
        with pytest.raises(MeshwrightError) as error:
            search(spec, cluster, 2048, 64, fix=fix)
        first = next(p for p in error.value.problems if p.code == "E409")
        assert all(w in first.do for w in words), (fix, first.do)
