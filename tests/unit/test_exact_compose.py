"""From small steps to large ones: lines through exact bytes, and what is off the line."""

from __future__ import annotations

from meshwright.exact.compose import Axis, Grid, axis, compose, disagreement
from meshwright.exact.trace import Place, Segment, Trace

PER_BLOCK, PER_MICRO_BATCH, PER_BOTH = 100, 7, 3


def step(blocks: int, micro_batches: int, extra: int = 0, bump: int = 0) -> Trace:
    """A step by hand: state of every block, activations of the blocks before, a little for each micro-batch."""
    segments: dict[Place, Segment] = {}

    def add(place: Place, activations: int) -> None:
        live = {
            "parameters": PER_BLOCK * blocks,
            "working": PER_MICRO_BATCH * micro_batches,
            "gradients": PER_BOTH * blocks * micro_batches,
            "activations": activations,
        }
        segments[place] = Segment(len(segments), live)

    for k in range(micro_batches):
        for i in range(blocks):
            add(Place("forward", 0, k, "block", i), 50 * (i + 1) + (bump if i == blocks // 2 else 0))
        for i in reversed(range(blocks)):
            add(Place("backward", 0, k, "block", i), 50 * (i + 1) + (20 if i == blocks - 2 else 10))
    add(Place("update"), extra * blocks * blocks)
    return Trace(
        blocks=blocks,
        micro_batches=micro_batches,
        segments=segments,
        rest_bytes={"parameters": PER_BLOCK * blocks},
    )


GRID = Grid(axis(40, 4, 1, alike=True), axis(30, 3, 1, alike=True))


def traced(**options: int) -> dict[tuple[int, int], Trace]:
    return {size: step(*size, **options) for size in (*GRID.corners(), *GRID.checks())}


def test_a_composed_step_is_the_whole_one():
    assert disagreement(GRID, traced()) == ""
    made, whole = compose(GRID, traced(), (40, 30)), step(40, 30)
    assert made.peak()[0] == whole.peak()[0] == Place("backward", 0, 29, "block", 39)
    assert dict(made.peak()[1].live_bytes) == dict(whole.peak()[1].live_bytes)
    assert made.rest_bytes == whole.rest_bytes
    shared = made.segments.keys() & whole.segments.keys()
    assert len(shared) == len(made.segments) > 20
    assert all(made.segments[p].total == whole.segments[p].total for p in shared)


def test_what_is_not_on_a_line_is_said():
    said = disagreement(GRID, traced(extra=1))
    assert "6 blocks and 3 micro-batches" in said
    assert "update" in said


def test_a_peak_in_the_middle_is_noticed():
    """A block in the middle that holds more than those at either end would hide the peak."""
    assert "on the line" in disagreement(GRID, traced(bump=1000))


def test_small_steps_are_played_as_they_are():
    assert axis(6, 4, 1, alike=True).sizes == (6,)
    assert axis(7, 4, 1, alike=True).sizes == (4, 5, 6)
    assert axis(80, 4, 1, alike=False).sizes == (80,)
    assert axis(32, 8, 4, alike=True).sizes == (8, 12, 16)
    assert axis(30, 8, 4, alike=True).sizes == (10, 14, 18)  # at whole distances from what is asked for
    grid = Grid(Axis((5,)), Axis((2,)))
    whole = step(5, 2)
    assert compose(grid, {(5, 2): whole}, (5, 2)) is whole


def test_places_are_counted_from_the_nearer_end():
    assert [GRID.blocks.near(i, 6) for i in range(6)] == [0, 1, None, None, -2, -1]
    assert [GRID.micro_batches.near(k, 4) for k in range(4)] == [0, None, -2, -1]
    turns = axis(26, 6, 2, alike=True, parts=3)
    assert [turns.near(k, 8) for k in range(8)] == [0, 1, None, None, -4, -3, -2, -1]
    place = Place("backward", 0, 29, "block", 38)
    near = GRID.near(place, (40, 30))
    assert near == Place("backward", 0, -1, "block", -2)
    assert GRID.counted(near, (40, 30)) == place


def test_a_place_in_words():
    assert (
        Place("backward", 2, 7, "block", 1).text(8, 20, 4)
        == "backward of micro-batch 7 of 8, block 21, stage 2 of 4"
    )
    assert (
        Place("forward", 0, 0, "head").text(2, 0, 1) == "forward of micro-batch 0 of 2, norm, head and loss"
    )
    assert Place("update").text(2, 0, 1) == "optimizer update"
