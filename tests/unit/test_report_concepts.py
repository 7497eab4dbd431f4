"""The concept pages: worked numbers recomputed, links alive, layouts legal, glossary equal to its table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from meshwright.cost.state import FP32, NO_MASTER, textbook_state_bytes
from meshwright.cost.textbook import (
    FINE_TUNING,
    bubble_of_total,
    data_volume,
    fine_tuning_bytes,
    ring_all_reduce_s,
)
from meshwright.layout.layout import Layout
from meshwright.layout.parse import parse_layout
from meshwright.layout.ranks import coordinates, group
from meshwright.model.counts import flops_per_token
from meshwright.model.read_hf import read_model
from meshwright.report.glossary import as_markdown
from meshwright.schedule.clock import run_clock
from meshwright.schedule.generate import generate

DOCS = Path(__file__).parents[2] / "docs"
CONCEPTS = sorted((DOCS / "concepts").glob("*.md"))
NAMES = (
    "adapters",
    "checkpoints",
    "compile",
    "context-parallel",
    "cost-model",
    "data-parallel",
    "decision-tree",
    "offload",
    "pipeline",
    "plan-and-layout",
    "precision",
    "prove-and-parity",
    "recompute",
    "zero",
)


def text(name: str) -> str:
    return (DOCS / "concepts" / f"{name}.md").read_text(encoding="utf-8")


def numbers(name: str, row_starts: str) -> list[float]:
    """Return the numbers in the cells after the first of the table row that starts so."""
    row = next(line for line in text(name).split("\n") if line.startswith(f"| {row_starts}"))
    return [float(cell) for cell in row.split("|")[2:] if re.fullmatch(r"\s*[\d.]+\s*", cell)]


def test_all_pages_are_there_with_their_parts() -> None:
    assert set(NAMES) <= {p.stem for p in CONCEPTS}
    for page in CONCEPTS:
        content = page.read_text(encoding="utf-8")
        for part in ("**In one line.**", "## Takeaway", "| "):
            assert part in content, (page.stem, part)


@pytest.mark.parametrize(
    ("row", "parameters", "scheme"),
    [
        ("7.6 B parameters", 7.6e9, NO_MASTER),
        ("Llama-2-7B (6.738 B)", read_model("llama-2-7b").num_parameters, FP32),
    ],
)
def test_zero_tables(row: str, parameters: float, scheme: object) -> None:
    said = numbers("zero", row)
    assert said == [
        pytest.approx(textbook_state_bytes(parameters, 8, stage, scheme) / 1e9, abs=0.051)  # type: ignore[arg-type]
        for stage in range(4)
    ]


def test_volumes_and_state_of_llama_2_7b() -> None:
    parameters = read_model("llama-2-7b").num_parameters
    share = 7 / 8
    zero, data = text("zero"), text("data-parallel")
    assert f"{2 * 4 * parameters * share / 1e9:.1f} GB for stages 0 to 2" in zero
    assert f"{3 * 4 * parameters * share / 1e9:.1f}" == "70.8"  # 3M with M unrounded
    assert "70.8 GB for stage 3" in zero
    assert f"= {8 * parameters * share / 1e9:.1f} GB per micro-batch" in zero
    assert f"{16 * parameters / 1e9:.1f} GB" in data
    for per_parameter, shown in ((7.5, "50.5"), (4.0, "27.0"), (2.0, "13.5")):
        assert f"{per_parameter * parameters / 1e9:.1f}" == shown
        assert f"| {shown} |" in zero


def test_pipeline_numbers_are_those_of_the_clock() -> None:
    for name in ("gpipe", "1f1b"):
        clock = run_clock(generate(name, 4, 8), 1.0, 2.0)
        assert clock.bubble_share_of_total == pytest.approx(3 / 11)
        assert clock.bubble_share_of_ideal == pytest.approx(3 / 8)
        assert clock.peak_in_flight == ((8, 8, 8, 8) if name == "gpipe" else (4, 3, 2, 1))
    content = text("pipeline")
    assert "3/11 = 27.3 %" in content
    assert "3/8 = 37.5 %" in content
    assert "4, 3, 2, 1 micro-batches" in content
    assert f"{4096 * 4096 * 2 / 1e6:.1f} MB" in content


def test_pipeline_sketch_is_the_schedule() -> None:
    clock = run_clock(generate("1f1b", 2, 4), 1.0, 1.0)
    for rank in range(2):
        cells = [".."] * round(clock.makespan_s)
        for span in clock.spans:
            if span.rank == rank:
                cells[round(span.start_s)] = f"{span.action.kind.value}{span.action.micro_batch}"
        assert f"stage {rank}   {' '.join(cells)} " in text("pipeline")


def test_cost_model_numbers() -> None:
    spec = read_model("llama-2-7b")
    content = text("cost-model")
    flops = flops_per_token(spec, 4096)
    assert f"{flops.causal / 1e9:.1f} GFLOP" in content
    assert f"{flops.full / 1e9:.1f} full" in content
    seconds = 8 * 2048 * flops_per_token(spec, 2048).causal / 200e12
    assert f"**{seconds:.2f} s**" in content
    assert f"{seconds / 8:.2f} s;" in content
    per_layer = 8 * 4096 + 4 * 4096 + 4 * 4096 + 8 * 11008 + 4 * 32
    assert f"{per_layer:,} bytes per token" in content
    assert f"{per_layer * 2048 * 32 / 1e9:.1f} GB" in content
    assert f"{2048 * 32000 * 12 / 1e9:.2f} GB" in content


def test_the_decision_tree_s_arithmetic() -> None:
    assert numbers("decision-tree", "GB on a rank") == [91.2, 38.0, 24.7, 11.4]
    volumes = numbers("decision-tree", "sent in a step")
    assert volumes == [data_volume(stage, 8, textbook=True) for stage in range(4)]
    more = numbers("decision-tree", "the same with 4")
    assert more == [data_volume(stage, 8, 4, textbook=True) for stage in range(4)]
    for name in ("NVLink 3", "PCIe 4 x16", "200 Gb/s", "10 GbE"):
        rate, seconds = numbers("decision-tree", name)
        assert seconds == float(f"{ring_all_reduce_s(14e9, 8, rate * 1e9):.3g}")
    for row in FINE_TUNING:
        line = next(x for x in text("decision-tree").split("\n") if x.startswith(f"| {row.name}"))
        shown = line.split("|")[3]
        assert f"{fine_tuning_bytes(row, NO_MASTER, FP32) / 1e9:.1f}" in shown
    assert f"idle {100 * bubble_of_total(8, 8):.0f} %" in text("decision-tree")


def test_the_64_device_example() -> None:
    layout = Layout(dp=4, tp=8, pp=2, sp=True)
    where = coordinates(layout, 43)
    assert (where["tp"], where["dp_replicate"], where["pp"]) == (3, 1, 1)
    assert group(layout, 43, "tp") == tuple(range(40, 48))
    assert group(layout, 43, "dp_replicate") == (35, 43, 51, 59)
    assert group(layout, 43, "pp") == (11, 43)
    for part in ("40\nto 47", "35, 43, 51, 59", "11 and 43"):
        assert part in text("plan-and-layout")


def test_layouts_in_the_pages_are_read() -> None:
    found = [
        m for page in CONCEPTS for m in re.findall(r'--layout "([^"]+)"', page.read_text(encoding="utf-8"))
    ]
    assert len(found) >= 6
    for written in found:
        assert parse_layout(written).world_size >= 1


def test_links_between_pages_are_alive() -> None:
    for page in [*CONCEPTS, DOCS / "glossary.md"]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).is_file(), (page.name, target)


def test_glossary_page_is_its_table() -> None:
    assert (DOCS / "glossary.md").read_text(encoding="utf-8") == as_markdown()
