"""The SVG blocks: well-formed, escaped, in proportion."""

from __future__ import annotations

import math
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.report.svg import (
    Bar,
    Box,
    Cell,
    Line,
    Part,
    Span,
    bars,
    gantt,
    grid,
    legend,
    lines,
    log_ticks,
    nice_ticks,
    plain,
)
from meshwright.report.training import thin

EVIL = '</title><script>alert("x")</script>&\u2028'


def parse(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def _bars(value: float, **more: object) -> str:
    rows = [
        Bar(
            label=EVIL,
            parts=(Part(label=EVIL, value=value, css="s0"), Part(label="b", value=2 * value, css="s1")),
        )
    ]
    return str(
        bars(rows, name="x", title=EVIL, x_label=EVIL, format_value=plain, format_tick=plain, **more)  # type: ignore[arg-type]
    )


def test_bars_are_in_proportion_and_escaped() -> None:
    root = parse(_bars(10.0))
    a, b = (float(r.get("width", "0")) for r in root.iter("rect"))
    assert b == pytest.approx(2 * a, abs=0.11)
    assert root.findtext("title") == EVIL
    assert not list(root.iter("script"))


def test_bar_marker_stretches_the_axis() -> None:
    near, far = (parse(_bars(10.0, marker=m)) for m in (31.0, 300.0))
    width = [float(next(root.iter("rect")).get("width", "0")) for root in (near, far)]
    assert width[1] == pytest.approx(width[0] * 31 / 300, abs=0.2)


def test_bars_of_nothing_have_no_box() -> None:
    assert not list(parse(_bars(0.0)).iter("rect"))


def test_lines_break_at_a_value_that_is_not_finite() -> None:
    curve = Line(label="c", points=((1, 1.0), (2, math.nan), (3, 2.0), (4, 3.0)), css="s0")
    svg = str(lines([curve], name="l", title="t", x_label="x", y_label=EVIL))
    path = next(e for e in parse(svg).iter("path")).get("d", "")
    assert path.count("M") == 2
    assert "nan" not in svg


def test_lines_without_a_finite_value_say_so() -> None:
    svg = lines(
        [Line(label="c", points=((1, math.inf),), css="s0")], name="l", title="t", x_label="x", y_label="y"
    )
    assert "no finite value" in svg


def test_log_axis_is_even_in_powers() -> None:
    points = tuple((2.0**k, 10.0**k) for k in range(1, 6))
    root = parse(str(lines([Line(label="c", points=points, css="s0", dots=True)], name="l", title="t",
                           x_label="x", y_label="y", x_log=2, y_log=10)))  # fmt: skip
    xs = [float(c.get("cx", "0")) for c in root.iter("circle")]
    steps = [b - a for a, b in pairwise(xs)]
    assert max(steps) - min(steps) < 0.21


def test_gantt_draws_every_span_to_scale() -> None:
    spans = [
        Span(row=r, start=s, end=s + 1, css="s0", label=f"F{s}", tip=EVIL) for r in range(2) for s in range(3)
    ]
    root = parse(str(gantt(["a", EVIL], spans, name="g", title="t", end=4.0, x_label="x", format_tick=plain)))
    boxes = [r for r in root.iter("rect") if "box" in r.get("class", "")]
    idle = [r for r in root.iter("rect") if r.get("class") == "idle"]
    assert len(boxes) == 6
    assert len(idle) == 2
    assert float(boxes[0].get("width", "0")) * 4 == pytest.approx(float(idle[0].get("width", "0")), abs=0.3)


def test_gantt_of_many_spans_stays_small() -> None:
    spans = [Span(row=0, start=float(i), end=i + 1.0, css=f"s{i % 2}") for i in range(4000)]
    svg = str(gantt(["a"], spans, name="g", title="t", end=4000.0, x_label="x", format_tick=plain))
    assert len(svg) < 150_000
    assert sum(e.get("d", "").count("M") for e in parse(svg).iter("path")) == 4000


def test_grid_has_a_cell_for_every_rank_and_a_frame_for_every_node() -> None:
    boxes = [
        Box(label=f"node {n}", cells=tuple(
            Cell(title=f"rank {r}", subtitle=EVIL, css="pp-0", tip=EVIL, rank=r) for r in range(8 * n, 8 * n + 8)
        ))
        for n in range(3)
    ]  # fmt: skip
    root = parse(str(grid(boxes, name="m", title="t", axis="pp")))
    assert [g.get("data-rank") for g in root.iter("g")] == [str(r) for r in range(24)]
    assert sum(r.get("class") == "node" for r in root.iter("rect")) == 3


def test_legend_escapes() -> None:
    assert "<script>" not in legend([("s0", EVIL)])


@settings(max_examples=100, deadline=None)
@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9), st.integers(2, 8))
def test_ticks_are_inside_and_about_as_many_as_asked(low: float, size: float, count: int) -> None:
    high = low + size
    if not high > low:
        return
    ticks = nice_ticks(low, high, count)
    slack = 1e-6 * max(abs(low), abs(high), size)
    assert all(low - slack <= t <= high + slack for t in ticks)
    assert len(ticks) <= count + 2


def test_log_ticks_are_powers() -> None:
    assert log_ticks(1000, 2**20, 2, 4) == (2**10, 2**13, 2**16, 2**19)
    assert log_ticks(5, 5000, 10) == (10, 100, 1000)


def test_plain_numbers() -> None:
    assert [plain(v) for v in (0, 0.5, 12.344, 12345, 0.0001)] == [
        "0",
        "0.5",
        "12.34",
        "12\u202f345",
        "0.0001",
    ]


def test_thinning_keeps_spikes() -> None:
    points = tuple((float(i), 100.0 if i == 777 else 1.0) for i in range(2000))
    kept = thin(points, 100)
    assert len(kept) <= 110
    assert (777.0, 100.0) in kept
