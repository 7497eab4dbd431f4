"""Steps of very many micro-batches: a part of the schedule is played, and the rest follows from its last round."""

from __future__ import annotations

import time

import pytest

from meshwright.cluster.load import read_cluster
from meshwright.cost import predict, replay
from meshwright.cost.pieces import make_pricer
from meshwright.layout.batch import derive_batch
from meshwright.layout.cut import resolve_cut
from meshwright.layout.parse import parse_layout
from meshwright.model.read_hf import read_model
from meshwright.schedule.generate import generate
from meshwright.search.search import search


@pytest.mark.parametrize(
    "text",
    [
        "dp=8,zero=1",
        "dp=2,pp=4,schedule=gpipe",
        "dp=2,pp=4",
        "dp=2,pp=4,schedule=zb-h1",
        "dp=2,pp=4,chunks=2,schedule=interleaved",
        "dp=4,pp=2,chunks=2,schedule=zbv",
        "dp=4,pp=2,chunks=2,schedule=dualpipev",
    ],
)
def test_a_part_of_a_long_step_tells_the_whole(text: str, monkeypatch: pytest.MonkeyPatch):
    spec, cluster = read_model("llama-2-7b"), read_cluster("a100-80gb-x8")
    pricer = make_pricer(spec, cluster, 512, "bf16")
    layout = parse_layout(f"{text},precision=bf16")
    batch = derive_batch(layout, 8192, 512)
    layout = layout.with_cut(resolve_cut(spec, layout, 512))
    schedule = generate(layout.schedule, layout.pp, batch.accumulation, layout.chunks)
    monkeypatch.setattr(replay, "PLAYED_CELLS", 10**9)
    whole = predict.predict_with(pricer, layout, batch, schedule)
    monkeypatch.setattr(replay, "PLAYED_CELLS", 512)
    part = predict.predict_with(pricer, layout, batch, schedule)
    assert part.step_time_s == pytest.approx(whole.step_time_s, rel=2e-4)
    assert part.bubble_share_of_total == pytest.approx(whole.bubble_share_of_total, abs=2e-4)
    assert part.peak_memory_bytes == whole.peak_memory_bytes
    assert part.time.total == pytest.approx(part.step_time_s)


def test_a_million_sequences_on_eight_gpus_are_planned_in_three_seconds():
    started = time.process_time()
    found = search(read_model("llama-2-7b"), read_cluster("a100-40gb-x8"), 2048, 2**20, top=5)
    assert time.process_time() - started < 3.0
    best = found.plans[0]
    assert best.batch.accumulation == 2**17
    assert best.schedule_text.startswith("0F0,0B0,0F1,0B1,")
    assert best.schedule_text.count(",") == 2 * 2**17 - 1
