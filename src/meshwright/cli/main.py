"""``meshwright``: the program. Wrong usage, refusals, Ctrl-C and our own faults all end here, never in a traceback."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from io import TextIOWrapper
from types import FrameType
from typing import Any, NoReturn, TextIO

import typer

from meshwright.base.errors import ExitCode, MeshwrightError, Problem, problem
from meshwright.cli import checkpoint, config_file, data, not_built
from meshwright.cli.backtest import backtest
from meshwright.cli.catalogues import clusters, models
from meshwright.cli.estimate import estimate
from meshwright.cli.explain import explain
from meshwright.cli.faults import fault
from meshwright.cli.init import init
from meshwright.cli.inspect_model import inspect_model
from meshwright.cli.output import show_line, show_problems
from meshwright.cli.plan import plan
from meshwright.cli.probe import probe
from meshwright.cli.prove import prove
from meshwright.cli.report import report
from meshwright.cli.simulate import simulate
from meshwright.cli.train import train
from meshwright.cli.usage import usage_error, usage_problems

INTERRUPTED = 130

app = typer.Typer(
    name="meshwright",
    help="Plan, run and prove parallel training of language models.",
    epilog="Start with: meshwright inspect MODEL, then meshwright plan MODEL --cluster CLUSTER ...",
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def _version(wanted: bool) -> None:
    if wanted:
        from meshwright import __version__

        print(f"meshwright {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def start(
    context: typer.Context,
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    """Plan, run and prove parallel training of language models."""
    if context.invoked_subcommand is None:
        print(context.get_help())


for _name, _command, _short in (
    ("inspect", inspect_model, "Show what a model is, from its config.json."),
    ("models", models, "List the models known by name."),
    ("clusters", clusters, "List the clusters known by name."),
    ("plan", plan, "Find the best layouts on a cluster."),
    ("estimate", estimate, "Predict time and memory of one layout."),
    ("backtest", backtest, "Score predictions against measured runs."),
    ("explain", explain, "Tell what one rank does, or explain a code."),
    ("simulate", simulate, "Play one step on the clock."),
    ("probe", probe, "Measure this machine."),
    ("init", init, "Write a commented run file."),
    ("train", train, "Train what a run file says."),
    ("prove", prove, "Prove a layout against one device."),
    ("report", report, "Write one page about a run or a plan."),
):
    app.command(_name, short_help=_short)(_command)
app.add_typer(config_file.app, name="config")
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(data.app, name="data")
for _name, _command in not_built.COMMANDS.items():
    app.command(_name, short_help="Not built yet.", context_settings=not_built.ANY_ARGUMENTS)(_command)


def run(args: Sequence[str]) -> int:
    """Run one command and return its exit code; whatever goes wrong is printed as Problems."""
    as_json = "--json" in args
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    with _noting_ctrl_c() as pressed:
        try:
            command = typer.main.get_command(app)
            result: Any = command.main(list(args), prog_name="meshwright", standalone_mode=False)
            if result == INTERRUPTED:
                return _interrupted(as_json)
            return result if isinstance(result, int) else 0
        except (KeyboardInterrupt, typer.Abort):
            return _interrupted(as_json)
        except SystemExit:  # the parser's answer when nobody reads standard output any more
            return int(ExitCode.ENVIRONMENT)
        except Exception as error:
            if pressed:  # an import or a library may make another error of it
                return _interrupted(as_json)
            problems, code = _told(error, args)
            show_problems(problems, as_json)
            return int(code)


def _told(error: Exception, args: Sequence[str]) -> tuple[Sequence[Problem], ExitCode]:
    """Return what is printed about an error that ended a command, and the exit code."""
    if isinstance(error, MeshwrightError):
        return error.problems, error.exit_code
    if isinstance(error, usage_error()):
        return usage_problems(error, args), ExitCode.BAD_INPUT
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO):
        found = error.strerror or str(error)
        return [problem("E867", where=str(error.filename or ""), found=found)], ExitCode.ENVIRONMENT
    return [fault(error, args)], ExitCode.FAULT


@contextlib.contextmanager
def _noting_ctrl_c() -> Iterator[list[int]]:
    """Note SIGINT while the context is open, where it raises KeyboardInterrupt by default; yield what was noted."""
    pressed: list[int] = []
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield pressed
        return

    def note(number: int, frame: FrameType | None) -> None:
        pressed.append(number)
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _interrupted(as_json: bool) -> int:
    if as_json:
        show_problems([problem("E515", where="meshwright", found="Ctrl-C (SIGINT)")], as_json)
    show_line("meshwright: interrupted")
    return INTERRUPTED


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and leave with its exit code; a result that cannot be written is exit 4."""
    code = run(sys.argv[1:] if args is None else args)
    if sys.stdout is not None:  # pyright: ignore[reportUnnecessaryComparison] - None where it was closed
        code = _written(sys.stdout, code)
    sys.exit(code)


def _written(stream: TextIO, code: int) -> int:
    """Return ``code`` once all of the result is written; 4 in place of 0 where that fails."""
    try:
        stream.flush()
    except OSError as error:
        if error.errno != errno.EPIPE:
            found = error.strerror or str(error)
            show_problems([problem("E867", where="standard output", found=found)], False)
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), stream.fileno()
        )  # what is left is not tried again at the end
        return code or int(ExitCode.ENVIRONMENT)
    return code
