"""One rank of a probe: keeping step with the others, and seconds of what they all do at the same time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from meshwright.mesh.env import RankFacts
from meshwright.probe.block import Timing
from meshwright.probe.request import Request


class Prober:
    """One rank's measuring; every rank makes the same calls in the same order."""

    def __init__(self, facts: RankFacts, request: Request) -> None:
        self.facts = facts
        self.request = request
        self.device = torch.device(facts.device)
        self.start = time.perf_counter()

    def say(self, line: str) -> None:
        """Show a progress line, on rank 0."""
        self.facts.at(action=line)
        if self.facts.rank == 0:
            text = f"[{time.perf_counter() - self.start:5.1f} s] {line}"
            if self.request.show is None:
                print(text, flush=True)
            else:
                self.request.show(text)

    def sync(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.facts.world_size > 1:
            dist.barrier()

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return random numbers on the device."""
        return torch.rand(*shape, device=self.device).to(dtype)

    def agree(self, value: float) -> float:
        """Return the greatest value over all ranks."""
        if self.facts.world_size == 1:
            return value
        tensor = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor.item()

    def total(self, values: Sequence[float]) -> list[float]:
        """Return the sums of ``values`` over all ranks."""
        tensor = torch.tensor(list(values), dtype=torch.float64, device=self.device)
        if self.facts.world_size > 1:
            dist.all_reduce(tensor)
        return tensor.tolist()

    def rate(self, work: Callable[[], Any]) -> Timing:
        """Return seconds per call of ``work`` while every rank calls it."""
        work()
        times: list[Timing] = []
        for _ in range(self.request.windows):
            self.barrier()
            self.sync()
            count, begin, used = 0, time.perf_counter(), time.process_time()
            while True:
                work()
                count += 1
                if count % 4 == 0 or count < 4:
                    self.sync()
                    if time.perf_counter() - begin >= self.request.window_s:
                        break
            times.append(
                ((time.perf_counter() - begin) / count, max(time.process_time() - used, 1e-9) / count)
            )
        return middle(times)

    def paired_rate(self, first: Callable[[], Any], second: Callable[[Any], Any]) -> tuple[Timing, Timing]:
        """Return seconds per call of ``first`` and of ``second`` on its result, alternating, while all ranks do."""
        second(first())
        ones: list[Timing] = []
        twos: list[Timing] = []
        for _ in range(self.request.windows):
            self.barrier()
            sums, count, begin = [0.0, 0.0, 0.0, 0.0], 0, time.perf_counter()
            while count == 0 or time.perf_counter() - begin < self.request.window_s:
                self.sync()
                t0, c0 = time.perf_counter(), time.process_time()
                value = first()
                self.sync()
                t1, c1 = time.perf_counter(), time.process_time()
                second(value)
                self.sync()
                t2, c2 = time.perf_counter(), time.process_time()
                sums = [s + d for s, d in zip(sums, (t1 - t0, c1 - c0, t2 - t1, c2 - c1), strict=True)]
                count += 1
            ones.append((sums[0] / count, max(sums[1], 1e-9) / count))
            twos.append((sums[2] / count, max(sums[3], 1e-9) / count))
        return middle(ones), middle(twos)


def middle(times: Sequence[Timing]) -> Timing:
    """Return the medians."""
    return statistics.median(t[0] for t in times), statistics.median(t[1] for t in times)
