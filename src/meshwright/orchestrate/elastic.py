"""Going on after a rank was lost: from the newest checkpoint, in the same layout or in a smaller one.

The order of samples, the masks and the rate are functions of the step, so nothing but the layout has to change.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from meshwright.base.errors import ExitCode, MeshwrightError, Problem, problem
from meshwright.cluster.spec import ClusterSpec
from meshwright.layout.batch import derive_batch
from meshwright.layout.check import check, check_optimizer
from meshwright.layout.layout import Layout
from meshwright.mesh.env import TorchrunJob
from meshwright.mesh.launch import LostRank
from meshwright.model.spec import ModelSpec
from meshwright.orchestrate.data_rules import data_problems
from meshwright.orchestrate.preparing import Show, device_type, priced
from meshwright.orchestrate.run_folder import continues, trained
from meshwright.orchestrate.session import checkpoint_to_resume, step_of
from meshwright.parallel.compiled import missing_compiler
from meshwright.program.make import make_plan
from meshwright.program.plan import Plan
from meshwright.program.plan_file import plan_to_dict
from meshwright.search.search import search
from meshwright.train.data import check_data
from meshwright.train.task import TrainTask

T = TypeVar("T")

TRIED = 20
"""Plans of a search that are looked at before a number of ranks is given up."""


@dataclass(frozen=True, kw_only=True)
class Restart:
    """One new start of a run: the how-manieth of how many, after which loss, from which step and in which layout.

    ``rank`` is the rank that was lost, -1 where only its node's agent knows. ``changed`` is "" or why the plan changed.
    """

    number: int
    limit: int
    limited_by: str
    rank: int
    why: str
    step: int
    layout: str
    plan_hash: str
    changed: str = ""

    def text(self) -> str:
        """Return it for people."""
        begins = (
            f"from the checkpoint of step {self.step}" if self.step else "from step 1, as nothing was saved"
        )
        return f"W578  restart {self.number} of {self.limit} ({self.limited_by}): {self.why}; {begins}, {self.layout}"

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)


def survive(
    attempt: Callable[[TrainTask], T],
    task: TrainTask,
    *,
    smaller: Callable[[Plan, int], tuple[Plan, str]],
    told: Callable[[Restart, TrainTask], None],
    show: Show,
) -> tuple[T, TrainTask]:
    """Return what ``attempt`` returns, and the task that it was at last given; lost ranks start it again.

    A rank that is lost twice with no new checkpoint between is given up: the run goes on with fewer ranks.

    Args:
        attempt: trains as a task says; raises LostRank when a rank was lost.
        task: the first one.
        smaller: returns the plan for at most so many ranks, and why it is another one.
        told: is given each restart, and the task it begins, before it begins.
        show: takes lines for people.

    Raises:
        MeshwrightError: whatever is not a lost rank; E577 when the restarts are used up.
    """
    limit = task.run.run.max_restarts
    begun_at = step_of(task.resume_from)
    last: tuple[int, int] | None = None
    with _asked_to_stop() as asked:
        while True:
            if asked():
                found = "SIGTERM between two starts of its ranks"
                raise MeshwrightError(
                    problem("E515", where=f"job of {task.plan.world_size} ranks", found=found),
                    ExitCode.ENVIRONMENT,
                )
            try:
                return attempt(task), task
            except LostRank as lost:
                if asked():
                    raise
                if task.restarts >= limit:
                    raise _used_up(lost, task) from lost
                loss = lost
            newest = checkpoint_to_resume(task.run_dir, show)
            step = step_of(newest)
            again = last == (loss.rank, step) and step == begun_at
            last, begun_at = (loss.rank, step), step
            plan, changed = task.plan, ""
            if again and plan.world_size > 1:
                plan, why = smaller(plan, plan.world_size - 1)
                changed = (
                    f"rank {loss.rank} was lost twice with no checkpoint between, so it is left out: {why}"
                )
                last = None
            task = replace(
                task,
                plan=plan,
                resume_from=newest,
                restarts=task.restarts + 1,
                manifest=task.manifest | {"plan": plan_to_dict(plan)},
            )
            first = loss.problems[0]
            restart = Restart(
                number=task.restarts,
                limit=limit,
                limited_by="run.max_restarts",
                rank=loss.rank,
                why=f"{first.code} {first.where}: {first.found}",
                step=step,
                layout=plan.layout.text(),
                plan_hash=plan.hash,
                changed=changed,
            )
            told(restart, task)


def goes_on(folder: Path, job: TorchrunJob | None, writes: bool) -> bool:
    """Return whether torchrun started this rank again, or another node joined, so that the run goes on by itself.

    Rank 0 (``writes``) asks whether ``run.json`` names this job, and refuses the folder otherwise; the others follow.
    """
    if job is None:
        return False
    return continues(folder, job) if writes else trained(folder)


def torchrun_restart(job: TorchrunJob | None, task: TrainTask, changed: str) -> Restart:
    """Return what is said when torchrun has started the ranks again."""
    assert job is not None
    return Restart(
        number=job.restarts,
        limit=job.max_restarts,
        limited_by="torchrun --max-restarts",
        rank=-1,
        why="torchrun started the ranks again",
        step=step_of(task.resume_from),
        layout=task.plan.layout.text(),
        plan_hash=task.plan.hash,
        changed=changed,
    )


def restart_notes(run: Any, job: TorchrunJob | None) -> list[Problem]:
    """Return W574 for restarts without checkpoints, W579 for a time to save that torchrun does not give."""
    found: list[Problem] = []
    if run.run.elastic and not run.run.checkpoint_every:
        what = "run.elastic without run.checkpoint_every: a restart begins at step 1, or where --resume began"
        found.append(problem("W574", where="run.checkpoint_every", found=what))
    if job is not None and run.run.grace_s > job.shutdown_s:
        what = f"run.grace_s = {run.run.grace_s:g}, torchrun kills its workers after {job.shutdown_s:g} s"
        found.append(problem("W579", where="run.grace_s", found=what))
    return found


def _used_up(lost: LostRank, task: TrainTask) -> MeshwrightError:
    limit = task.run.run.max_restarts
    found = f"{limit} of {limit} restarts were made, and a rank was lost again"
    return MeshwrightError(
        [*lost.problems, problem("E577", where="run.max_restarts", found=found)], ExitCode.ENVIRONMENT
    )


@contextlib.contextmanager
def _asked_to_stop() -> Iterator[Callable[[], bool]]:
    """Note SIGTERM, which the launcher hands on to the ranks: a job that is told to stop does not start again."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    try:
        yield lambda: bool(seen)
    finally:
        signal.signal(signal.SIGTERM, before)


def smaller_plan(
    run: Any, spec: ModelSpec, plan: Plan, cluster: ClusterSpec, ranks: int, *, exactly: bool
) -> tuple[Plan, str]:
    """Return the plan that the planner finds for ``ranks`` ranks (``exactly``: all of them), and why it is another one.

    Batch, data and precision stay, so that the run stays the same one.

    Raises:
        MeshwrightError: E576 when no layout is legal.
    """
    tried = [ranks] if exactly else range(ranks, 0, -1)
    for count in tried:
        found = _best(run, spec, plan, cluster, count)
        if found is not None:
            left = f", {ranks - count} of {ranks} ranks unused" if count < ranks else ""
            why = f"{plan.world_size} ranks were planned, {ranks} are left{left}; "
            return found, why + f"{plan.layout.text()} -> {found.layout.text()}"
    near = [n for n in range(ranks - 1, 0, -1) if _best(run, spec, plan, cluster, n) is not None][:1]
    do = f"start {near[0]} ranks (--nproc-per-node), or {plan.world_size}" if near else ""
    raise MeshwrightError(
        problem(
            "E576",
            where="layout",
            found=f"{plan.layout.text()} needs {plan.world_size} ranks; nothing is legal on {ranks}",
            do=do,
        )
    )


def _best(run: Any, spec: ModelSpec, plan: Plan, cluster: ClusterSpec, ranks: int) -> Plan | None:
    """Return the best plan on ``ranks`` ranks that breaks no rule of the run, or None."""
    there = replace(cluster, gpus_per_node=ranks, num_nodes=1) if cluster.num_gpus != ranks else cluster
    precision = plan.layout.precision
    packed = check_data(run.data) == "pack"
    for priced_in in dict.fromkeys(
        (precision, "fp32")
    ):  # where no rate is known, one that orders layouts alike
        pins = ",".join(filter(None, [f"precision={priced_in}", "cp=1" if packed else ""]))
        try:
            found = search(
                spec,
                there,
                run.data.seq_len,
                run.batch.sequences,
                fix=pins,
                top=TRIED,
                model_path=run.model.config,
            )
        except MeshwrightError:
            continue
        for candidate in found.plans:
            layout = replace(candidate.layout, precision=precision)
            if not any(p.severity == "error" for p in _problems(run, spec, layout, there)):
                new = make_plan(
                    spec,
                    layout,
                    run.batch.sequences,
                    run.data.seq_len,
                    run.model.config,
                    frozen=tuple(run.freeze),
                    cluster_name=there.name,
                )
                return priced(replace(new, why=candidate.why, binds=candidate.binds), spec, there)[0]
    return None


def _problems(run: Any, spec: ModelSpec, layout: Layout, cluster: ClusterSpec) -> list[Problem]:
    try:
        batch = derive_batch(layout, run.batch.sequences, run.data.seq_len)
        found = check(spec, layout, batch, cluster, for_run=True)
        found += check_optimizer(layout, run.optimizer.name)
        found += data_problems(run.data, spec, layout)
        found += missing_compiler(device_type()) if layout.compile == "blocks" else []
    except MeshwrightError as error:
        return list(error.problems)
    return found
