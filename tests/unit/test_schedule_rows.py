"""Schedules as rows: generators, text, invariants, lowering."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.base.codes import schedule as codes
from meshwright.base.errors import MeshwrightError
from meshwright.schedule.actions import COMPUTE, Action, ActionKind, Schedule, parse_action
from meshwright.schedule.clock import run_clock
from meshwright.schedule.generate import GENERATORS, V_SHAPED, fewest_micro_batches, generate
from meshwright.schedule.generate import SPLIT as SPLIT_NAMES
from meshwright.schedule.invariants import check_schedule
from meshwright.schedule.lower import lower, lower_forward
from meshwright.schedule.text import parse_schedule

NAMES = sorted(GENERATORS)
SEND = {ActionKind.SEND_F, ActionKind.SEND_B}
RECV = {ActionKind.RECV_F, ActionKind.RECV_B}

# Two stages per rank in V shape (rank 0 has stages 0 and 3), full backwards, one micro-batch more than ranks.
V_SHAPE = """0F0,0F1,3F0,3B0,0F2,3F1,3B1,0B0,3F2,3B2,0B1,0B2
1F0,2F0,1F1,2F1,1F2,2B0,1B0,2F2,2B1,1B1,2B2,1B2"""
SPLIT = "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1"


def refusal(text: str) -> tuple[str, str]:
    with pytest.raises(MeshwrightError) as caught:
        parse_schedule(text)
    return caught.value.problems[0].code, caught.value.problems[0].text()


def test_the_rows_of_1f1b() -> None:
    assert generate("1f1b", 3, 4).text().splitlines() == [
        "0F0,0F1,0F2,0B0,0F3,0B1,0B2,0B3",
        "1F0,1F1,1B0,1F2,1B1,1F3,1B2,1B3",
        "2F0,2B0,2F1,2B1,2F2,2B2,2F3,2B3",
    ]


def test_the_rows_of_gpipe() -> None:
    assert generate("gpipe", 2, 2).text() == "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1"


def test_one_rank_alternates() -> None:
    assert generate("1f1b", 1, 3).text() == "0F0,0B0,0F1,0B1,0F2,0B2"


def test_the_rows_of_interleaved() -> None:
    assert generate("interleaved", 2, 2, 2).text().splitlines() == [
        "0F0,0F1,2F0,2F1,2B0,2B1,0B0,0B1",
        "1F0,1F1,3F0,3B0,3F1,3B1,1B0,1B1",
    ]


def test_the_rows_of_zb_h1() -> None:
    assert generate("zb-h1", 2, 3).text().splitlines() == [
        "0F0,0F1,0I0,0W0,0F2,0I1,0W1,0I2,0W2",
        "1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1W2",
    ]


def test_a_schedule_without_generator_names_what_works() -> None:
    with pytest.raises(MeshwrightError) as caught:
        generate("nonsense", 2, 4)
    (found,) = caught.value.problems
    assert (found.code, found.kind.value) == ("E301", "code")
    assert "schedule=1f1b" in found.do
    assert "schedule=gpipe" in found.do


def test_chunks_and_numbers_below_one() -> None:
    for name, chunks in (("1f1b", 2), ("zb-h1", 2), ("zbv", 1), ("dualpipev", 3), ("interleaved", 1)):
        with pytest.raises(MeshwrightError, match="E223"):
            generate(name, 2, 4, chunks)
    with pytest.raises(MeshwrightError, match="E218"):
        generate("interleaved", 2, 3, 2)
    with pytest.raises(MeshwrightError, match="E308") as caught:
        generate("dualpipev", 4, 7, 2)
    assert "accumulation = 8" in caught.value.problems[0].do
    with pytest.raises(MeshwrightError, match="E306"):
        generate("1f1b", 2, 0)
    with pytest.raises(MeshwrightError, match="E306"):
        parse_schedule("\n \n")


def built(name: str, p: int, m: int, v: int) -> Schedule:
    """Return the schedule with the nearest numbers that it can have."""
    chunks = 2 if name in V_SHAPED else v if name == "interleaved" else 1
    least, step = fewest_micro_batches(name, p)
    return generate(name, p, max(least, m // step * step), chunks)


GENERATED = st.builds(built, st.sampled_from(NAMES), st.integers(1, 7), st.integers(1, 16), st.integers(2, 4))


@settings(max_examples=200, deadline=None)
@given(GENERATED)
def test_generated_rows_hold_the_invariants_and_read_back(schedule: Schedule) -> None:
    assert check_schedule(schedule) == []
    counts = Counter(a for row in schedule.rows for a in row)
    assert set(counts.values()) == {1}
    halves = sum(a.kind is ActionKind.INPUT_GRAD for a in counts)
    assert len(counts) == 2 * schedule.num_stages * schedule.num_micro_batches + halves
    assert (halves > 0) == (schedule.name in SPLIT_NAMES)
    assert parse_schedule(schedule.text(), schedule.name) == schedule


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 8), st.integers(1, 4), st.integers(2, 4), st.integers(1, 5), st.integers(2, 9))
def test_interleaved_has_its_closed_form(p: int, rounds: int, v: int, f: int, b: int) -> None:
    m = p * rounds
    clock = run_clock(generate("interleaved", p, m, v), float(f), float(b))
    assert clock.makespan_s == m * v * (f + b) + (p - 1) * (f + b)
    bound = [min(m * v, 2 * (p - 1 - r) + (v - 1) * p + 1) for r in range(p)]
    assert list(clock.peak_in_flight) == bound


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 8), st.integers(0, 20), st.integers(1, 5))
def test_zb_h1_has_its_closed_form(p: int, more: int, f: int) -> None:
    """The bubble is (p-1)(F+I-W), with I = W here; 1F1B's is (p-1)(F+I+W), and both hold p micro-batches."""
    m = p + more
    clock = run_clock(generate("zb-h1", p, m), float(f), 2.0 * f)
    assert clock.makespan_s == 3 * f * m + (p - 1) * f
    usual = run_clock(generate("1f1b", p, m), float(f), 2.0 * f)
    assert usual.makespan_s == 3 * f * m + (p - 1) * 3 * f
    assert max(clock.peak_in_flight) == max(usual.peak_in_flight) == p


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.integers(0, 24))
def test_zbv_holds_2p_chunks_and_waits_less_than_2p_slots(p: int, more: int) -> None:
    """1F1B of the same model (a rank's two chunks as one stage) waits 6(p-1) slots."""
    m = p + more
    clock = run_clock(generate("zbv", p, m, 2), 1.0, 2.0)
    assert max(clock.peak_in_flight) <= 2 * p
    assert p - 1 <= clock.makespan_s - 6 * m <= 2 * p - 1


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.integers(0, 24))
def test_dualpipev_has_its_closed_form(p: int, more: int) -> None:
    m = 2 * p + more
    clock = run_clock(generate("dualpipev", p, m, 2), 1.0, 2.0)
    assert clock.makespan_s == 6 * m + p - 1
    assert max(clock.peak_in_flight) <= 2 * p + 1


@settings(max_examples=60, deadline=None)
@given(GENERATED, st.integers(1, 16))
def test_forwards_alone_are_lowered_for_any_number_of_micro_batches(schedule: Schedule, count: int) -> None:
    count = min(count, schedule.num_micro_batches)
    rows = lower_forward(schedule, count)
    forwards = [a for row in rows for a in row if a.kind is ActionKind.FORWARD]
    assert len(forwards) == len(set(forwards)) == schedule.num_stages * count
    away = sum(a != b for a, b in itertools.pairwise(schedule.stage_ranks))
    for kind in (ActionKind.SEND_F, ActionKind.RECV_F):
        assert sum(a.kind is kind for row in rows for a in row) == away * count


def test_blank_cells_are_idle_slots() -> None:
    assert parse_schedule("0F0,,,0B0\n ,1F0,1B0").text() == "0F0,0B0\n1F0,1B0"


def test_v_shape_and_split_backwards_read() -> None:
    assert parse_schedule(V_SHAPE).stage_ranks == (0, 1, 1, 0)
    assert parse_schedule(SPLIT).num_micro_batches == 2


@pytest.mark.parametrize(
    ("text", "code", "parts"),
    [
        ("0F0,0X0,0B0", "E302", ("'0X0'", "0F0,0X0,0B0\n    ^")),
        ("0F0,0SEND_F0,0B0\n1F0,1B0", "E302", ("0SEND_F0",)),
        ("0F0,0B0,0F1\n1F0,1B0,1F1,1B1", "E303", ("missing: 0B1", "row 0\n0F0,0B0,0F1\n        ^")),
        ("0F0,0B0,0B0\n1F0,1B0", "E303", ("too many: 0B0", "row 0\n0F0,0B0,0B0\n        ^")),
        ("0F0,0B0\n1F0,1B1,1B0", "E303", ("missing: 0F1, 0B1, 1F1", "row 0\n0F0,0B0\n    ^")),
        ("0F0,0B0\n1F0,1B900000000", "E303", ("900000001 micro-batches need",)),
        ("0F0,0B0\n900000000F0,1B0", "E304", ("stage 900000000 occurs, but stage 2 does not",)),
        ("0F0," + "9" * 6000, "E302", ("99' is not",)),
        ("0F0,0I0\n1F0,1B0", "E303", ("missing: 0W0",)),
        ("0F0,0B0,0W0\n1F0,1B0", "E303", ("too many: 0W0",)),
        ("0F0,1B0,0B0\n1F0", "E304", ("stage 1 lives on rank 0", "^")),
        ("0F0,0B0\n2F0,2B0", "E304", ("stage 1 does not",)),
        ("0B0,0F0\n1F0,1B0", "E305", ("0B0 can never start", "0F0", "0B0,0F0\n^")),
        (
            "0F0,0F1,0B0,0B1\n1F0,1B1,1F1,1B0",
            "E305",
            ("row 1", "1B1 can never start: it waits for 1F1", "1F0,1B1,1F1,1B0\n    ^"),
        ),
        ("0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1", "E305", ("0B0 can never start", "1B0")),
    ],
)
def test_a_wrong_schedule_is_refused_at_its_cell(text: str, code: str, parts: tuple[str, ...]) -> None:
    found, told = refusal(text)
    assert found == code, told
    for part in parts:
        assert part in told


def test_the_arrow_stays_near_in_long_rows() -> None:
    cells = generate("gpipe", 1, 400).text().split(",")
    cells[600], cells[200] = cells[200], cells[600]  # a backward before its forward
    _, told = refusal(",".join(cells))
    line, mark = next(
        (a, b) for a, b in zip(told.splitlines(), told.splitlines()[1:], strict=False) if "^" in b
    )
    assert line.startswith("...")
    assert line[mark.index("^") :].startswith("0B200,")
    assert len(line) < 90


def test_every_schedule_code_is_triggered_somewhere() -> None:
    # E307 in test_program_plan.py, W301 in test_layout_check.py
    assert {i.code for i in codes.CODES} == {f"E30{n}" for n in range(1, 9)} | {"W301"}


SCHEDULES = st.one_of(
    GENERATED,
    st.sampled_from([parse_schedule(V_SHAPE), parse_schedule(SPLIT)]),
)


def peer_of(action: Action, schedule: Schedule) -> int:
    to = action.stage + (1 if action.kind in (ActionKind.SEND_F, ActionKind.RECV_B) else -1)
    return schedule.stage_ranks[to]


@settings(max_examples=150, deadline=None)
@given(SCHEDULES)
def test_lowered_rows_keep_the_computes_and_pair_the_messages(schedule: Schedule) -> None:
    rows = lower(schedule)
    assert tuple(tuple(a for a in row if a.kind in COMPUTE) for row in rows) == schedule.rows
    for me, row in enumerate(rows):
        for other in range(schedule.num_ranks):
            mine = [a for a in row if a.kind in SEND | RECV and peer_of(a, schedule) == other]
            theirs = [a for a in rows[other] if a.kind in SEND | RECV and peer_of(a, schedule) == me]
            assert len(mine) == len(theirs)
            for a, b in zip(mine, theirs, strict=True):
                assert (a.kind in SEND) != (b.kind in SEND)
                assert a.micro_batch == b.micro_batch
        for stage in {a.stage for a in row}:
            reduce = row.index(Action(stage, ActionKind.REDUCE_GRAD, None))
            ends = [i for i, a in enumerate(row) if a.stage == stage and a.kind.value in "BW"]
            assert reduce > max(ends)
            assert row.count(row[reduce]) == 1


@settings(max_examples=150, deadline=None)
@given(SCHEDULES)
def test_lowered_rows_run_to_the_end_when_each_pair_has_one_queue(schedule: Schedule) -> None:
    """Messages of a pair of ranks complete in order, each when both sides have posted it: the strictest rule."""
    rows = lower(schedule)
    posted: dict[tuple[int, int], list[Action]] = {}
    at = [0] * len(rows)
    where = {}

    def arrived(rank: int, recv: Action) -> bool:
        index, peer = where[recv]
        return len(posted.get((peer, rank), [])) > index

    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row):
                action = row[at[rank]]
                if action.kind in SEND | RECV:
                    peer = peer_of(action, schedule)
                    queue = posted.setdefault((rank, peer), [])
                    where[action] = (len(queue), peer)
                    queue.append(action)
                else:
                    kind = {"F": "RECV_F", "B": "RECV_B", "I": "RECV_B"}.get(action.kind.value)
                    recv = parse_action(f"{action.stage}{kind}{action.micro_batch}") if kind else None
                    if recv in row:
                        assert recv in where, f"{action} before its receive is posted"
                        if not arrived(rank, recv):
                            break
                at[rank] += 1
                moved = True
    assert at == [len(row) for row in rows]


def test_lowering_refuses_what_cannot_run() -> None:
    rows = generate("1f1b", 2, 2).rows
    broken = Schedule("custom", (rows[0][::-1], rows[1]), (0, 1), 2)
    with pytest.raises(MeshwrightError, match="E305"):
        lower(broken)
