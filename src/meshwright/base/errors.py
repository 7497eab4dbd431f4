"""What a user is told when something cannot be done: Problems, and the error that carries them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum, StrEnum

from meshwright.base.codes import CODES


class ExitCode(IntEnum):
    """Exit codes of the command line (a contract)."""

    GOOD = 0
    NO = 1
    BAD_INPUT = 2
    FAULT = 3
    ENVIRONMENT = 4


class Kind(StrEnum):
    """Why a rule refuses. MATH cannot be right; COST is right but pays; CODE is not built yet."""

    INPUT = "input"
    MATH = "math"
    COST = "cost"
    CODE = "code"
    WORLD = "world"
    FAULT = "fault"


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is wrong, in six parts, each a full sentence or a value a person can act on.

    ``severity`` is ``"error"`` (refused) or ``"warning"`` (done, and said).
    """

    code: str
    where: str
    found: str
    needs: str
    why: str
    do: str
    kind: Kind = Kind.INPUT
    severity: str = "error"

    def as_dict(self) -> dict[str, str]:
        """Return the JSON form that ``--json`` prints."""
        return {key: str(value) for key, value in asdict(self).items()}

    def text(self) -> str:
        """Return the printed form: the code and what was found, then needs, why, do and where to read more."""
        head = f"{self.code}  {self.where}: {self.found}" if self.where else f"{self.code}  {self.found}"
        lines = [head]
        if self.needs:
            lines.append(f"      needs  {self.needs}")
        if self.why:
            lines.append(f"      why    {self.why} ({self.kind.value})")
        if self.do:
            lines.append(f"      do     {self.do}")
        lines.append(f"      more   meshwright explain {self.code}")
        return "\n".join(lines)


def problem(
    code: str,
    *,
    where: str = "",
    found: str,
    needs: str = "",
    do: str = "",
    why: str = "",
) -> Problem:
    """Return the Problem ``code`` with this case's numbers; ``why``, ``needs`` and ``do`` default to the code's page."""
    info = CODES[code]
    return Problem(
        code=code,
        where=where,
        found=found,
        needs=needs or info.needs,
        why=why or info.why,
        do=do or info.do,
        kind=Kind(info.kind),
        severity="warning" if code.startswith("W") else "error",
    )


_WORST_FIRST = {Kind.FAULT: 0, Kind.WORLD: 1, Kind.INPUT: 2, Kind.MATH: 3, Kind.CODE: 4, Kind.COST: 5}


class MeshwrightError(Exception):
    """Everything that is wrong, at once, worst first.

    Attributes:
        problems: the Problems, errors before warnings.
        exit_code: what the command line exits with.
    """

    def __init__(
        self, problems: Problem | Iterable[Problem], exit_code: ExitCode = ExitCode.BAD_INPUT
    ) -> None:
        listed = (problems,) if isinstance(problems, Problem) else tuple(problems)
        self.problems: tuple[Problem, ...] = tuple(
            sorted(listed, key=lambda p: (p.severity != "error", _WORST_FIRST[p.kind]))
        )
        self.exit_code = exit_code
        super().__init__("\n".join(p.text() for p in self.problems))

    def __reduce__(self) -> tuple[type[MeshwrightError], tuple[tuple[Problem, ...], ExitCode]]:
        """Pickle by parts, so that a rank's error reaches the launcher whole."""
        return (MeshwrightError, (self.problems, self.exit_code))


def refuse(problems: Sequence[Problem], exit_code: ExitCode = ExitCode.BAD_INPUT) -> None:
    """Raise one MeshwrightError with all problems if any of them is an error; otherwise return."""
    if any(p.severity == "error" for p in problems):
        raise MeshwrightError(problems, exit_code)


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """Return up to ``count`` known names that look like ``name``, best first (for "did you mean")."""
    pool = list(known)
    lowered = {k.lower(): k for k in pool}
    hits = difflib.get_close_matches(name.lower(), list(lowered), n=count, cutoff=0.5)
    return [lowered[h] for h in hits]
