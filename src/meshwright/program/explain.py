"""The plan told to people: what one rank is and does, and the page of an error code."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from meshwright.base.codes import CODES
from meshwright.base.errors import MeshwrightError, nearest, problem
from meshwright.base.units import format_bytes, format_count
from meshwright.layout.layout import Layout
from meshwright.layout.precision import precision_table
from meshwright.layout.ranks import (
    DATA,
    EP,
    EXPERT_REPLICATE,
    EXPERT_SHARD,
    SHARD,
    coordinates,
    expert_degrees,
    group,
    mesh_shape,
    nodes_of,
    summed_over,
)
from meshwright.model.spec import ModelSpec
from meshwright.program.derive import derive, title
from meshwright.program.expert import data_degrees, shard_index, split_units
from meshwright.program.explain_context import is_exchange, merge_exchange, positions_held, tell_exchange
from meshwright.program.plan import Plan
from meshwright.program.step import Collective, Compute, Op
from meshwright.program.tensor import on_rank
from meshwright.program.units import Unit, stage_layers, stage_units, tied_tensor
from meshwright.program.volume import data_parallel_volume
from meshwright.schedule.actions import ActionKind, Schedule
from meshwright.schedule.clock import run_clock
from meshwright.schedule.text import parse_schedule

WIDTH = 100
MOMENTS = 2
"""AdamW keeps two moments per parameter."""


def explain_rank(plan: Plan, spec: ModelSpec, rank: int, gpus_per_node: int | None = None) -> str:
    """Return a text that tells what ``rank`` is, holds and does in one step of ``plan``.

    ``gpus_per_node`` adds the node, and which groups leave it.

    Raises:
        MeshwrightError: E454 for a rank that the plan does not have.
    """
    if not 0 <= rank < plan.world_size:
        raise MeshwrightError(
            problem(
                "E454",
                where="rank",
                found=f"rank {rank}, but the plan has {plan.world_size} ranks",
                do=f"a rank from 0 to {plan.world_size - 1}",
            )
        )
    schedule = parse_schedule(plan.schedule_text, name=plan.layout.schedule)
    program = derive(spec, plan.layout, plan.batch, schedule, rank, plan.frozen)
    place = coordinates(plan.layout, rank)["pp"]
    at = coordinates(plan.layout, rank)["tp"]
    stages = [s for s, r in enumerate(schedule.stage_ranks) if r == place]
    whole = [u for s in stages for u in stage_units(spec, plan.layout, s, plan.frozen)]
    units = split_units([on_rank(u, spec, plan.layout, at) for u in whole], plan.layout)
    parts = [
        _who(plan, rank, gpus_per_node),
        _groups(plan, spec, rank, gpus_per_node, schedule),
        _holds(plan, spec, stages, rank, units),
        _step(plan, program.ops, rank),
        _stays(plan, schedule, place),
        _sends(plan, program.collectives, data_parallel_volume(program)),
    ]
    return "\n\n".join(part for part in parts if part)


def explain_error(code: str) -> str:
    """Return the page of an error or warning code.

    Raises:
        MeshwrightError: E455 for a code that does not exist.
    """
    info = CODES.get(code.strip().upper())
    if info is None:
        near = [known for known in CODES if known.startswith(code.strip().upper())][:3] or nearest(
            code, CODES
        )
        raise MeshwrightError(
            problem(
                "E455",
                where="explain",
                found=f"no code {code!r}",
                do="did you mean " + " | ".join(near) + "?" if near else "",
            )
        )
    kinds = {
        "input": "what was written cannot be used",
        "math": "it cannot be right, so it is refused",
        "cost": "it is right, but it pays",
        "code": "it is not built yet",
        "world": "the machine or the job does not match",
        "fault": "a fault of Meshwright",
    }
    lines = [f"{info.code}  {info.title}", "", f"kind   {info.kind}: {kinds[info.kind]}"]
    for name, text in (("needs", info.needs), ("why", info.why), ("do", info.do)):
        if text:
            lines.append(f"{name:<6} {text}")
    if info.page:
        lines += ["", info.page]
    return "\n".join(lines)


def _wrap(text: str, indent: str = "") -> str:
    return textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _numbers(numbers: Sequence[int]) -> str:
    """Return numbers as text, long lists by their pattern: "0, 2, 4, ..., 62"."""
    if len(numbers) <= 8:
        return ", ".join(str(n) for n in numbers)
    return f"{numbers[0]}, {numbers[1]}, {numbers[2]}, ..., {numbers[-1]} ({len(numbers)} ranks)"


def _who(plan: Plan, rank: int, gpus_per_node: int | None) -> str:
    layout = plan.layout
    text = f"You are rank {rank} of {plan.world_size}"
    if gpus_per_node:
        text += f", device {rank % gpus_per_node} of node {rank // gpus_per_node}"
    text += f'. The job trains "{plan.model_name}" under the layout {layout.text()}.'
    coords = coordinates(layout, rank)
    used = [axis for axis, degree in mesh_shape(layout).items() if degree > 1]
    if used:
        places = ", ".join(f"{axis} {coords[axis]} (of 0..{mesh_shape(layout)[axis] - 1})" for axis in used)
        text += f" Your coordinates in the mesh: {places}."
    else:
        text += " You are alone: nothing is sent to anyone."
    return _wrap(text)


def _groups(plan: Plan, spec: ModelSpec, rank: int, gpus_per_node: int | None, schedule: Schedule) -> str:
    layout = plan.layout
    lines: list[str] = []

    def add(axis: str, name: str, why: str) -> None:
        members = group(layout, rank, axis)
        text = f"{name}: ranks {_numbers(members)}{why}"
        if gpus_per_node:
            nodes = nodes_of(members, gpus_per_node)
            text += f" All on node {nodes[0]}." if len(nodes) == 1 else f" They span nodes {_numbers(nodes)}."
        lines.append(_wrap(text, "  "))

    if layout.pp > 1:
        add("pp", "pipeline", ". Each holds other layers; hidden states go up, their gradients come back.")
    if layout.tp > 1:
        add("tp", "tensor group", ". Together you multiply every matrix of your layers, on the same tokens.")
    if layout.cp > 1:
        add("cp", "context group", ". Each holds other tokens of the same sequences; attention joins them.")
    if layout.zero and layout.shard > 1:
        what = {1: "optimizer state", 2: "gradients and optimizer state"}.get(
            layout.zero, "parameters, gradients and optimizer state"
        )
        add(SHARD, "shard group", f". Together you keep one copy of the {what} of your layers.")
    if layout.cp > 1 and not layout.zero:
        add(DATA, "replicas", ". You compute on different tokens and sum gradients.")
    elif layout.dp_replicate > 1:
        name = "replicas of your shard" if layout.zero and layout.shard > 1 else "replicas"
        add("dp_replicate", name, ". You compute on different sequences and sum gradients.")
    if layout.ep > 1:
        lines += _expert_groups(spec, layout, rank, add)
    members = group(layout, rank, "tied")
    apart = schedule.stage_ranks[0] != schedule.stage_ranks[-1]
    if layout.pp > 1 and apart and members and tied_tensor(spec) is not None:
        lines.append(
            _wrap(f"tied pair: ranks {_numbers(members)}. Embedding and head share one matrix.", "  ")
        )
    return "\n".join(["Your groups", *lines]) if lines else ""


def _expert_groups(
    spec: ModelSpec, layout: Layout, rank: int, add: Callable[[str, str, str], None]
) -> list[str]:
    """Tell the groups of the expert axis through ``add``; return lines of groups that have one member."""
    assert spec.moe is not None
    each = spec.moe.num_experts // layout.ep
    first = group(layout, rank, EP).index(rank) * each
    mine = f"expert {first}" if each == 1 else f"experts {first} to {first + each - 1}"
    add(EP, "expert group", f". You hold {mine} of each mixture; tokens travel to their experts and back.")
    replicas, shards = expert_degrees(layout)
    if shards > 1:
        add(EXPERT_SHARD, "shard group of your experts", ". You hold the same experts and share their state.")
    if replicas > 1:
        add(EXPERT_REPLICATE, "replicas of your experts", ". You hold the same and sum their gradients.")
    if shards == replicas == 1:
        return [_wrap("Nobody else holds your experts: their gradients are complete on this rank.", "  ")]
    return []


@dataclass(frozen=True)
class _State:
    """Elements that a rank holds of its stage."""

    whole: int
    trainable: int
    shard: int
    trainable_shard: int


def _layers(layers: range) -> str:
    return f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]} to {layers[-1]}"


def _state(plan: Plan, rank: int, units: Sequence[Unit]) -> _State:
    layout = plan.layout
    cut = [(u, data_degrees(u, layout)[1], shard_index(u, layout, rank)) for u in units]
    return _State(
        whole=sum(u.numel for u in units),
        trainable=sum(u.trainable_numel for u in units),
        shard=sum(u.shard_numel(n, index) for u, n, index in cut),
        trainable_shard=sum(u.shard_numel(n, index, trainable=True) for u, n, index in cut),
    )


def _holds(plan: Plan, spec: ModelSpec, stages: Sequence[int], rank: int, units: Sequence[Unit]) -> str:
    layout, table = plan.layout, precision_table(plan.layout)
    roots = [title(u) for u in units if u.name == "root" and u.tensors]
    root = " and the ".join(roots)
    text = f"The whole model is yours: all {_count(spec.num_layers, 'layer')}"
    if layout.pp > 1:
        named = " and ".join(_layers(stage_layers(layout, s)) for s in stages)
        what = f"are stage {stages[0]}"
        if len(stages) > 1:
            what = f"own stages {', '.join(str(s) for s in stages[:-1])} and {stages[-1]}"
        text = f"You {what} of 0 to {layout.num_stages - 1}: you have {named} (of {spec.num_layers})"
    if layout.tp > 1:
        text = text.replace(
            "The whole model is yours:", f"You have 1/{layout.tp} of each matrix of the model:"
        )
        text = text.replace("you have", f"you have 1/{layout.tp} of each matrix of")
    if layout.ep > 1 and spec.moe is not None:
        text += f", with 1/{layout.ep} of the {spec.moe.num_experts} experts of each mixture"
    state = _state(plan, rank, units)
    text += f"{', and the ' + root if root else ''}: {format_count(state.whole)} parameters"
    if state.trainable != state.whole:
        text += f", of which {format_count(state.trainable)} train"
    lines = ["What you hold", _wrap(text + ".", "  ")]
    sharded = layout.zero >= 1 and layout.shard > 1

    def line(name: str, numel: int, size: int, dtype: str, note: str) -> None:
        amount = f"{format_bytes(numel * size):>11}"
        lines.append(f"    {name:<11} {amount}   {format_count(numel)} elements of {dtype}{note}")

    shared = f", 1/{layout.shard} of them" if sharded else ""
    if sharded and layout.ep > 1:
        part = expert_degrees(layout)[1]
        shared = f", 1/{layout.shard} of them and 1/{part} of your experts"
    line("parameters", state.shard, table.bytes_of("storage"), table.storage, shared + " at rest")
    size = table.bytes_of("gradient")
    whole = not sharded or layout.zero == 1
    note = " while you accumulate" if whole and sharded else "" if not sharded else shared
    line("gradients", state.trainable if whole else state.trainable_shard, size, table.gradient, note)
    size = MOMENTS * table.bytes_of("optimizer")
    line(
        "optimizer", state.trainable_shard, size, table.optimizer, f"{shared}, {MOMENTS} moments each (AdamW)"
    )
    if sharded:
        size = table.bytes_of("gather")
        if layout.zero == 3:
            most = max(units, key=lambda u: u.numel)
            note = f"the largest unit ({title(most)}) is {format_bytes(most.numel * size)}"
            text = (
                f"Parameters are gathered in {table.gather} one unit at a time and dropped after use; {note}."
            )
        else:
            text = (
                f"During a step the whole parameters are there too, in {table.gather}: "
                f"{format_bytes(state.whole * size)}."
            )
        lines.append(_wrap(text, "  "))
    if table.autocast:
        lines.append(
            _wrap(
                f"Matrix products run in {table.compute} by autocast; the parameters stay {table.storage}.",
                "  ",
            )
        )
    return "\n".join(lines)


@dataclass(frozen=True)
class _Line:
    """One told operation (micro-batch left out) and the micro-batch it was for."""

    text: str
    micro_batch: int | None


def _tell(op: Op, plan: Plan, rank: int) -> _Line:
    if isinstance(op, Compute):
        if op.what == "optimizer":
            return _Line("clip by the global norm and update your parameters (AdamW)", None)
        where = "your layers" + (f" of stage {op.stage}" if plan.layout.chunks > 1 else "")
        kind = {"": op.what, "input": "backward for the input", "weight": "backward for the weights"}[op.half]
        return _Line(f"run {kind} through {where} ({format_count(op.flops)}FLOP)", op.micro_batch)
    if is_exchange(op):
        return _Line(tell_exchange(op, plan.layout, rank), op.micro_batch)
    size = format_bytes(op.num_bytes)
    if op.kind in ("send", "recv"):
        column = group(plan.layout, rank, "pp")
        assert op.peer is not None
        assert op.stage is not None
        up = (op.kind == "send") != op.what.startswith("gradient")
        who = f"rank {column[op.peer]} (stage {op.stage + 1 if up else op.stage - 1})"
        if op.kind == "send":
            return _Line(f"send {op.what} to {who}: {size}", op.micro_batch)
        return _Line(f"receive {op.what} from {who}: {size}", op.micro_batch)
    members = group(plan.layout, rank, summed_over(plan.layout, op.axis))
    who = "all ranks" if len(members) == plan.world_size else f"ranks {_numbers(members)}"
    form = {
        "all_reduce": f"sum the {op.what} over {who} (all-reduce, {op.axis})",
        "all_gather": f"gather the {op.what} from {who} (all-gather, {op.axis})",
        "all_to_all": f"exchange the {op.what} with {who} (all-to-all, {op.axis})",
        "reduce_scatter": f"sum the {op.what} over {who} and keep your shard (reduce-scatter, {op.axis})",
    }.get(op.kind, f"{op.kind} of the {op.what} over {who} ({op.axis})")
    return _Line(f"{form}: {size}, you send {format_bytes(op.volume_bytes)}", op.micro_batch)


MERGED_AXES = ("dp_shard", "dp_replicate", EXPERT_SHARD, EXPERT_REPLICATE)
"""Axes of data parallelism, on which units are gathered and reduced one by one."""


def _merge_units(ops: Sequence[Op]) -> list[Op]:
    """Return the operations with a run of collectives over the layers told as one per kind and axis (bytes summed)."""
    told: list[Op] = []
    runs: dict[tuple[str, str, int | None], list[Collective]] = {}
    for op in ops:
        merges = isinstance(op, Collective) and op.axis in MERGED_AXES
        if not merges:
            told += [_merged(run) for run in runs.values()]
            runs = {}
            told.append(op)
            continue
        assert isinstance(op, Collective)
        runs.setdefault((op.kind, op.axis, op.micro_batch), []).append(op)
    return told + [_merged(run) for run in runs.values()]


def _merged(run: Sequence[Collective]) -> Collective:
    if len(run) == 1:
        return run[0]
    experts = run[0].axis in (EXPERT_SHARD, EXPERT_REPLICATE)
    kind = "parameters" if run[0].kind == "all_gather" else "gradients"
    shard = "shard of the " if run[0].what.startswith("shard") else ""
    tail = run[0].what.rpartition(", ")[2] if run[0].kind == "all_gather" else ""
    tail = tail if tail == "for the whole step" else f"for the {tail}" if tail else ""
    units = _count(len(run), "unit") + (" of experts" if experts else "")
    what = f"{shard}{kind} of {units}, one by one," + (f" {tail}," if tail else "")
    return replace(run[0], num_bytes=sum(c.num_bytes for c in run), what=what)


def _step(plan: Plan, ops: Sequence[Op], rank: int) -> str:
    lines = [_tell(op, plan, rank) for op in _merge_units(merge_exchange(ops))]
    micro = _count(plan.batch.micro_batch, "sequence")
    head = (
        f"Your step, in order: {_count(plan.batch.accumulation, 'micro-batch').replace('batchs', 'batches')} "
        f"of {micro} of {plan.batch.seq_len} tokens"
    )
    if plan.layout.cp > 1:
        head += f", of which you hold positions {positions_held(plan.layout, plan.batch, rank)}"
    out = [_wrap(head)]
    for number, (block, repeats) in enumerate(_compress(lines), 1):
        if repeats > 1:
            out.append(_wrap(f"{number:>3}. {_repeat_head(block, repeats)}"))
            out += [
                textwrap.fill(
                    _numbered(line, block),
                    WIDTH,
                    initial_indent="       - ",
                    subsequent_indent="         ",
                    break_on_hyphens=False,
                )
                for line in block
            ]
        else:
            line = block[0]
            suffix = f" [micro-batch {line.micro_batch}]" if line.micro_batch is not None else ""
            out.append(
                textwrap.fill(
                    line.text + suffix,
                    WIDTH,
                    initial_indent=f"{number:>3}. ",
                    subsequent_indent="     ",
                    break_on_hyphens=False,
                )
            )
    return "\n".join(out)


def _repeat_head(block: Sequence[_Line], repeats: int) -> str:
    numbers = [line.micro_batch for line in block if line.micro_batch is not None]
    first = min(numbers) if numbers else 0
    return f"for each of {repeats} micro-batches k = {first} to {first + repeats - 1}:"


def _numbered(line: _Line, block: Sequence[_Line]) -> str:
    """Return the line with its micro-batch as k or k + n, where the block's first micro-batch is k."""
    if line.micro_batch is None:
        return line.text
    first = min(other.micro_batch for other in block if other.micro_batch is not None)
    return f"{line.text} [{'k' if line.micro_batch == first else f'k + {line.micro_batch - first}'}]"


def _compress(lines: Sequence[_Line]) -> list[tuple[tuple[_Line, ...], int]]:
    """Return the lines as (block, times): a block that repeats with each micro-batch one higher is told once."""
    out: list[tuple[tuple[_Line, ...], int]] = []
    at = 0
    while at < len(lines):
        length, times = 1, 1
        for size in range(1, min(40, (len(lines) - at) // 2) + 1):
            count = 1
            while _follows(lines, at, size, count):
                count += 1
            if count > 1 and size * count > length * times:
                length, times = size, count
        out.append((tuple(lines[at : at + length]), times))
        at += length * times
    return out


def _follows(lines: Sequence[_Line], at: int, size: int, count: int) -> bool:
    """Whether the next block of ``size`` lines equals the first with every micro-batch ``count`` higher."""
    start = at + size * count
    if start + size > len(lines):
        return False
    for base, line in zip(lines[at : at + size], lines[start : start + size], strict=True):
        if base.text != line.text or base.micro_batch is None or line.micro_batch is None:
            return False
        if line.micro_batch - base.micro_batch != count:
            return False
    return True


def _stays(plan: Plan, schedule: Schedule, rank: int) -> str:
    peak = run_clock(schedule, 1.0, 2.0).peak_in_flight[rank]
    m = plan.batch.accumulation
    several = schedule.num_stages > schedule.num_ranks
    text = "What stays in memory: at the fullest moment the activations of "
    text += (
        f"{peak} of the {m} micro-batches, "
        if not several
        else f"{_count(peak, 'chunk')} (a micro-batch in one stage), "
    )
    text += "each from its forward to its backward."
    if any(a.kind is ActionKind.WEIGHT_GRAD for a in schedule.rows[rank]):
        text += " Some backwards are in two halves: the gradient that the stage before waits for, then the weights'."
    if plan.layout.pp > 1:
        text += f" The schedule is {plan.layout.schedule}."
        row = schedule.rows[rank]
        ahead = next(i for i, a in enumerate(row) if a.kind is not ActionKind.FORWARD)
        if plan.layout.schedule == "1f1b":
            text += (
                f" You run {_count(ahead, 'forward')} before your first backward, because its gradient "
                "has to come back from the last stage."
                if rank < schedule.num_ranks - 1
                else " You are the last stage, so each backward follows its own forward at once."
            )
    if plan.layout.zero == 2:
        text += " Gradients are reduced after each micro-batch, so you only keep your shard of their sum."
    if plan.layout.zero == 1:
        text += " Gradients are summed whole on this rank, and reduced once."
    return _wrap(text)


def _sends(plan: Plan, collectives: Sequence[Collective], data: float) -> str:
    if plan.world_size == 1:
        return ""
    pipeline = sum(c.volume_bytes for c in collectives if c.axis == "pp")
    total = sum(c.volume_bytes for c in collectives)
    parts: list[str] = []
    if data:
        parts.append(f"{format_bytes(data)} for data parallelism")
    if pipeline:
        parts.append(f"{format_bytes(pipeline)} to pipeline neighbours")
    tensor = sum(c.volume_bytes for c in collectives if c.axis == "tp")
    if tensor:
        parts.append(f"{format_bytes(tensor)} within the tensor group")
    context = sum(c.volume_bytes for c in collectives if c.axis == "cp")
    if context:
        parts.append(f"{format_bytes(context)} within the context group")
    experts = sum(c.volume_bytes for c in collectives if c.axis == EP)
    if experts:
        parts.append(f"{format_bytes(experts)} of tokens to and from experts (routed evenly)")
    rest = total - data - pipeline - tensor - context - experts
    parts.append(
        f"{format_bytes(rest)} of sums over the world" + (" and the tied pair" if rest > 1e3 else "")
    )
    return _wrap(f"In all you send {format_bytes(total)} per step with ring algorithms: {', '.join(parts)}.")
