"""A process for each played rank: torch keeps what it found out about a mesh, so a process plays one rank and ends."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Sequence
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

import torch

from meshwright.base.errors import ExitCode, MeshwrightError, problem, refuse
from meshwright.exact.rank import RankMemory, RankTask, rank_memory
from meshwright.mesh import contract

_ASKS_FOR_VALUES = (
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "GuardOnDataDependentSymNode",
)


def play_ranks(tasks: Sequence[RankTask]) -> list[RankMemory]:
    """Return the exact memory of each task's rank, in order; as many processes at once as there are cores.

    Raises:
        MeshwrightError: what the runtime refuses on one of them, E470, E471, E472.
    """
    _load(tasks)
    refuse(contract.missing(contract.EXACT_NAMES), ExitCode.ENVIRONMENT)
    context: Any = multiprocessing.get_context("spawn" if torch.cuda.is_initialized() else "fork")
    answers: list[Any] = [None] * len(tasks)
    at_once = max(1, min(len(tasks), os.cpu_count() or 1))
    for start in range(0, len(tasks), at_once):
        running = []
        for index in range(start, min(len(tasks), start + at_once)):
            mine, theirs = context.Pipe(duplex=False)
            child = context.Process(target=_work, args=(theirs, tasks[index]))
            child.start()
            theirs.close()
            running.append((index, mine, child))
        try:
            for index, mine, child in running:
                answers[index] = _answer(mine, child, tasks[index])
        finally:
            for _, mine, child in running:
                mine.close()
                if child.is_alive():
                    child.terminate()
                child.join()
    return answers


def _load(tasks: Sequence[RankTask]) -> None:
    """Import before the processes fork what each of them would import by itself: some seconds each."""
    import transformers

    import_module("meshwright.exact.play")
    import_module("torch._dynamo")  # torch imports it when the first tensor without memory is used
    for task in tasks:
        getattr(transformers, task.spec.architecture, None)


def _answer(mine: Connection, child: Any, task: RankTask) -> RankMemory:
    where = f"rank {task.rank}, {task.plan.layout.text()}"
    try:
        found = mine.recv()
    except EOFError:
        child.join()
        raise MeshwrightError(
            problem("E472", where=where, found=f"its process ended with status {child.exitcode}"),
            ExitCode.ENVIRONMENT,
        ) from None
    if isinstance(found, MeshwrightError):
        raise found
    if isinstance(found, RankMemory):
        return found
    kind, said, trace = found
    if kind in _ASKS_FOR_VALUES:
        raise MeshwrightError(problem("E470", where=where, found=f"{kind}: {said}"))
    raise MeshwrightError(problem("E471", where=where, found=f"{kind}: {said}; {trace}"), ExitCode.FAULT)


def _work(theirs: Connection, task: RankTask) -> None:
    """Play one rank and send what was found, or what went wrong, to the parent."""
    from meshwright.exact.play import Player

    try:
        player = Player()
        theirs.send(rank_memory(task, lambda plan, spec: player.trace(plan, spec, task.rank, gloo=task.gloo)))
    except MeshwrightError as error:
        theirs.send(error)
    except BaseException as error:  # the parent says it
        lines = traceback.extract_tb(error.__traceback__)
        ours = [f"{frame.name} ({os.path.basename(frame.filename)}:{frame.lineno})" for frame in lines[-6:]]
        said = " ".join(str(error).split())[:300]
        theirs.send((type(error).__name__, said, " > ".join(ours)))
