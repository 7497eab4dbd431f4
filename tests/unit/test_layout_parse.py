"""Layout text: defaults, round trip, and every mistake at once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.base.axes import LAYOUT_AXES
from meshwright.base.errors import MeshwrightError
from meshwright.layout.layout import Layout
from meshwright.layout.parse import CHOICES, DEGREES, KEYS, complete, parse_layout, written_keys


def problems_of(text: str) -> list[tuple[str, str, str]]:
    with pytest.raises(MeshwrightError) as caught:
        parse_layout(text)
    return [(p.code, p.found, p.do) for p in caught.value.problems]


def test_the_empty_text_is_one_rank() -> None:
    assert parse_layout("") == parse_layout("  ") == Layout()
    assert Layout().world_size == 1


def test_order_of_items_does_not_matter() -> None:
    a = parse_layout("dp=2,zero=1,tp=2,pp=2,schedule=1f1b,micro_batch=2")
    assert a == parse_layout(" micro_batch = 2, pp=2 ,tp=2,schedule=1f1b,zero=1,dp=2")
    assert a.world_size == 8


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("dp=4,zero=1", "shard", 4),
        ("dp=4,zero=3,cp=2", "shard", 8),
        ("dp=4", "shard", 1),
        ("dp=4,zero=2,shard=2", "shard", 2),
        ("tp=2", "sp", True),
        ("tp=2,sp=off", "sp", False),
        ("tp=1", "sp", False),
        ("schedule=interleaved,pp=2", "chunks", 2),
        ("schedule=zbv,pp=2", "chunks", 2),
        ("schedule=1f1b,pp=2", "chunks", 1),
        ("schedule=@rows.csv,pp=2", "chunks", 1),
        ("schedule=interleaved,chunks=4", "chunks", 4),
        ("cut=7/9/8/8,pp=4", "cut_layers", (7, 9, 8, 8)),
        ("order=cp/tp/pp/dp", "order", ("cp", "tp", "pp", "dp")),
    ],
)
def test_defaults_that_depend_on_other_keys(text: str, key: str, value: object) -> None:
    assert getattr(parse_layout(text), key) == value


def test_hsdp_splits_dp() -> None:
    layout = parse_layout("dp=8,zero=3,shard=2")
    assert (layout.dp_replicate, layout.dp_shard) == (4, 2)


def test_every_mistake_is_told_at_once() -> None:
    found = problems_of("dpp=2,dp,zero=4,tp=2,tp=4,order=tp/dp,cut=4-4,schedule=1f2b,sp=yes")
    assert sorted(code for code, _, _ in found) == ["E110", "E111", *["E112"] * 5, "E113"]
    text = "\n".join(f"{f} {d}" for _, f, d in found)
    for part in ("'dpp'", "did you mean pp | dp?", "zero=4", "2 and 4", "schedule=1f1b", "sp=on", "cut=auto"):
        assert part in text


@pytest.mark.parametrize("value", ["0", "-1", "2.0", "two", "1e3", "10000000", "²"])
def test_a_degree_is_a_positive_whole_number(value: str) -> None:
    assert [code for code, _, _ in problems_of(f"dp={value}")] == ["E112"]


def test_written_keys_are_kept_apart_from_defaults() -> None:
    assert written_keys("dp=2, precision=fp32") == {"dp": "2", "precision": "fp32"}


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    values: dict[str, object] = {}
    for key in KEYS:
        if not draw(st.booleans()):
            continue
        if key in DEGREES:
            values[key] = draw(st.integers(1, 64))
        elif key == "zero":
            values[key] = draw(st.integers(0, 3))
        elif key == "sp":
            values[key] = draw(st.booleans())
        elif key == "order":
            values[key] = tuple(draw(st.permutations(LAYOUT_AXES)))
        elif key == "cut":
            written = st.lists(st.integers(0, 99), min_size=1, max_size=6).map(
                lambda c: "/".join(map(str, c))
            )
            values[key] = draw(st.one_of(st.sampled_from(["auto", "even"]), written))
        else:
            values[key] = draw(st.sampled_from(CHOICES[key]))
    return complete(values)


@settings(max_examples=200, deadline=None)
@given(layouts())
def test_text_reads_back(layout: Layout) -> None:
    assert parse_layout(layout.text()) == layout
    full = ",".join(f"{key}={value}" for key, value in layout.as_dict().items())
    assert parse_layout(full) == layout
    assert len(layout.text()) <= len(full)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40))
def test_any_text_is_a_layout_or_a_problem_list(text: str) -> None:
    problems = []
    try:
        parse_layout(text)
    except MeshwrightError as error:
        problems = list(error.problems)
    assert all(p.code.startswith("E11") and p.found and p.do for p in problems)
