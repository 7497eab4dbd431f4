"""StepProgram from model, layout, batch and schedule: what one rank does in one optimizer step, in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final, Literal

from meshwright.base.axes import TIED, WORLD
from meshwright.base.errors import refuse
from meshwright.layout.batch import Batch
from meshwright.layout.check import check_built
from meshwright.layout.context import local_length
from meshwright.layout.layout import Layout
from meshwright.layout.precision import PrecisionTable, precision_table
from meshwright.layout.ranks import (
    EXPERT_REPLICATE,
    EXPERT_SHARD,
    SHARD,
    coordinates,
    expert_degrees,
    group,
)
from meshwright.model.counts import (
    block_forward_flops,
    block_weight_flops,
    head_forward_flops,
    head_weight_flops,
)
from meshwright.model.sharding import tp_shape
from meshwright.model.spec import ModelSpec
from meshwright.program.context import attention_collectives
from meshwright.program.expert import data_degrees, exchanges, split_units
from meshwright.program.router import WHAT, context_sum, noted_bytes
from meshwright.program.step import Collective, CollectiveKind, Compute, LedgerLine, Op, StepProgram, ledger
from meshwright.program.tensor import micro_batch_collectives, on_rank, step_collectives
from meshwright.program.units import (
    Unit,
    frozen_names,
    leading_frozen,
    shard_numel,
    stage_layers,
    stage_units,
    tied_tensor,
)
from meshwright.schedule.actions import Action, ActionKind, Schedule
from meshwright.schedule.lower import lower

_HALVES: Final[Mapping[ActionKind, Literal["", "input", "weight"]]] = MappingProxyType(
    {ActionKind.BACKWARD: "", ActionKind.INPUT_GRAD: "input", ActionKind.WEIGHT_GRAD: "weight"}
)

COUNT_BYTES = 8
"""Valid-token count: one int64."""

SUMS_BYTES = 24
"""Sum of squares, loss sum, overflow count: three float64."""


def derive(
    spec: ModelSpec,
    layout: Layout,
    batch: Batch,
    schedule: Schedule,
    rank: int,
    frozen: Sequence[str] = (),
) -> StepProgram:
    """Return what ``rank`` does in one optimizer step, in order; ``layout.cut`` is written as layers per stage.

    Computes carry the model's FLOPs (causal attention, no recompute; 0 for the optimizer). ``peer`` of a send or
    recv is the other coordinate on its axis.

    Raises:
        MeshwrightError: E250 for an axis whose collectives are not described so far (ep).
    """
    refuse([p for p in check_built(layout) if p.code == "E250"])
    row = lower(schedule)[coordinates(layout, rank)["pp"]]
    return StepProgram(rank=rank, ops=tuple(_Deriver(spec, layout, batch, schedule, rank, frozen).ops(row)))


def expected_ledger(program: StepProgram) -> tuple[LedgerLine, ...]:
    """Return the ledger that a real step of this rank must show."""
    return ledger((c.kind, c.axis, c.num_bytes) for c in program.collectives)


def forward_flops_per_token(spec: ModelSpec, layout: Layout, stage: int, seq_len: int) -> float:
    """Return the model's forward FLOPs per token of ``stage``: its blocks, and the head on the last."""
    total = sum(
        block_forward_flops(spec, spec.blocks[i], seq_len, "causal") for i in stage_layers(layout, stage)
    )
    return total + (head_forward_flops(spec) if stage == layout.num_stages - 1 else 0.0)


def unneeded_weight_flops(spec: ModelSpec, layout: Layout, stage: int) -> float:
    """Return the FLOPs per token of weight gradients that a backward of ``stage`` saves because an adapter trains."""
    total = sum(block_weight_flops(spec, spec.blocks[i]) for i in stage_layers(layout, stage))
    return total + (head_weight_flops(spec) if stage == layout.num_stages - 1 else 0.0)


class _Deriver:
    """One rank's facts, and the operations that each action stands for."""

    def __init__(
        self,
        spec: ModelSpec,
        layout: Layout,
        batch: Batch,
        schedule: Schedule,
        rank: int,
        frozen: Sequence[str],
    ) -> None:
        self.spec, self.layout, self.batch, self.schedule, self.rank = spec, layout, batch, schedule, rank
        self.table: PrecisionTable = precision_table(layout)
        self.shards = layout.shard if layout.zero else 1
        self.index = group(layout, rank, SHARD).index(rank) if layout.zero else 0
        self.expert_shard = 1, 0
        if layout.zero and layout.ep > 1:
            self.expert_shard = expert_degrees(layout)[1], group(layout, rank, EXPERT_SHARD).index(rank)
        stages = [s for s, r in enumerate(schedule.stage_ranks) if r == coordinates(layout, rank)["pp"]]
        at = coordinates(layout, rank)["tp"]
        self.units = {
            stage: split_units(
                [on_rank(u, spec, layout, at) for u in stage_units(spec, layout, stage, frozen)], layout
            )
            for stage in stages
        }
        tokens = batch.micro_batch * batch.seq_len
        self.flops = {
            s: tokens * forward_flops_per_token(spec, layout, s, batch.seq_len) / (layout.tp * layout.cp)
            for s in stages
        }
        self.frozen = frozen_names(spec, frozen)
        self.leading = {s: leading_frozen(spec, layout, s, frozen) for s in stages}
        self.weights = {s: tokens * unneeded_weight_flops(spec, layout, s) / layout.tp for s in stages}

    def ops(self, row: Sequence[Action]) -> Iterator[Op]:
        """Yield the operations of the whole step."""
        if self.layout.world_size > 1:
            yield self._world(COUNT_BYTES, "number of valid tokens")
        gathered: set[int] = set()
        for action in row:
            yield from self._action(action, gathered)
        yield from step_collectives(
            self.spec, self.layout, self.units, (self.shards, self.index), self.expert_shard, self.frozen
        )
        yield from self._tied()
        if self.layout.world_size > 1:
            yield self._world(SUMS_BYTES, "squares of the gradients, loss and overflows")
        yield Compute(what="optimizer", stage=min(self.units), micro_batch=None, flops=0.0)

    def _action(self, action: Action, gathered: set[int]) -> Iterator[Op]:
        stage, k = action.stage, action.micro_batch
        if action.kind is ActionKind.FORWARD:
            if self.layout.zero == 3 or stage not in gathered:
                yield from self._gathers(stage, k, "forward")
                gathered.add(stage)
            yield Compute(what="forward", stage=stage, micro_batch=k, flops=self.flops[stage])
            yield from self._tensor(stage, k, "forward")
            yield from self._context(stage, k, "forward")
            yield from context_sum(self.spec, self.layout, self.batch, stage, k)
        elif action.kind is ActionKind.REDUCE_GRAD:
            yield from self._reduce_once(stage)
        elif action.kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD):
            if self.layout.zero == 3 and action.kind is not ActionKind.WEIGHT_GRAD:
                yield from self._gathers(stage, k, "backward")
            half = _HALVES[action.kind]
            flops = (1 if half else 2) * self.flops[stage] - (0.0 if half == "input" else self.weights[stage])
            yield Compute(what="backward", stage=stage, micro_batch=k, flops=flops, half=half)
            if action.kind is not ActionKind.WEIGHT_GRAD:
                yield from self._tensor(stage, k, "backward")
                yield from self._context(stage, k, "backward")
            if self.layout.zero >= 2 and action.kind is not ActionKind.INPUT_GRAD:
                yield from self._scatters(stage, k)
        else:
            yield from self._messages(action)

    def _tensor(self, stage: int, k: int | None, phase: Literal["forward", "backward"]) -> Iterator[Op]:
        yield from micro_batch_collectives(self.spec, self.layout, self.batch, stage, k, self.frozen, phase)
        yield from exchanges(self.spec, self.layout, self.batch, stage, k, self.frozen, phase)

    def _context(self, stage: int, k: int | None, phase: Literal["forward", "backward"]) -> Iterator[Op]:
        at = coordinates(self.layout, self.rank)["cp"]
        yield from attention_collectives(self.spec, self.layout, self.batch, stage, k, at, self.frozen, phase)

    def _gathers(self, stage: int, k: int | None, phase: str) -> Iterator[Op]:
        size = self.table.bytes_of("gather")
        units = self.units[stage]
        once = self.layout.zero < 3
        for unit in units if phase == "forward" else self._gathered_again(stage):
            shards = data_degrees(unit, self.layout)[1]
            if unit.tensors and shards > 1:
                yield Collective(
                    kind="all_gather",
                    axis=EXPERT_SHARD if unit.experts else "dp_shard",
                    group_size=shards,
                    num_bytes=unit.padded_numel(shards) * size + (0 if once else unit.padded_rows(shards)),
                    what=f"parameters of {title(unit)}" + (", for the whole step" if once else f", {phase}"),
                    stage=stage,
                    micro_batch=k,
                )

    def _gathered_again(self, stage: int) -> tuple[Unit, ...]:
        """Return the units that are gathered for a backward, in order: no gradient flows into the others."""
        root, *held = self.units[stage]
        first = stage_layers(self.layout, stage)[0] + self.leading[stage]
        reached = [u for u in held if int(u.name.rpartition(" ")[2]) >= first]
        return (root, *reversed(reached))

    def _scatters(self, stage: int, k: int | None) -> Iterator[Op]:
        size = self.table.bytes_of("reduce")
        for unit in self._backward_order(stage):
            shards = data_degrees(unit, self.layout)[1]
            if shards > 1:
                numel = unit.padded_numel(shards, trainable=True)
                axis = EXPERT_SHARD if unit.experts else "dp_shard"
                yield self._gradient("reduce_scatter", axis, shards, numel * size, unit, stage, k)

    def _reduce_once(self, stage: int) -> Iterator[Op]:
        """Yield what data parallelism owes once per step."""
        if self.layout.zero == 1:
            yield from self._scatters(stage, None)
        size = self.table.bytes_of("reduce")
        for unit in self._backward_order(stage):
            replicas, shards = data_degrees(unit, self.layout)
            if replicas > 1:
                numel = unit.padded_numel(shards, trainable=True) // shards
                axis = EXPERT_REPLICATE if unit.experts else "dp_replicate"
                yield self._gradient("all_reduce", axis, replicas, numel * size, unit, stage, None)

    def _backward_order(self, stage: int) -> Iterator[Unit]:
        units = self.units[stage]
        for unit in (*reversed(units[1:]), units[0]):
            if unit.trainable_tensors:
                yield unit

    def _gradient(
        self,
        kind: CollectiveKind,
        axis: str,
        size: int,
        num_bytes: int,
        unit: Unit,
        stage: int,
        k: int | None,
    ) -> Collective:
        sharded = data_degrees(unit, self.layout)[1] > 1
        shard = "shard of the " if kind == "all_reduce" and sharded else ""
        return Collective(
            kind=kind,
            axis=axis,
            group_size=size,
            num_bytes=num_bytes,
            what=f"{shard}gradients of {title(unit)}",
            stage=stage,
            micro_batch=k,
        )

    def _messages(self, action: Action) -> Iterator[Collective]:
        sends = action.kind in (ActionKind.SEND_F, ActionKind.SEND_B)
        forward = action.kind in (ActionKind.SEND_F, ActionKind.RECV_F)
        other = action.stage + (1 if (action.kind in (ActionKind.SEND_F, ActionKind.RECV_B)) else -1)
        numel = self.batch.micro_batch * local_length(self.layout, self.batch.seq_len) * self.spec.hidden_size
        parts = [("hidden states", numel * self.table.bytes_of("wire"))]
        noted = noted_bytes(self.spec, self.layout, self.batch)
        if noted:
            parts.append((WHAT, noted))
        for what, num_bytes in parts:
            yield Collective(
                kind="send" if sends else "recv",
                axis="pp",
                group_size=self.layout.pp,
                num_bytes=num_bytes,
                what=what if forward else f"gradient of the {what}",
                stage=action.stage,
                micro_batch=action.micro_batch,
                peer=self.schedule.stage_ranks[other],
            )

    def _tied(self) -> Iterator[Op]:
        tensor = tied_tensor(self.spec)
        last = self.schedule.num_stages - 1
        homes = (self.schedule.stage_ranks[0], self.schedule.stage_ranks[last])
        ends = [stage for stage in (0, last) if stage in self.units]
        if tensor is None or homes[0] == homes[1] or not ends or tensor.name in self.frozen:
            return
        at = coordinates(self.layout, self.rank)["tp"]
        shape = tp_shape(tensor, self.layout.tp, at, self.spec.attention)
        numel = shard_numel(shape, self.shards, self.index)
        yield Collective(
            kind="all_reduce",
            axis=TIED,
            group_size=2,
            num_bytes=numel * self.table.bytes_of("gradient"),
            what="gradient of the tied embedding",
            stage=ends[0],
        )

    def _world(self, num_bytes: int, what: str) -> Collective:
        return Collective(
            kind="all_reduce", axis=WORLD, group_size=self.layout.world_size, num_bytes=num_bytes, what=what
        )


def title(unit: Unit) -> str:
    """Return a unit's name for people: "layer 3", or what the root holds."""
    if unit.name != "root":
        return unit.name.replace("block", "layer")
    parts: list[str] = []
    for role, word in (
        ("embedding", "embedding"),
        ("position", "positions"),
        ("norm", "final norm"),
        ("head", "head"),
    ):
        if any(t.role == role for t in unit.tensors):
            parts.append(word)
    return " and ".join(parts) if len(parts) < 3 else ", ".join(parts[:-1]) + " and " + parts[-1]
