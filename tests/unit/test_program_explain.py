"""You are rank N, and the pages of codes."""

from __future__ import annotations

from types import ModuleType

import pytest

from meshwright.base.codes import CODES, layout, layout_text, plan_file, schedule
from meshwright.base.errors import MeshwrightError
from meshwright.layout.parse import parse_layout
from meshwright.model.read_hf import spec_from_config
from meshwright.model.spec import ModelSpec
from meshwright.program.explain import explain_error, explain_rank
from meshwright.program.make import make_plan


def llama(tied: bool = False) -> ModelSpec:
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tied,
    }
    return spec_from_config(config, "small")


def told(text: str, rank: int, *, tied: bool = False, m: int = 8, node: int | None = None) -> str:
    spec = llama(tied)
    wanted = parse_layout(text)
    plan = make_plan(spec, wanted, wanted.dp * m, 64, "small")
    return " ".join(explain_rank(plan, spec, rank, node).split())


def test_a_rank_of_zero3_with_a_pipeline() -> None:
    text = told("dp=2,zero=3,pp=2,cut=3/1", 1, node=2)
    for part in (
        "You are rank 1 of 4, device 1 of node 0",
        "pipeline: ranks 1, 3.",
        "They span nodes 0, 1.",
        "shard group: ranks 0, 1.",
        "stage 0 of 0 to 1: you have layers 0 to 2 (of 4), and the embedding",
        "gathered in bf16 one unit at a time",
        "for each of 6 micro-batches k = 0 to 5",
        "send hidden states to rank 3 (stage 1): 8.00 KiB",
        "reduce-scatter",
        "activations of 2 of the 8 micro-batches",
        "You run 2 forwards before your first backward",
    ):
        assert part in text


def test_a_rank_of_the_tensor_axis() -> None:
    text = told("tp=2,pp=2,precision=fp32", 1)
    for part in (
        "tensor group: ranks 0, 1.",
        "you have 1/2 of each matrix of layers 0 to 1 (of 4)",
        "partial sums out of attention of layer 0",
        "within the tensor group",
    ):
        assert part in text
    assert "You have 1/2 of each matrix of the model: all 4 layers" in told("tp=2", 0)


@pytest.mark.parametrize("zero", ["0", "2"])
def test_a_rank_of_the_context_axis(zero: str) -> None:
    text = told(f"dp=2,zero={zero},cp=2,precision=fp32", 3)
    for part in (
        "context group: ranks 2, 3.",
        "of 64 tokens, of which you hold positions 16-31 and 32-47 of 64",
        "pass keys and values on to rank 2 and receive others from rank 2 (ring, cp)",
        "pass keys and values and their gradients on to rank 2",
        "within the context group",
    ):
        assert part in text
    assert ("shard group: ranks 0, 1, 2, 3." in text) == (zero == "2")
    assert ("replicas: ranks 0, 1, 2, 3." in text) == (zero == "0")
    assert "gradients of 5 units, one by one, over all ranks" in text
    assert "all-to-all, cp" in told("cp=2,cp_style=ulysses", 0)


def test_the_routers_term_in_parts_is_told() -> None:
    config = {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 128,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "output_router_logits": True,
    }
    spec = spec_from_config(config, "small")
    plan = make_plan(spec, parse_layout("cp=2,pp=2"), 4, 64, "small")
    first, last = (" ".join(explain_rank(plan, spec, rank, None).split()) for rank in (0, 3))
    assert "send sums of the routers to rank 2 (stage 1): 64 B" in first
    assert "receive gradient of the sums of the routers from rank 2 (stage 1)" in first
    assert "choices of the routers" not in first
    assert "sum the choices of the routers and valid tokens over ranks 2, 3 (all-reduce, cp): 36 B" in last
    assert "receive sums of the routers from rank 1 (stage 0)" in last


def test_bytes_of_each_state() -> None:
    spec = llama()
    n = spec.num_parameters
    kib = n * 4 / 1024
    text = told("dp=4,precision=fp32", 2)
    assert f"parameters {kib:.2f} KiB" in text
    assert f"gradients {kib:.2f} KiB" in text
    assert f"optimizer {2 * kib / 1024:.2f} MiB" in text or f"optimizer {2 * kib:.2f} KiB" in text
    quarter = told("dp=4,zero=3,precision=fp32", 2)
    assert f"parameters {kib / 4:.2f} KiB" in quarter
    assert f"gradients {kib / 4:.2f} KiB" in quarter
    kept = told("dp=4,zero=1,precision=fp32", 2)
    assert f"gradients {kib:.2f} KiB" in kept
    assert f"parameters {kib / 4:.2f} KiB" in kept
    assert "Gradients are summed whole on this rank" in kept


def test_one_rank_is_alone() -> None:
    text = told("", 0)
    assert "You are alone" in text
    assert "for each of 8 micro-batches k = 0 to 7" in text
    assert "all 4 layers, and the embedding, final norm and head" in text
    assert "In all you send" not in text


def test_tied_ends_and_hsdp() -> None:
    text = told("dp=4,pp=2,zero=2,shard=2", 0, tied=True)
    assert "tied pair: ranks 0, 4" in text
    assert "replicas of your shard: ranks 0, 2" in text
    assert "gradient of the tied embedding" in text


@pytest.mark.parametrize(
    "text", ["dp=4,zero=3", "pp=4", "dp=2,pp=2,zero=1", "dp=4,zero=2,shard=2", "pp=4,schedule=gpipe"]
)
@pytest.mark.parametrize("m", [1, 2, 64])
def test_every_rank_is_told_briefly(text: str, m: int) -> None:
    spec = llama()
    wanted = parse_layout(text)
    plan = make_plan(spec, wanted, wanted.dp * m, 64, "small")
    for rank in range(wanted.world_size):
        page = explain_rank(plan, spec, rank)
        assert len(page.splitlines()) < 75
        assert all(len(line) <= 100 for line in page.splitlines())


def test_the_repetition_tells_every_action() -> None:
    """What is told in blocks has as many forwards, backwards and messages as the step has."""
    spec = llama()
    plan = make_plan(spec, parse_layout("pp=4"), 9, 64, "small")
    for rank in range(4):
        counts = {"run forward": 0, "run backward": 0}
        times = 1
        for line in explain_rank(plan, spec, rank).splitlines():
            if line[:3].strip().isdigit():
                times = int(line.split("each of ")[1].split()[0]) if "for each of" in line else 1
            for name in counts:
                counts[name] += times * (name in line)
        assert counts == {"run forward": 9, "run backward": 9}


def test_an_unknown_rank() -> None:
    with pytest.raises(MeshwrightError, match=r"E454.*4 ranks") as caught:
        told("dp=4", 4)
    assert "0 to 3" in caught.value.problems[0].do


@pytest.mark.parametrize("code", sorted(CODES))
def test_every_code_has_its_page(code: str) -> None:
    page = explain_error(code.lower())
    assert page.startswith(f"{code}  {CODES[code].title}")
    assert CODES[code].why in page


@pytest.mark.parametrize("table", [layout_text, layout, schedule, plan_file])
def test_pages_say_more_than_the_refusal(table: ModuleType) -> None:
    assert all(len(info.page) > len(info.why) for info in table.CODES)


def test_an_unknown_code() -> None:
    with pytest.raises(MeshwrightError, match="E455") as caught:
        explain_error("E2001")
    assert "E201" in caught.value.problems[0].do


def test_a_rank_with_two_stages_is_told_both() -> None:
    text = told("dp=1,pp=2,schedule=zbv", 0, tied=True)
    assert "You own stages 0 and 3 of 0 to 3: you have layer 0 and layer 3 (of 4)" in text
    assert "send hidden states to rank 1 (stage 1)" in text
    assert "send gradient of the hidden states to rank 1 (stage 2)" in text
    assert "tied pair" not in text
    assert "run backward for the weights through your layers of stage 3" in text
    assert "two halves" in text
    assert "tied pair" in told("dp=1,pp=2,schedule=interleaved", 0, tied=True)
