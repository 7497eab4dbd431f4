"""What each rank of a probe measures: compute, memory, overheads and collectives.

Ranks of one machine may have to share cores. A single short operation then is either undisturbed or waits for a
whole time slice, and the median of such times says nothing about a step. So compute is measured as a count over a
window in which all ranks work, in wall and in processor seconds; and a collective between pieces of compute, as it
stands in a step: in a tight loop its threads stay awake and its ranks in step, and it takes a half of that time.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from meshwright.base.units import KIB, MIB, format_bytes
from meshwright.cost.pieces import block_operations
from meshwright.mesh.env import RankFacts
from meshwright.model.read_hf import spec_from_config
from meshwright.parallel.products import use_products
from meshwright.probe.block import TINY, Timing, launches, scaled
from meshwright.probe.groups import in_groups
from meshwright.probe.place import references, small_costs
from meshwright.probe.topology import gpu_topology, memory_bytes, node_name

Points = list[tuple[int, float, float]]
"""Bytes, wall seconds of the slowest rank, and processor seconds of one rank (the mean over the group)."""
SETS_BYTES = 32 * MIB
MOST_SETS = 256
"""Operands are taken in turn from sets of this size in all, and of at most this number."""
BETWEEN = ((128, 128, 128), 8)
"""The compute between two collectives: a product's shape, and how many of them (some tenths of a millisecond)."""
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Request:
    """How much to measure, on ranks of ``device`` ("cpu" or "cuda").

    ``show`` takes progress lines where the rank is this process, else they are printed.
    """

    quick: bool
    device: str = "cpu"
    show: Callable[[str], None] | None = None

    @property
    def window_s(self) -> float:
        """Seconds of one compute measurement; several time slices of the operating system."""
        return 0.04 if self.quick else 0.2

    @property
    def windows(self) -> int:
        """Windows per measurement; their median counts."""
        return 2 if self.quick else 3

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of the collectives, ascending."""
        if self.quick:
            return (KIB, 16 * KIB, 128 * KIB, MIB, 4 * MIB)
        return (KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)

    @property
    def link_budget_s(self) -> float:
        """Seconds that one collective on one group may take; a full probe leaves larger sizes out after that."""
        return 0.4 if self.quick else 1.5

    @property
    def place_budget_s(self) -> float:
        """Seconds that one comparison of what is measured in its place may take."""
        return 0.4 if self.quick else 1.0

    @property
    def matmul_shapes(self) -> tuple[tuple[int, int, int], ...]:
        """(m tokens, k, n) of the projections of blocks: small to medium ones on a CPU, 0.5B to 70B on a GPU."""
        if self.device == "cuda":
            small = ((512, 1024, 1024), (2048, 2048, 2048), (4096, 2048, 8192), (8192, 4096, 4096))
            large = (
                (8192, 8192, 2048),
                (8192, 4096, 14336),
                (8192, 14336, 4096),
                (16384, 8192, 8192),
                (4096, 4096, 65536),
            )
            return small if self.quick else (*small, *large)
        shapes = (
            (128, 64, 64),
            (256, 64, 256),
            (512, 128, 512),
            (512, 256, 1024),
            (512, 256, 8192),
            (1024, 512, 2048),
        )
        return shapes if self.quick else (*shapes, (1024, 1024, 1024), (2048, 1024, 4096), (2048, 4096, 1024))

    @property
    def copied_bytes(self) -> int:
        """Bytes of one operand of the memory measurement: beyond every cache of the device."""
        if self.device == "cuda":
            return (256 if self.quick else 1024) * MIB
        return (4 if self.quick else 16) * MIB

    @property
    def updated_elements(self) -> int:
        """Elements of each of two tensors that the optimizer measurement updates."""
        if self.device == "cuda":
            return (16 if self.quick else 64) * MIB
        return (1 if self.quick else 4) * MIB

    @property
    def products(self) -> tuple[tuple[int, int, int], ...]:
        """(m, k, n) of each product that is timed: a linear layer's forward, its input's and its weight's gradient."""
        return tuple(p for m, k, n in self.matmul_shapes for p in ((m, k, n), (m, n, k), (n, m, k)))

    @property
    def attention_shapes(self) -> tuple[tuple[int, int, int, int], ...]:
        """(batch, heads, seq, head_dim)."""
        if self.device == "cuda":
            usual = ((4, 16, 2048, 64), (1, 32, 4096, 128))
            return usual if self.quick else (*usual, (4, 32, 2048, 128), (1, 32, 16384, 128))
        shapes = ((2, 4, 128, 16), (2, 4, 256, 64))
        return shapes if self.quick else (*shapes, (1, 8, 1024, 64))


class _Probe:
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
        return torch.rand(*shape, device=self.device).to(dtype)

    # compute

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

    def in_turn(
        self, num_bytes: int, make: Callable[[], tuple[torch.Tensor, ...]]
    ) -> Callable[[], tuple[torch.Tensor, ...]]:
        """Return what gives one set of operands after another, as a step does: the last one's are not in the caches."""
        sets = [make() for _ in range(max(1, min(MOST_SETS, SETS_BYTES // num_bytes)))]
        return itertools.cycle(sets).__next__

    def matmul(self) -> list[Timing]:
        """Return seconds of ``Request.products`` in each precision: of a linear layer forward, and of its gradients."""
        times: list[Timing] = []
        for dtype in _DTYPES.values():
            for m, k, n in self.request.matmul_shapes:

                def make(
                    m: int = m, k: int = k, n: int = n, dtype: torch.dtype = dtype
                ) -> tuple[torch.Tensor, ...]:
                    return tuple(self.empty(*shape, dtype=dtype) for shape in ((m, k), (n, k), (m, n)))

                size = (m * k + n * k + m * n) * (4 if dtype == torch.float32 else 2)
                turn = self.in_turn(size, make)

                def ahead(turn: Callable[[], tuple[torch.Tensor, ...]] = turn) -> torch.Tensor:
                    x, w, _ = turn()
                    return F.linear(x, w)

                def to_input(turn: Callable[[], tuple[torch.Tensor, ...]] = turn) -> torch.Tensor:
                    _, w, grad = turn()
                    return grad @ w

                def to_weight(turn: Callable[[], tuple[torch.Tensor, ...]] = turn) -> torch.Tensor:
                    x, _, grad = turn()
                    return grad.T @ x

                times += [self.rate(ahead), self.rate(to_input), self.rate(to_weight)]
        return times

    def attention(self) -> list[tuple[Timing, Timing]]:
        """Return forward and backward seconds of causal attention for each shape in each precision."""
        times: list[tuple[Timing, Timing]] = []
        for dtype in _DTYPES.values():
            for batch, heads, seq, head_dim in self.request.attention_shapes:

                def make(
                    shape: Any = (batch, seq, heads, head_dim), dtype: Any = dtype
                ) -> tuple[torch.Tensor, ...]:
                    # as a model has them: heads taken out of the hidden dimension
                    q, k, v = (
                        self.empty(*shape, dtype=dtype).transpose(1, 2).requires_grad_() for _ in range(3)
                    )
                    return q, k, v, self.empty(*shape, dtype=dtype).transpose(1, 2)

                size = 4 * batch * heads * seq * head_dim * (4 if dtype == torch.float32 else 2)
                turn = self.in_turn(size, make)

                def ahead(turn: Any = turn) -> tuple[torch.Tensor, ...]:
                    q, k, v, grad = turn()
                    return F.scaled_dot_product_attention(q, k, v, is_causal=True), q, k, v, grad

                def behind(made: tuple[torch.Tensor, ...]) -> Any:
                    out, q, k, v, grad = made
                    return torch.autograd.grad(out, (q, k, v), grad)

                times.append(self.paired_rate(ahead, behind))
        return times

    def memory(self) -> tuple[Timing, Timing]:
        """Return seconds per byte (read + written) of a copy, and of an elementwise operation that allocates."""
        count = self.request.copied_bytes // 4
        source, target = self.empty(count), self.empty(count)
        copy_s = self.rate(lambda: target.copy_(source))
        elementwise_s = self.rate(lambda: source * 2.0)
        return scaled(copy_s, 1 / (8 * count)), scaled(elementwise_s, 1 / (8 * count))

    def overhead(self) -> tuple[Timing, Timing]:
        """Return seconds of one small operation of a decoder block's forward, and of one node of its backward."""
        return launches(self.paired_rate, self.device)

    def in_place(self, op_s: Timing) -> dict[str, Any]:
        """Return what blocks, recompute, regions and sharded units take in their place (see ``probe.place``)."""
        budget_s = self.request.place_budget_s
        spec = spec_from_config(TINY, "tiny", "")
        operations = block_operations(spec, spec.blocks[0])[0]
        whole = references(self, budget_s)
        small = small_costs(self, op_s, operations, budget_s)
        units, tensors = in_groups(self, budget_s)
        return {"references": whole, **small, "sharding": units, "tensor": tensors}

    def optimizer(self) -> tuple[Timing, Timing]:
        """Return fused AdamW's seconds per byte of master, both moments and gradient, and its seconds per tensor."""

        def step_s(num_tensors: int, numel: int) -> Timing:
            tensors = [torch.nn.Parameter(self.empty(numel)) for _ in range(num_tensors)]
            for tensor in tensors:
                tensor.grad = torch.ones_like(tensor)
            return self.rate(torch.optim.AdamW(tensors, lr=1e-6, fused=True).step)

        small_s = scaled(step_s(64, 64), 1 / 64)
        numel = self.request.updated_elements
        large_s = step_s(2, numel)
        rest = [max(a - 2 * b, 1e-9) / (2 * numel * 16) for a, b in zip(large_s, small_s, strict=True)]
        return (rest[0], rest[1]), small_s

    # collectives

    def agree(self, value: float) -> float:
        """Return the greatest value over all ranks."""
        if self.facts.world_size == 1:
            return value
        tensor = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor.item()

    def between(self) -> Callable[[], Any]:
        """Return the compute that stands between two collectives."""
        (m, k, n), count = BETWEEN
        a, b = self.empty(m, k), self.empty(k, n)

        def work() -> None:
            for _ in range(count):
                torch.mm(a, b)

        return work

    def collective(
        self, make: Callable[[int], tuple[int, Callable[[], Any]] | None], group: Any, halves: int
    ) -> Points:
        """Return (bytes, wall seconds, processor seconds) at each size, between pieces of compute.

        ``make(bytes)`` gives the real size and the operation (None for a rank that only keeps step). Each repeat is a
        loop of compute alone, then one of compute and collective, on the slowest rank of the group. Reported is the
        difference of their lower quartiles, since other programs only ever make a repeat longer; of processor seconds
        the difference of their means, which a step of many calls pays. All ranks agree on the numbers of calls;
        ``halves`` is the number of messages one call stands for.
        """
        points: Points = []
        work = self.between()
        begin = time.perf_counter()
        for size in self.request.sizes:
            made = make(size)
            self.barrier()
            if made:
                made[1]()
                self.sync()
            self.barrier()
            t0 = time.perf_counter()
            work()
            if made:
                made[1]()
                self.sync()
            first_s = self.agree(time.perf_counter() - t0)
            inner = max(1, min(8, int(0.006 / first_s)))
            repeats = max(5, min(9, int(self.request.link_budget_s / 6 / (inner * first_s))))
            alone: list[Timing] = []
            joined: list[Timing] = []
            for _ in range(repeats):
                alone.append(self.loop(work, None, inner))
                joined.append(self.loop(work, made[1] if made else None, inner))
            if made:
                figures = torch.tensor(
                    [*alone, *joined], dtype=torch.float64, device=self.device
                ).T.contiguous()
                wall, used = figures[0].clone(), figures[1].clone()
                dist.all_reduce(wall, op=dist.ReduceOp.MAX, group=group)
                dist.all_reduce(used, group=group)
                slowest, spent = [
                    max(typical(x[repeats:].tolist()) - typical(x[:repeats].tolist()), 1e-6)
                    for x, typical in ((wall, undisturbed), (used / group_size(group), statistics.fmean))
                ]
                points.append((made[0], slowest / halves, spent / halves))
            spent_s = self.agree(time.perf_counter() - begin)
            if not self.request.quick and spent_s > self.request.link_budget_s:
                break
        return points

    def loop(self, work: Callable[[], Any], then: Callable[[], Any] | None, count: int) -> Timing:
        """Return this rank's seconds per round of ``work`` and, if given, ``then``."""
        self.barrier()
        t0, c0 = time.perf_counter(), time.process_time()
        for _ in range(count):
            work()
            if then is not None:
                then()
        self.sync()
        return (time.perf_counter() - t0) / count, (time.process_time() - c0) / count

    def links(self) -> list[tuple[list[int], str, Points]]:
        """Return, of the groups that this rank belongs to, each collective's points."""
        world, rank = self.facts.world_size, self.facts.rank
        found: list[tuple[list[int], str, Points]] = []
        size = 2
        sizes: list[int] = []
        while size < world:
            sizes.append(size)
            size *= 2
        for size in [*sizes, world]:
            groups = [list(range(i, i + size)) for i in range(0, world - size + 1, size)]
            handles = [dist.new_group(g) if size < world else dist.group.WORLD for g in groups]
            mine = next((i for i, g in enumerate(groups) if rank in g), None)
            ranks = groups[mine] if mine is not None else []
            group = handles[mine] if mine is not None else None
            kinds = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]
            if size == 2:
                kinds.append("send_recv")
            for kind in kinds:
                self.say(f"{kind} in groups of {size}")
                points = self.collective(
                    lambda num_bytes, kind=kind, ranks=ranks, group=group: self.operation(
                        kind, num_bytes, ranks, group
                    ),
                    group,
                    halves=2 if kind == "send_recv" else 1,
                )
                if ranks:
                    found.append((ranks, kind, points))
        return found

    def operation(
        self, kind: str, num_bytes: int, ranks: Sequence[int], group: Any
    ) -> tuple[int, Callable[[], Any]] | None:
        """Return the real bytes (see ``Collective.num_bytes``) and the call of one collective on this rank."""
        n = len(ranks)
        if n == 0:
            return None
        part = max(1, num_bytes // 4 // n)
        whole = self.empty(part * n)
        piece = self.empty(part)
        size = part * n * 4
        if kind == "all_reduce":
            return size, lambda: dist.all_reduce(whole, group=group)
        if kind == "all_gather":
            return size, lambda: dist.all_gather_into_tensor(whole, piece, group=group)
        if kind == "reduce_scatter":
            return size, lambda: dist.reduce_scatter_tensor(piece, whole, group=group)
        if kind == "all_to_all":
            out = self.empty(part * n)
            return size, lambda: dist.all_to_all_single(out, whole, group=group)
        if kind == "broadcast":
            return size, lambda: dist.broadcast(whole, src=ranks[0], group=group)
        first = self.facts.rank == ranks[0]
        return size, lambda: self.there_and_back(whole, first, ranks[1] if first else ranks[0])

    def there_and_back(self, tensor: torch.Tensor, first: bool, peer: int) -> None:
        """Send the tensor to the peer and receive it back, or the other way round."""
        if first:
            dist.send(tensor, peer)
            dist.recv(tensor, peer)
        else:
            dist.recv(tensor, peer)
            dist.send(tensor, peer)

    def pairs(self) -> dict[tuple[int, int], float]:
        """Return bytes/s of one message between each two ranks, while the others wait; {} for more than 64 ranks."""
        world, rank = self.facts.world_size, self.facts.rank
        rates: dict[tuple[int, int], float] = {}
        if world > 64:
            return rates
        num_bytes = MIB if self.request.quick else 4 * MIB
        tensor = self.empty(num_bytes // 4)
        for a in range(world):
            for b in range(a + 1, world):
                self.barrier()
                if rank in (a, b):
                    peer = b if rank == a else a
                    times: list[float] = []
                    for _ in range(4):
                        t0 = time.perf_counter()
                        self.there_and_back(tensor, rank == a, peer)
                        self.sync()
                        times.append((time.perf_counter() - t0) / 2)
                    if rank == a:
                        rates[a, b] = num_bytes / min(times[1:])
        return rates


def middle(times: Sequence[Timing]) -> Timing:
    """Return the medians."""
    return statistics.median(t[0] for t in times), statistics.median(t[1] for t in times)


def undisturbed(values: Sequence[float]) -> float:
    """Return the lower quartile."""
    return statistics.quantiles(values, n=4, method="inclusive")[0]


def group_size(group: Any) -> int:
    """Return the number of ranks of a process group."""
    return dist.get_world_size(group)


def measure(facts: RankFacts, request: Request) -> list[dict[str, Any]]:
    """Return what every rank measured, by rank (the same list on each rank).

    Communication: every collective that is measured, barriers, and one all_gather of the findings on "world".
    """
    if request.quick:
        torch.manual_seed(0)
    probe = _Probe(facts, request)
    probe.say(f"{facts.world_size} ranks on {probe.device.type}, {facts.backend}")
    total, available = memory_bytes()
    name, topology = "cpu", None
    if probe.device.type == "cuda":
        available, total = torch.cuda.mem_get_info(probe.device)
        name = torch.cuda.get_device_name(probe.device)
        found = gpu_topology() if facts.local_rank == 0 else None
        topology = found.as_dict() if found else None
    held = use_products("machine", probe.device.type)  # as a run has them
    probe.say("matmul, fp32 and bf16")
    matmul = probe.matmul()
    probe.say("attention")
    attention = probe.attention()
    probe.say("memory, overheads, optimizer")
    copy, elementwise = probe.memory()
    op_s, backward_op_s = probe.overhead()
    optimizer_byte_s, optimizer_tensor_s = probe.optimizer()
    in_place: dict[str, Any] | None = None
    if probe.device.type == "cpu":
        probe.say("blocks, hooks and sharded units in their place")
        in_place = probe.in_place(op_s)
    links: list[tuple[list[int], str, Points]] = []
    pairs: dict[tuple[int, int], float] = {}
    if facts.world_size > 1:
        links = probe.links()
        probe.say(f"each pair, {format_bytes(MIB if request.quick else 4 * MIB)}")
        pairs = probe.pairs()
    mine = {
        "host": node_name(),
        "device": name,
        "total_bytes": total,
        "available_bytes": available,
        "topology": topology,
        "matmul": matmul,
        "attention": attention,
        "threads": torch.get_num_threads(),
        "copy_byte_s": copy,
        "elementwise_byte_s": elementwise,
        "op_s": op_s,
        "backward_op_s": backward_op_s,
        "optimizer_byte_s": optimizer_byte_s,
        "optimizer_tensor_s": optimizer_tensor_s,
        "in_place": in_place,
        "links": links,
        "pairs": pairs,
    }
    everything: list[Any] = [mine]
    if facts.world_size > 1:
        everything = [None] * facts.world_size
        dist.all_gather_object(everything, mine)
    if held is not None:
        held.close()
    probe.say("done")
    return everything
