"""A rule-of-thumb decision tree beside the search: memory class, bandwidth thresholds, structure, then a table.

The tree is what practice uses to choose in five minutes. It is printed as a cross-check: each step with its rule and
number, and where its layout is not the search's, why.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from meshwright.base.records import MemoryBytes
from meshwright.base.units import format_bytes
from meshwright.cluster.spec import ClusterSpec
from meshwright.cost.collective import GroupShape, collective_times, strided_shape
from meshwright.cost.fast import columns
from meshwright.cost.pieces import make_pricer
from meshwright.layout.batch import Batch
from meshwright.layout.check import divisors
from meshwright.layout.layout import Layout
from meshwright.layout.parse import complete
from meshwright.model.spec import ModelSpec
from meshwright.search.legal import tensor_degrees

STATE_SHARE: Final = 0.875
"""A device is full of model state from this share of its memory on (35 of 40 GB)."""
ACTIVATION_SHARE: Final = 0.60
GRADIENT_SHARE: Final = 0.50
"""Shares of one device's bytes from which activations, or gradients, are the bottleneck."""
SLOW_BYTES: Final = 2e9
FAST_BYTES: Final = 15e9
"""Bus bandwidth below which tensor and context parallelism are ruled out, and from which they are free to use."""
TEST_BYTES: Final = 2.0**27
"""Payload of the bandwidth test: 128 MiB, the largest of the usual sweep."""
DEEP: Final = 40
LONG: Final = 8192
"""More layers than this ask for a pipeline, longer sequences for context parallelism or fused attention."""
SMALL: Final = 3e9
MEDIUM: Final = 13e9
LARGE: Final = 70e9
"""Parameters at which the table changes its row."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of the tree: the rule, the number that it looks at, and what follows."""

    rule: str
    found: str
    then: str

    def as_dict(self) -> dict[str, str]:
        """Return the JSON form."""
        return {"rule": self.rule, "found": self.found, "then": self.then}


@dataclass(frozen=True, kw_only=True)
class TreeAnswer:
    """What the tree says: its steps, its row of the table, and that row as a layout of this cluster."""

    steps: tuple[Step, ...]
    row: str
    layout: Layout

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "steps": [s.as_dict() for s in self.steps],
            "row": self.row,
            "layout_text": self.layout.text(),
        }


def decide(spec: ModelSpec, cluster: ClusterSpec, seq_len: int, precision: str) -> TreeAnswer:
    """Return what the decision tree says for a model on a cluster.

    Raises:
        MeshwrightError: E405 a figure is not known.
    """
    memory, bottleneck = memory_class(spec, cluster, seq_len, precision)
    bandwidth, most_tp = _bandwidth(cluster)
    row, layout = recipe(spec, cluster, seq_len, precision, most_tp, bottleneck)
    table = Step(
        rule="the table, by parameters", found=f"{spec.num_parameters / 1e9:.3g} B parameters", then=row
    )
    return TreeAnswer(steps=(memory, bandwidth, *_structure(spec, seq_len), table), row=row, layout=layout)


def memory_class(spec: ModelSpec, cluster: ClusterSpec, seq_len: int, precision: str) -> tuple[Step, str]:
    """Return which bytes fill one device that holds the whole model and one sequence: state, activations, gradients."""
    one = Layout(precision=precision)
    batch = Batch(global_batch=1, micro_batch=1, accumulation=1, dp=1, seq_len=seq_len)
    found = columns(make_pricer(spec, cluster, seq_len, precision), [one], [batch]).memory
    held = {name: float(found[name][0].max()) for name in found if name not in ("peak", "outside_allocator")}
    return _class_of(held, cluster.device.memory.value, "on one device with one sequence")


def measured_class(memory: MemoryBytes, capacity_bytes: float, steps: int) -> tuple[Step, str]:
    """Return the same from the live bytes that ``steps`` steps of the whole model with one sequence were seen to hold.

    A run counts logits among the activations, and what is alive for a moment as working.
    """
    held = {name: float(size) for name, size in memory.as_dict().items() if name != "outside_allocator"}
    return _class_of(held, capacity_bytes, f"in {steps} measured steps on one device with one sequence")


def _class_of(held: Mapping[str, float], capacity: float, where: str) -> tuple[Step, str]:
    total = sum(held.values())
    state = held["parameters"] + held["gradients"] + held["optimizer"]
    forward = held["activations"] + held["logits"]
    said = f"state {format_bytes(state)} and activations {format_bytes(forward)} of {format_bytes(capacity)} {where}"
    rule = (
        f"state above {100 * STATE_SHARE:.1f} % of the memory, activations above {100 * ACTIVATION_SHARE:.0f} % or "
        f"gradients above {100 * GRADIENT_SHARE:.0f} % of what is held"
    )
    if state > STATE_SHARE * capacity:
        return Step(rule=rule, found=said, then="parameters and optimizer: ZeRO 2 or 3"), "state"
    if forward > ACTIVATION_SHARE * total:
        return Step(
            rule=rule, found=said, then="activations: recompute, or context parallelism"
        ), "activations"
    if held["gradients"] > GRADIENT_SHARE * total:
        return Step(rule=rule, found=said, then="gradients: ZeRO 2"), "gradients"
    return Step(rule=rule, found=said, then="no bottleneck: plain data parallelism"), "none"


def bus_bandwidth(cluster: ClusterSpec, shape: GroupShape) -> float:
    """Return the bus bandwidth of an all-reduce of 128 MiB, bytes/s: 2 (N - 1) / N of the payload per second."""
    seconds = float(collective_times(cluster).seconds("all_reduce", TEST_BYTES, shape))
    return 2.0 * (shape.size - 1) / shape.size * TEST_BYTES / seconds if seconds else float("inf")


def _bandwidth(cluster: ClusterSpec) -> tuple[Step, int]:
    """Return the step about bandwidth, and the largest tensor degree that it allows."""
    node = min(cluster.gpus_per_node, cluster.num_gpus)
    inside = (
        bus_bandwidth(cluster, strided_shape(node, 1, cluster.gpus_per_node)) if node > 1 else float("inf")
    )
    said = f"{inside / 1e9:.3g} GB/s inside a node" if node > 1 else "one device on a node"
    if cluster.num_nodes > 1:
        # one device of each node, as a group of replicas beside a full tensor group has
        between = bus_bandwidth(cluster, GroupShape(cluster.num_nodes, cluster.num_nodes, 1))
        said += f", {between / 1e9:.3g} GB/s between nodes"
    rule = f"bus bandwidth of an all-reduce: {FAST_BYTES / 1e9:.0f} GB/s and {SLOW_BYTES / 1e9:.0f} GB/s"
    if node < 2 or inside < SLOW_BYTES:
        return Step(rule=rule, found=said, then="no tensor or context parallelism: ZeRO and a pipeline"), 1
    if inside < FAST_BYTES:
        return Step(rule=rule, found=said, then="tensor degree of at most 4, no context parallelism"), 4
    return Step(rule=rule, found=said, then="tensor and context parallelism inside a node"), node


def _structure(spec: ModelSpec, seq_len: int) -> tuple[Step, ...]:
    moe = 0 if spec.moe is None else spec.moe.num_experts
    return (
        Step(
            rule="experts ask for expert or tensor parallelism",
            found=f"{moe} experts",
            then="no need" if spec.moe is None else "expert parallelism",
        ),
        Step(
            rule=f"more than {DEEP} layers ask for a pipeline",
            found=f"{spec.num_layers} layers",
            then="a pipeline" if spec.num_layers > DEEP else "no need",
        ),
        Step(
            rule=f"sequences above {LONG} ask for context parallelism or fused attention",
            found=f"{seq_len} tokens",
            then="context parallelism" if seq_len > LONG else "no need",
        ),
    )


def recipe(
    spec: ModelSpec,
    cluster: ClusterSpec,
    seq_len: int,
    precision: str,
    most_tp: int,
    bottleneck: str,
) -> tuple[str, Layout]:
    """Return the table's row for a model of this size, and it as a layout that fills the cluster.

    Degrees that the cluster, the model or the bandwidth does not have are lowered to the next that they have.
    """
    size = spec.num_parameters
    if size <= SMALL:
        row, tp, pp, cp, zero, recompute = "up to 3 B: DDP", 1, 1, 1, 0, "none"
    elif size <= MEDIUM:
        row, tp, pp, cp, zero, recompute = "up to 13 B: ZeRO 2, recompute", 1, 1, 1, 2, "full"
    elif size < LARGE:
        row, tp, pp, cp, zero, recompute = "13 to 70 B: TP 4, PP 2, ZeRO 1", 4, 2, 1, 1, "none"
    else:
        row, tp, pp, cp, zero, recompute = "70 B and more: TP 8, PP 4, CP 2, ZeRO 3", 8, 4, 2, 3, "none"
    if bottleneck == "activations":
        recompute = "full"
    gpus = cluster.num_gpus
    degrees = tuple(divisors(gpus))
    legal = tensor_degrees(spec, degrees, None)
    tp = _at_most([d for d, good in zip(degrees, legal, strict=True) if good], min(tp, most_tp))
    pp = _at_most([d for d in divisors(gpus // tp) if d <= spec.num_layers], pp)
    cp = _at_most([d for d in divisors(gpus // tp // pp) if seq_len % (2 * d) == 0], cp)
    dp = gpus // tp // pp // cp
    if dp * cp == 1:
        zero = 0
    ep = 1
    if spec.moe is not None:  # over what tp leaves of a node, or as many ranks where that is none
        node = min(gpus, cluster.gpus_per_node)
        ep = _at_most(divisors(math.gcd(dp * cp, spec.moe.num_experts)), node // tp if node > tp else node)
    made = complete({"dp": dp, "tp": tp, "pp": pp, "cp": cp, "zero": zero, "recompute": recompute, "ep": ep})
    if tp > 1 and spec.num_kv_heads % tp:
        made = replace(made, kv_heads="replicate")
    return row, replace(made, precision=precision)


def _at_most(legal: list[int], wanted: int) -> int:
    return max((d for d in legal if d <= wanted), default=1)
