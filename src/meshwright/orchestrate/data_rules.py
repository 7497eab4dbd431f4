"""What data asks of the layout and the model, checked before any process starts."""

from __future__ import annotations

from meshwright.base.errors import Problem, problem
from meshwright.base.units import format_bytes
from meshwright.config.resolve import DataSettings
from meshwright.layout import built
from meshwright.layout.layout import Layout
from meshwright.model.spec import ModelSpec
from meshwright.train.data import TokenData, check_data


def data_problems(data: DataSettings, spec: ModelSpec | None, layout: Layout | None) -> list[Problem]:
    """Return E654 where documents are packed and the model cannot have that, else what it costs (W640, W656).

    Raises:
        MeshwrightError: what is wrong with the sources themselves.
    """
    kind = check_data(data)
    if kind != "pack":
        return []
    where = "data.rows" if data.rows is not None else "data.rows (pack follows from the records)"
    problems = [] if spec is None else packing_problems(spec, where)
    if layout is not None and layout.cp > 1 and not problems:
        found = f"packed documents of {data.seq_len} places over cp = {layout.cp}"
        problems.append(problem("W656", where=where, found=found))
    elif layout is not None and not problems:
        mask = layout.micro_batch * data.seq_len**2
        problems.append(
            problem(
                "W640",
                where=where,
                found=f"a mask of {layout.micro_batch} x {data.seq_len} x {data.seq_len} bytes = {format_bytes(mask)} "
                "for each micro-batch, which the memory prediction leaves out",
            )
        )
    return problems


def packing_problems(spec: ModelSpec, where: str) -> list[Problem]:
    """Return E654 where it is not shown of the model's family that packed documents do not see each other."""
    if spec.family in built.PACKING_FAMILIES:
        return []
    return [
        problem(
            "E654",
            where=where,
            found=f"packed documents and the family {spec.family}",
            needs="one of " + ", ".join(built.PACKING_FAMILIES),
        )
    ]


def last_step(data: TokenData, global_batch: int, stop_at: int) -> tuple[int, str]:
    """Return the last step of a session, and what to say where the data ends before it ("" where it does not)."""
    ends = data.last_step(global_batch)
    if ends is None or ends >= stop_at:
        return stop_at, ""
    rest = (data.end or 0) - (ends - 1) * global_batch
    short = f", whose last batch has {rest} of {global_batch} sequences" if rest < global_batch else ""
    return ends, f"the data ends after step {ends}{short}"
