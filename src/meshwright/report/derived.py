"""What the page derives from a plan: the Plan itself, its model, its schedule, and each rank's own text."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.base.errors import MeshwrightError
from meshwright.cluster.load import read_cluster
from meshwright.model.spec import ModelSpec
from meshwright.program.explain import explain_rank
from meshwright.program.plan import Plan, plan_spec
from meshwright.program.plan_file import plan_from_dict
from meshwright.report.links import memory_capacity
from meshwright.report.source import Source, number, table
from meshwright.schedule.actions import Schedule
from meshwright.schedule.text import parse_schedule

MAX_EXPLAINED = 128


@dataclass(frozen=True, kw_only=True)
class Derived:
    """The plan as values; ``trouble`` says why ``plan`` is None."""

    plan: Plan | None = None
    spec: ModelSpec | None = None
    schedule: Schedule | None = None
    trouble: str = ""


def derive_plan(source: Source) -> Derived:
    """Return the Plan, ModelSpec and Schedule of the source's plan, or why they cannot be had."""
    if not source.plan:
        return Derived(trouble="no plan is recorded here")
    try:
        plan = plan_from_dict(dict(source.plan))
        spec = plan_spec(plan)
        schedule = parse_schedule(plan.schedule_text, name=plan.layout.schedule)
    except MeshwrightError as error:
        reasons = "; ".join(f"{p.code} {p.where}: {p.found}" for p in error.problems)
        return Derived(trouble=f"the recorded plan cannot be read ({reasons})")
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        return Derived(trouble=f"the recorded plan cannot be read ({type(error).__name__}: {error})")
    return Derived(plan=plan, spec=spec, schedule=schedule)


def rank_texts(derived: Derived) -> dict[int, str]:
    """Return "you are rank N" for every rank, up to 128; empty when there is no plan."""
    if derived.plan is None or derived.spec is None:
        return {}
    count = min(derived.plan.world_size, MAX_EXPLAINED)
    return {rank: explain_rank(derived.plan, derived.spec, rank) for rank in range(count)}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What is known of the machine: ranks of a node, bytes of a rank, each with where it is from."""

    gpus_per_node: int | None
    node_from: str
    capacity: float | None
    capacity_from: str


def machine(source: Source) -> Machine:
    """Return the node size and capacity from the plan's cluster, else from the probe, else unknown."""
    name = source.plan.get("cluster")
    if isinstance(name, str) and name:
        try:
            cluster = read_cluster(name, None)
        except (MeshwrightError, OSError, ValueError):
            cluster = None
        if cluster is not None:
            return Machine(
                gpus_per_node=cluster.gpus_per_node,
                node_from=f"{cluster.gpus_per_node} devices, from cluster {name}",
                capacity=cluster.device.memory.value,
                capacity_from=f"cluster {name}",
            )
    nodes = number(table(source.probe.get("topology")).get("num_nodes"))
    world = number(source.probe.get("world_size"))
    return Machine(
        gpus_per_node=int(world // nodes) if nodes and world else None,
        node_from="from the probe",
        capacity=memory_capacity(source.probe),
        capacity_from="an equal share of what was free when the machine was probed",
    )
