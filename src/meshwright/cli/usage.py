"""Wrong usage as Problems: unknown commands and options with the nearest names, missing and wrong values."""

from __future__ import annotations

import importlib
import itertools
import re
from collections.abc import Sequence
from typing import Any

import typer

from meshwright.base.errors import Problem, nearest, problem


def usage_error() -> type[Exception]:
    """Return the base class of the parser's errors, wherever this version of typer keeps it."""
    return importlib.import_module(typer.BadParameter.__module__).ClickException


def usage_problems(error: Any, args: Sequence[str]) -> list[Problem]:
    """Return what the user wrote wrongly on the command line; every missing option at once."""
    found = [_usage_problem(error, args)]
    if type(error).__name__ != "MissingParameter" or getattr(error, "ctx", None) is None:
        return found
    written = {arg.partition("=")[0] for arg in args}
    where = f"meshwright {_command_of(error.ctx)}".strip()
    for param in error.ctx.command.params:
        option = next((name for name in param.opts if name.startswith("--")), None)
        if option and param.required and param is not error.param and written.isdisjoint(param.opts):
            found.append(problem("E862", where=where, found=f"{option} is missing", do=f"see {where} --help"))
    return found


def _command_of(context: Any) -> str:
    return context.command_path.removeprefix("meshwright").strip()


def _usage_problem(error: Any, args: Sequence[str]) -> Problem:
    kind = type(error).__name__
    context = getattr(error, "ctx", None)
    command = _command_of(context) if context else ""
    where = f"meshwright {command}".strip()
    seek = f"see {where} --help"
    message = str(error.format_message())
    if kind == "NoSuchOption":
        return _unknown_option(error, context, where, seek)
    unknown = re.match(r"No such command ['\"](.+?)['\"]", message)
    if kind == "NoSuchCommand" or unknown:
        name = unknown.group(1) if unknown else str(getattr(error, "command_name", ""))
        known = list(getattr(getattr(context, "command", None), "commands", {}))
        close = nearest(name, known)
        do = f"did you mean {' | '.join(close)}?" if close else seek
        needs = f"one of {', '.join(known)}" if known else ""
        return problem("E860", where=where, found=f"there is no command {name!r}", needs=needs, do=do)
    if kind == "MissingParameter":
        return problem("E862", where=where, found=f"{_name(error.param)} is missing", do=seek)
    if kind == "BadOptionUsage":
        return problem("E862", where=where, found=_sentence(message), do=seek)
    if kind == "BadParameter":
        param = getattr(error, "param", None)
        name = _name(param) if param is not None else ""
        return problem(
            "E863",
            where=f"{where} {name}".strip(),
            found=_with_value(_sentence(error.message).removeprefix("Value error, "), param, args),
            do=seek,
        )
    extra = re.match(r"Got unexpected extra argument(?:s|\(s\))? \((.+)\)", message)
    if extra:
        return problem("E863", where=where, found=f"unexpected: {extra.group(1)}", do=seek)
    if "Missing command" in message:
        known = ", ".join(getattr(getattr(context, "command", None), "commands", {}))
        return problem("E862", where=where, found="the command is missing", needs=f"one of {known}", do=seek)
    return problem("E863", where=where, found=_sentence(message), do=seek)


def _unknown_option(error: Any, context: Any, where: str, seek: str) -> Problem:
    known = [name for param in context.command.params for name in (*param.opts, *param.secondary_opts)]
    options = [name for name in known if name.startswith("-")]
    bare = {name.lstrip("-"): name for name in options}  # two dashes look alike in every two options
    close = [bare[name] for name in nearest(error.option_name.lstrip("-"), bare)]
    found = f"there is no option {error.option_name}"
    do = f"did you mean {' | '.join(close)}?" if close else seek
    return problem("E861", where=where, found=found, needs=f"one of {', '.join(options)}", do=do)


def _with_value(said: str, param: Any, args: Sequence[str]) -> str:
    """Return what the parser said of an option's value, with that value in front where it left it out."""
    options = [name for name in getattr(param, "opts", ()) if name.startswith("-")]
    given = [after for arg, after in itertools.pairwise(args) if arg in options]
    given += [arg.partition("=")[2] for arg in args if "=" in arg and arg.partition("=")[0] in options]
    return f"{given[0]!r}: {said}" if len(given) == 1 and given[0] not in said else said


def _name(param: Any) -> str:
    """Return how the user writes a parameter: its option, or its name in capitals."""
    option = next((name for name in param.opts if name.startswith("--")), "")
    return option or str(param.metavar or param.name or "").upper()


def _sentence(text: str) -> str:
    return " ".join(str(text).split()).rstrip(".")
