"""The cut of layers into stages."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.base.errors import MeshwrightError
from meshwright.layout.cut import balanced_cut, check_cut, even_cut, rank_costs, resolve_cut, stage_costs
from meshwright.layout.layout import Layout
from meshwright.layout.parse import parse_layout
from meshwright.model.read_hf import spec_from_config
from meshwright.model.spec import ModelSpec
from meshwright.schedule.generate import placement


def llama(layers: int, vocab: int = 256) -> ModelSpec:
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": vocab,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
    }
    return spec_from_config(config, "small")


@pytest.mark.parametrize("cut", ["auto", "even"])
@pytest.mark.parametrize(("layers", "pp"), [(30, 4), (10, 3), (7, 2)])
def test_h51_no_layer_is_dropped(layers: int, pp: int, cut: str) -> None:
    found = resolve_cut(llama(layers), parse_layout(f"pp={pp},cut={cut}"), 64)
    assert len(found) == pp
    assert sum(found) == layers
    assert max(found) - min(found) <= 1


def test_h179_the_heaviest_stage_is_what_counts() -> None:
    # layer 592, embedding 256, head 256 + 8, layers 1/2/2/3
    layer, first, last = 592.0, 256.0, 264.0
    stages = [first + layer, 2 * layer, 2 * layer, 3 * layer + last]
    assert stages == [848, 1184, 1184, 2040]
    best = balanced_cut((layer,) * 8, 4, first, last)
    assert best == (2, 2, 2, 2)
    weights = [n * layer + {0: first, 3: last}.get(i, 0.0) for i, n in enumerate(best)]
    assert max(weights) == 1448


def test_a_heavy_head_takes_layers_off_the_last_stage() -> None:
    spec = llama(8, vocab=8192)
    blocks, embedding, head = stage_costs(spec, 64)
    assert head > blocks[0] > embedding
    cut = resolve_cut(spec, parse_layout("pp=2"), 64)
    assert sum(cut) == 8
    assert cut[0] > cut[1] >= 1
    assert resolve_cut(spec, parse_layout("pp=2,cut=even"), 64) == (4, 4)


def test_a_written_cut_is_kept() -> None:
    assert resolve_cut(llama(8), parse_layout("pp=4,cut=1/2/2/3"), 64) == (1, 2, 2, 3)
    assert resolve_cut(llama(8), parse_layout("cut=8"), 64) == (8,)


@pytest.mark.parametrize(
    ("text", "code", "part"),
    [
        ("pp=9", "E211", "pp = 8"),
        ("pp=2,cut=4/3", "E212", "sum to 7"),
        ("pp=2,cut=8/0", "E212", "stage 1 has no layer"),
        ("pp=2,cut=4/2/2", "E212", "3 numbers for 2 stages"),
    ],
)
def test_a_cut_that_does_not_fit(text: str, code: str, part: str) -> None:
    with pytest.raises(MeshwrightError) as caught:
        resolve_cut(llama(8), parse_layout(text), 64)
    (found,) = caught.value.problems
    assert found.code == code
    assert part in found.text()


def test_even_gives_the_remainder_to_the_middle() -> None:
    assert even_cut(126, 4) == (31, 32, 32, 31)
    assert even_cut(10, 4) == (2, 3, 3, 2)
    assert even_cut(7, 2) == (4, 3)
    assert check_cut(4, Layout(pp=4)) == []


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from([1.0, 2.0, 3.5, 10.0]), min_size=1, max_size=9),
    st.integers(1, 5),
    st.sampled_from([0.0, 0.5, 7.0]),
    st.sampled_from([0.0, 1.0, 20.0]),
)
def test_auto_is_the_best_of_all_cuts(costs: list[float], stages: int, first: float, last: float) -> None:
    n = len(costs)
    stages = min(stages, n)

    def worst(cut: tuple[int, ...]) -> float:
        at, out = 0, []
        for i, layers in enumerate(cut):
            extra = (first if i == 0 else 0.0) + (last if i == stages - 1 else 0.0)
            out.append(sum(costs[at : at + layers]) + extra)
            at += layers
        return max(out)

    every = [
        tuple(b - a for a, b in zip((0, *ends), (*ends, n), strict=True))
        for ends in combinations(range(1, n), stages - 1)
    ]
    best = min(worst(cut) for cut in every)
    found = balanced_cut(tuple(costs), stages, first, last)
    assert found in every
    assert worst(found) == pytest.approx(best)
    equal = [cut for cut in every if worst(cut) <= best * (1 + 1e-12)]
    assert sum(k * k for k in found) == min(sum(k * k for k in cut) for cut in equal)


def test_ranks_with_several_stages_are_evened_out() -> None:
    # the head costs as much as some layers, and shares its rank with stage 0 in a V, with stage pp - 1 in rounds
    spec = llama(28, vocab=2048)
    blocks, first, last = stage_costs(spec, 64)
    assert 2.0 < last / blocks[0] < 8.0
    for text in (
        "pp=7,schedule=dualpipev,chunks=2",
        "pp=7,schedule=interleaved,chunks=2",
        "pp=4,schedule=zbv",
    ):
        layout = parse_layout(text)
        homes = placement(layout.schedule, layout.pp, layout.chunks)
        found = resolve_cut(spec, layout, 64)
        loads = rank_costs(blocks, found, homes, first, last)
        by_stage = balanced_cut(blocks, layout.num_stages, first, last)
        assert sum(found) == 28
        assert min(found) >= 1
        least = (sum(blocks) + first + last) / layout.pp
        stage_wise = max(rank_costs(blocks, by_stage, homes, first, last))
        assert max(loads) <= stage_wise
        assert max(loads) < max(least + blocks[0], last + layout.chunks * blocks[0] + first + 1.0)
    three = parse_layout("pp=7,schedule=dualpipev")
    assert resolve_cut(spec, three, 64)[0] == 1


def test_a_small_head_leaves_stages_alike() -> None:
    for schedule in ("zbv", "interleaved"):
        assert resolve_cut(llama(16), parse_layout(f"pp=4,schedule={schedule}"), 64) == (2,) * 8
