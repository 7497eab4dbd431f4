"""H104: no rank ever holds the whole model, neither freshly drawn nor read from Hugging Face files."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from hazard_runs import SEQ_LEN
from meshwright.layout.parse import parse_layout
from meshwright.mesh.device_mesh import build_mesh
from meshwright.mesh.pool import RankPool
from meshwright.model.read_hf import spec_from_config
from meshwright.parallel.apply import apply_plan, full_tensor, needs_tied_group
from meshwright.parallel.build import build_model
from meshwright.parallel.tied import local
from meshwright.program.make import make_plan
from meshwright.train.weights import load_pretrained

pytestmark = [
    pytest.mark.gloo,
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is not told here"),
]

MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 640,
    "vocab_size": 1024,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
TINY = MODEL | {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 96}


def resident() -> int:
    """Bytes of this process that no file holds."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


class Peak:
    """The highest growth of resident memory while the context is open, looked at every half millisecond."""

    def __enter__(self) -> Peak:
        self._begin, self.bytes, self._open = resident(), 0, True
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        while self._open:
            self.bytes = max(self.bytes, resident() - self._begin)
            time.sleep(0.0005)

    def __exit__(self, *_: object) -> None:
        self.bytes = max(self.bytes, resident() - self._begin)
        self._open = False
        self._thread.join()


def build(rank, config, layout, weights=None):
    spec = spec_from_config(config, "model")
    plan = make_plan(spec, parse_layout(f"{layout},precision=fp32"), 8, SEQ_LEN, "model")
    view = build_mesh(plan.layout, rank, tied=needs_tied_group(plan, spec))
    return apply_plan(plan, spec, view, seed=3, weights=weights)


def measured(rank, world, layout, folder):
    build(rank, TINY, layout)  # imports, and the memory that they keep
    weights = load_pretrained(str(folder), spec_from_config(MODEL, "model"), folder) if folder else None
    with Peak() as peak:
        model = build(rank, MODEL, layout, weights)
    held = sum(local(p.detach()).nbytes for p in model.params.values())
    return peak.bytes, held


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    model = build_model(MODEL, seed=9)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def fresh():
    with RankPool(max_workers=4) as ranks:
        yield ranks


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp=4,zero=3", "pp=4", "dp=2,tp=2,zero=1"])
@pytest.mark.parametrize("source", ["drawn", "read"])
def test_h104_the_peak_of_a_rank_is_its_shard_and_a_unit(fresh, hub, layout, source):
    """H104: 4 ranks, a model of 70 MiB: each rank grows by less than 1.5 times what it then holds.

    The ranks are new: what an earlier job of the session's pool left in their heaps would be measured too.
    """
    whole = spec_from_config(MODEL, "model").num_parameters * 4
    assert whole > 64 * 2**20
    for peak, held in fresh.run(measured, 4, layout, hub if source == "read" else None):
        assert held < 0.32 * whole
        assert peak < 1.5 * held, (layout, peak / held)


def values(rank, world, layout, folder):
    weights = load_pretrained(str(folder), spec_from_config(MODEL, "model"), folder) if folder else None
    model = build(rank, MODEL, layout, weights)
    want = dict(build_model(MODEL, seed=3, weights=weights).named_parameters())
    return [
        n
        for n, p in model.params.items()
        if not torch.equal(full_tensor(p.detach()), model.part(n, want[n].detach()))
    ]


@pytest.mark.parametrize("layout", ["dp=2,zero=3", "tp=2", "pp=2"])
@pytest.mark.parametrize("source", ["drawn", "read"])
def test_parts_have_the_bits_of_the_whole(pool, hub, layout, source):
    for wrong in pool.run(values, 2, layout, hub if source == "read" else None):
        assert wrong == []
