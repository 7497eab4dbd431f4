"""Ranks that agree: what fails on one fails on all, with the same list of Problems, and none waits for ever."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from meshwright.base.errors import ExitCode, MeshwrightError, Problem

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """The ranks that write or read one checkpoint together, seen from one of them.

    ``group`` holds them all; None is the default group.
    """

    rank: int
    world_size: int
    group: dist.ProcessGroup | None = None

    def gather(self, value: T) -> list[T] | None:
        """Return the values of all ranks on rank 0, None elsewhere.

        Communication: one gather of objects on ``world``.
        """
        if self.world_size == 1:
            return [value]
        values: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(value, values, dst=0, group=self.group)
        return values

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank.

        Communication: one all_gather of objects on ``world``.
        """
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def from_first(self, value: T) -> T:
        """Return rank 0's ``value`` on every rank.

        Communication: one broadcast of an object on ``world``.
        """
        if self.world_size == 1:
            return value
        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def refuse(self, problems: Sequence[Problem], exit_code: ExitCode = ExitCode.BAD_INPUT) -> None:
        """Raise the Problems of all ranks on all ranks, each once; return when there is none.

        Communication: one all_gather of objects on ``world``.
        """
        found = dict.fromkeys(p for part in self.all_gather(list(problems)) for p in part)
        if found:
            raise MeshwrightError(list(found), exit_code)


def this_world() -> Ranks:
    """Return the ranks of the default process group, or one rank without one."""
    if dist.is_available() and dist.is_initialized():
        return Ranks(dist.get_rank(), dist.get_world_size())
    return Ranks(0, 1)
