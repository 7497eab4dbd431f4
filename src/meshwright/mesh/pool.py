"""RankPool: worker processes that live long and run many short jobs as ranks of a gloo group."""

from __future__ import annotations

import atexit
import contextlib
import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from meshwright.mesh import env
from meshwright.mesh.rank_process import (
    RankEnd,
    RankHandle,
    collect,
    default_group,
    end_processes,
    load_torch,
    rendezvous,
    watch_signals,
)
from meshwright.mesh.rank_report import RankFailure, report_error

GRACE_S = 2.0
"""After the first failure the other ranks of a job have this long to say what they saw."""


class RankPool:
    """Up to ``max_workers`` forked processes; each job runs on the first ``nproc`` of them as ranks 0..nproc-1.

    A job leaves nothing behind: its groups are destroyed, the random state is reset, and after any failure the
    processes it ran on are replaced. Make it before the parent has used several threads.
    """

    def __init__(self, max_workers: int = 8) -> None:
        import torch

        load_torch()
        torch.set_num_threads(1)  # a forked child cannot use the parent's threads
        self._max_workers = max_workers
        self._workers: list[RankHandle] = []
        self._lock = threading.Lock()
        self._owner = os.getpid()
        atexit.register(self.close)

    def run(
        self, fn: Callable[..., Any], nproc: int, *args: Any, timeout_s: float = 60.0, **kwargs: Any
    ) -> list[Any]:
        """Return ``fn(rank, world_size, *args, **kwargs)`` of every rank, by rank.

        ``fn`` is a function of a module; it runs inside an initialised gloo group with torch's DETAIL checks, and its
        result comes back pickled.

        Raises:
            RankFailure: the first error that is a rank's own, a signal, or the time-out after ``timeout_s``.
        """
        if not 1 <= nproc <= self._max_workers:
            raise ValueError(f"{nproc} ranks asked of a pool of {self._max_workers}")
        job = pickle.dumps((fn, args, kwargs))
        with self._lock:
            self._ensure(nproc)
            workers = self._workers[:nproc]
            folder = tempfile.mkdtemp(prefix="meshwright-job-")
            clean = False
            try:
                for handle in workers:
                    handle.send("job", (job, handle.rank, nproc, folder, timeout_s, list(sys.path)))
                results, reports = collect(workers, timeout_s=timeout_s, grace_s=GRACE_S)
                if reports:
                    raise RankFailure(reports)
                for handle in workers:
                    handle.send("finish")
                _, reports = collect(workers, timeout_s=10.0, grace_s=GRACE_S)
                if reports:
                    raise RankFailure(reports)
                clean = True
                return [pickle.loads(results[rank]) for rank in range(nproc)]
            finally:
                if not clean:
                    self._end(nproc)
                shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """End all workers. Does nothing in a process that is not the pool's own (a forked child)."""
        if os.getpid() == self._owner:
            self._end(len(self._workers))
            atexit.unregister(self.close)

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ensure(self, nproc: int) -> None:
        """Fork workers until there are ``nproc`` that live."""
        if any(not w.process.is_alive() for w in self._workers):
            self._end(len(self._workers))
        context = multiprocessing.get_context("fork")
        while len(self._workers) < nproc:
            rank = len(self._workers)
            ours, theirs = context.Pipe()
            others = [w.connection for w in self._workers] + [ours]
            process = context.Process(target=_work, args=(theirs, others), name=f"pool-rank-{rank}")
            with warnings.catch_warnings():  # Python 3.12 warns of any fork beside a thread; ours are idle
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            theirs.close()
            self._workers.append(RankHandle(rank, process, ours))

    def _end(self, count: int) -> None:
        """Kill the first ``count`` workers; the ones behind them go too, so that ranks stay in order."""
        if count:
            gone, self._workers = self._workers, []
            end_processes([w.process for w in gone])
            for worker in gone:
                worker.connection.close()


def _work(connection: Connection, inherited: list[Connection]) -> None:
    """Run jobs until the parent closes the connection."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    for other in inherited:  # or the other ends would never see that the parent is gone
        other.close()
    watch_signals()
    env.become_local_rank(debug="DETAIL")
    dist.set_debug_level_from_env()  # pyright: ignore[reportPrivateImportUsage]
    end = RankEnd(connection)
    gc.collect()
    gc.freeze()  # what was there before the fork is not ours to search
    while True:
        _, message = end.receive()
        job, rank, world_size, folder, timeout_s, path = message
        sys.path[:] = path
        try:
            fn, args, kwargs = pickle.loads(job)
            torch.manual_seed(0)
            store = rendezvous(folder, rank, world_size, timeout_s)
            with default_group(rank, world_size, backend="gloo", store=store, timeout_s=timeout_s):
                end.send("result", pickle.dumps(fn(rank, world_size, *args, **kwargs)))
                end.receive()  # "finish": no rank leaves a group that another still uses
            del store, fn, args, kwargs
            _forget()
            end.send("result", b"")
        except BaseException as error:  # whatever it is, the parent must hear of it
            report = report_error(rank, error)
            with contextlib.suppress(OSError):
                end.send("failed", report)
            del error
            signal.pause()  # the parent ends this process


def _forget() -> None:
    """Reset what a job may have changed in torch."""
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(1)
    _forget_meshes()
    gc.collect()


def _forget_meshes() -> None:
    """Empty DTensor's caches: their entries hold the meshes of earlier jobs, and with those their groups' threads.

    The names are torch 2.13's; a version that has others keeps what it caches.
    """
    tensor = sys.modules.get("torch.distributed.tensor")
    if tensor is None:
        return
    with contextlib.suppress(AttributeError, ImportError):
        from torch.distributed.tensor import debug

        debug._clear_sharding_prop_cache()  # pyright: ignore[reportPrivateUsage]
    with contextlib.suppress(AttributeError, ImportError):
        from torch.distributed.tensor._sharding_prop import ShardingPropagator

        ShardingPropagator._propagate_tensor_meta_cached.cache_clear()  # pyright: ignore[reportPrivateUsage]
    with contextlib.suppress(AttributeError, ImportError):
        from torch.distributed.tensor import _redistribute

        _redistribute._gen_transform_infos.cache_clear()  # pyright: ignore[reportPrivateUsage]
