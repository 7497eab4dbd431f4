"""Commands of the contract that are not built yet: they refuse whatever their arguments, and name what works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import typer

from meshwright.base.errors import MeshwrightError, problem

ANY_ARGUMENTS: dict[str, Any] = {"ignore_unknown_options": True, "allow_extra_args": True}


def refuse_not_built(what: str, instead: str) -> NoReturn:
    """Raise E900 for ``what``, naming what works today.

    Raises:
        MeshwrightError: always.
    """
    raise MeshwrightError(problem("E900", where=what, found=f"{what} is not built yet", do=instead))


def convert(context: typer.Context) -> None:
    """Read or write the configuration files of other programs (not built yet)."""
    refuse_not_built(
        "meshwright convert", "write a run file with meshwright init MODEL; config.json is read as it is"
    )


def doctor(context: typer.Context) -> None:
    """Say what is wrong with this machine or a run (not built yet)."""
    refuse_not_built(
        "meshwright doctor", "use meshwright probe for the machine and meshwright report RUN_DIR for a run"
    )


COMMANDS: dict[str, Callable[[typer.Context], None]] = {
    "convert": convert,
    "doctor": doctor,
}
