"""Where the ranks of a block's groups sit follows from the order of the axes."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from meshwright.cluster.load import read_cluster
from meshwright.cost.collective import link_share, shape_of, strided_shape
from meshwright.cost.fast import columns
from meshwright.cost.pieces import make_pricer
from meshwright.cost.pipeline import message_seconds
from meshwright.cost.rows import rows_of
from meshwright.cost.slots import make_slot
from meshwright.cost.sweep import sweep
from meshwright.cost.tables import make_tables
from meshwright.cost.units import expert_shapes, group_shapes
from meshwright.cost.work import work_key
from meshwright.layout.batch import derive_batch
from meshwright.layout.layout import Layout
from meshwright.layout.parse import parse_layout
from meshwright.layout.ranks import group
from meshwright.model.read_hf import read_model

ORDERS = tuple(itertools.permutations(("tp", "cp", "dp", "pp")))


def made(text: str) -> Layout:
    return parse_layout(text)


def test_groups_of_a_block_have_the_shape_of_their_ranks():
    cluster = read_cluster("h100-x8", 32)
    pricer = make_pricer(read_model("mixtral-8x7b"), cluster, 1024, "bf16")
    draw = random.Random(0)
    for order in ORDERS:
        for tp, cp, pp, ep in [(2, 2, 2, 4), (4, 1, 2, 4), (2, 4, 1, 2), (1, 2, 4, 8), (8, 1, 1, 2)]:
            dp = 32 // tp // cp // pp
            if (dp * cp) % ep:
                continue
            zero = draw.choice([0, 3])
            shard = dp * cp if zero else 1
            layout = Layout(
                dp=dp, tp=tp, cp=cp, pp=pp, ep=ep, order=order, zero=zero, shard=shard, precision="bf16"
            )
            key = work_key(layout)
            assert pricer.tp_shape(key) == shape_of(group(layout, 0, "tp"), 8), layout.text()
            assert pricer.expert_shape(key) == shape_of(group(layout, 0, "ep"), 8), layout.text()
            assert strided_shape(cp, key.cp_step, 8) == shape_of(group(layout, 0, "cp"), 8), layout.text()
            wanted = "expert_shard" if zero else "expert_replicate"
            assert expert_shapes(layout, 8)[0] == shape_of(group(layout, 0, wanted), 8), layout.text()
            data = "shard" if zero else "data"
            assert group_shapes(layout, 8)[0] == shape_of(group(layout, 0, data), 8), layout.text()


@pytest.mark.parametrize(
    ("model", "inner", "outer", "term"),
    [
        ("llama-2-7b", "tp=2,dp=8,zero=1", "tp=2,dp=8,zero=1,order=dp/tp/cp/pp", "tensor"),
        (
            "llama-2-7b",
            "cp=2,dp=8,zero=1,cp_style=ulysses",
            "cp=2,dp=8,zero=1,cp_style=ulysses,order=tp/dp/cp/pp",
            "context",
        ),
        ("mixtral-8x7b", "ep=4,dp=4,tp=1,pp=4,zero=1", "ep=4,dp=4,pp=4,zero=1,order=tp/cp/pp/dp", "expert"),
    ],
)
def test_an_axis_that_spans_nodes_pays_the_network_between_them(
    model: str, inner: str, outer: str, term: str
):
    cluster = read_cluster("a100-80gb-x8", 16)
    pricer = make_pricer(read_model(model), cluster, 4096, "bf16")
    near, far = (replace(made(text), precision="bf16") for text in (inner, outer))
    batches = [derive_batch(x, 64, 4096) for x in (near, far)]
    cols = columns(pricer, [near, far], batches)
    seconds = getattr(cols, term).max(axis=1)
    assert seconds[1] > 2.0 * seconds[0] > 0.0
    assert cols.compute[0] == pytest.approx(cols.compute[1])


def test_the_search_prices_every_order_like_a_single_prediction():
    cluster = read_cluster("a100-80gb-x8", 32)
    pricer = make_pricer(read_model("mixtral-8x7b"), cluster, 4096, "bf16")
    tables = make_tables(pricer)
    layouts = [
        Layout(
            dp=32 // tp // cp, zero=1, shard=32 // tp // cp * cp, tp=tp, cp=cp, ep=ep, order=order, precision="bf16"
        )
        for order in ORDERS
        for tp, cp, ep in [(2, 1, 4), (4, 2, 2), (1, 2, 8), (8, 1, 1)]
    ]  # fmt: skip
    batches = [derive_batch(x, 64, 4096) for x in layouts]
    got = sweep(tables, rows_of(layouts, batches), make_slot(pricer, layouts[0]))
    one = columns(pricer, layouts, batches)
    assert got.forward[:, 0] == pytest.approx(one.forward[:, 0], rel=1e-9)
    assert got.backward[:, 0] == pytest.approx(one.backward[:, 0], rel=1e-9)
    assert len({round(float(x), 9) for x in one.forward[:, 0]}) > 8


@pytest.mark.parametrize("sp", ["on", "off"])
def test_a_recomputed_block_leaves_out_what_only_its_end_needs(sp: str):
    pricer = make_pricer(read_model("llama-3.1-8b"), read_cluster("h100-x8"), 4096, "bf16")
    made = [work_key(parse_layout(f"tp=8,sp={sp},recompute={r}", 8)) for r in ("none", "full")]
    plain, again = (pricer.block(0, key) for key in made)
    down = pricer.rates.matmul_s(4096, 14336 / 8, 4096)
    # torch's checkpoint stops before the last product: seen on torch 2.13 by counting products in a backward
    assert again.recompute == pytest.approx(plain.forward - down)
    assert again.split == pytest.approx(plain.split + down)
    # of q, k, v, o, gate, up, down the second, fourth and sixth are kept: q, v and gate run again
    some = pricer.block(0, work_key(parse_layout(f"tp=8,sp={sp},recompute=selective", 8)))
    attention = pricer.rates.attention_s(1, 32 / 8, 4096, 128)[0]
    products = {"q": 512, "k": 128, "v": 128, "o": 512, "gate": 1792, "up": 1792, "down": 1792}
    kept = [pricer.rates.matmul_s(4096, 4096, products[name]) for name in ("k", "up")]
    kept.append(pricer.rates.matmul_s(4096, 512, 4096))
    assert some.recompute == pytest.approx(again.recompute - attention - sum(kept))
    # of two gathers and two scatters (or two sums) forward, the last is not repeated
    extra = again.tensor / plain.tensor - 1.0
    assert extra == pytest.approx(0.25, abs=1e-6) if sp == "off" else 0.25 < extra < 0.5


def test_a_pipeline_pays_for_its_hops_between_nodes_although_its_first_is_inside_one():
    slow = read_cluster("a100-80gb-x8", 32)
    assert slow.inter is not None
    slow = replace(slow, inter=replace(slow.inter, rate=replace(slow.inter.rate, value=1e6)))
    pricer = make_pricer(read_model("llama-2-7b"), slow, 4096, "bf16")
    # four and two stages on a node; eight stages on one
    for text, away in (("pp=16,tp=2", 2 / 8), ("pp=8,tp=4", 4 / 8), ("pp=8,dp=4,order=tp/cp/pp/dp", 0.0)):
        message = 4096 * 4096 * 4 / 1e6  # the residual stream is fp32 under autocast
        found = message_seconds(pricer, made(text))
        assert found == pytest.approx(away * message / link_share(2), rel=0.01, abs=0.05), text


def test_on_one_node_nothing_pays_a_network():
    # eight experts' ranks over cp = 3 are a part of a plane of nine, which 72 devices do not divide into
    one = read_cluster("gb200-nvl72")
    assert one.inter is None
    pricer = make_pricer(read_model("qwen3-30b-a3b"), one, 3072, "bf16")
    layout = replace(made("dp=8,cp=3,pp=3,ep=8,order=tp/cp/pp/dp"), precision="bf16")
    assert pricer.expert_shape(work_key(layout)).size >= 8
    assert columns(pricer, [layout], [derive_batch(layout, 72, 3072)]).expert.max() > 0.0


def test_a_group_over_the_end_of_a_node_pays_the_network():
    # six ranks a group on nodes of eight: the first group is inside a node, the second is not
    cluster = read_cluster("a100-80gb-x8", 24)
    spec = read_model("llama-2-7b")
    pricer = make_pricer(spec, cluster, 4096, "bf16")
    odd, even = (replace(made(text), precision="bf16") for text in ("cp=6,dp=4", "cp=4,dp=6"))
    cols = columns(pricer, [odd, even], [derive_batch(x, 48, 4096) for x in (odd, even)])
    over, inside = cols.context.max(axis=1)
    assert over > 3.0 * inside  # which compute may hide whole
    assert over > 0.0
