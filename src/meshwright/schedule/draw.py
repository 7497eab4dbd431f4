"""A schedule on the clock as text: one line per rank, time from left to right."""

from __future__ import annotations

from meshwright.schedule.actions import ActionKind, Schedule
from meshwright.schedule.clock import Clock, run_clock

_LETTERS = {
    ActionKind.FORWARD: "F",
    ActionKind.BACKWARD: "B",
    ActionKind.INPUT_GRAD: "I",
    ActionKind.WEIGHT_GRAD: "W",
}


def draw_text(schedule: Schedule, clock: Clock | None = None, width: int = 100) -> str:
    """Return the drawing: ``F2`` is the forward of micro-batch 2, ``B2`` its backward, dots are idle time.

    Without a ``clock`` a forward takes 1 unit and a backward 2. With more than one stage per rank a cell starts with
    its stage. A step wider than ``width`` columns is squeezed: then a cell may be a single letter.
    """
    shown = clock if clock is not None else run_clock(schedule, 1.0, 2.0)
    label = len(f"rank {schedule.num_ranks - 1} ")
    shortest = min(span.end_s - span.start_s for span in shown.spans)
    with_stage = schedule.num_stages > schedule.num_ranks
    digits = len(str(schedule.num_micro_batches - 1)) + (1 if with_stage else 0)
    room = max(width - label - 2, 10)
    wanted = (digits + 2) / shortest if shortest > 0 else room
    scale = min(wanted, room / shown.makespan_s) if shown.makespan_s else 1.0
    columns = max(1, round(shown.makespan_s * scale))
    lines: list[str] = []
    for rank in range(schedule.num_ranks):
        cells = ["."] * columns
        for span in (s for s in shown.spans if s.rank == rank):
            start = min(columns - 1, round(span.start_s * scale))
            end = max(start + 1, round(span.end_s * scale))
            stage = str(span.action.stage) if with_stage else ""
            text = f"{stage}{_LETTERS[span.action.kind]}{span.action.micro_batch}"
            if len(text) > end - start:
                text = _LETTERS[span.action.kind]
            fill = text.ljust(end - start, "-" if span.action.kind is ActionKind.FORWARD else "=")
            if len(fill) > 1 and len(text) < len(fill):
                fill = fill[:-1] + " "
            cells[start:end] = fill[: columns - start]
        lines.append(f"{f'rank {rank}':<{label}}|{''.join(cells)}|")
    lines.append(
        f"idle {100 * shown.bubble_share_of_total:.1f} % of total "
        f"({100 * shown.bubble_share_of_ideal:.1f} % over the busiest rank's compute); "
        f"peak in flight {'/'.join(str(n) for n in shown.peak_in_flight)} micro-batches"
    )
    return "\n".join(lines)
