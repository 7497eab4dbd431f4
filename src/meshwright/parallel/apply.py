"""The one fixed order in which a plan becomes a running model on one rank.

build -> adapters -> freeze -> attention over the context axis -> cut the stages -> pack a base in 4 bits -> cut by the
tensor axis -> spread the experts -> move -> compile -> recompute -> data parallel (replicate or ZeRO) -> pipeline ->
tied pair. Where a rank holds a part of the model, "build" describes large parameters and the cuts make them, one unit at
a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

from meshwright.base.axes import TIED
from meshwright.base.errors import MeshwrightError, problem
from meshwright.layout.context import local_length
from meshwright.layout.layout import Layout
from meshwright.layout.precision import PrecisionTable, precision_table
from meshwright.layout.ranks import EXPERT_REPLICATE, group
from meshwright.mesh.device_mesh import MeshView
from meshwright.model.randomness import draws_alike, drops_probabilities
from meshwright.model.sharding import tp_copies
from meshwright.model.spec import ModelSpec
from meshwright.parallel.adapters import add_adapters
from meshwright.parallel.away import Away
from meshwright.parallel.away_shards import ShardHomes
from meshwright.parallel.build import build_model, frozen_names
from meshwright.parallel.compiled import compile_blocks
from meshwright.parallel.context import NAME as CONTEXT_ATTENTION
from meshwright.parallel.context import ContextAxis, local_batch, use_context
from meshwright.parallel.deferred import Deferred, deferring
from meshwright.parallel.dropout import NAME as DROPOUT_ATTENTION
from meshwright.parallel.dropout import Dropout, place_on_axes, use_dropout
from meshwright.parallel.expert import ExpertAxis, expert_axis, shard_experts, stage_experts
from meshwright.parallel.halves import Halves
from meshwright.parallel.loss import IGNORE, chunked_loss_sum
from meshwright.parallel.offload import FileStore, HostStore, home_store, parameters_away, pinned
from meshwright.parallel.pipeline import Pipeline
from meshwright.parallel.precision import Float64Throughout, dtype_of, forward_context
from meshwright.parallel.products import Products, use_products
from meshwright.parallel.quantised import Packed, pack, packed_matrices
from meshwright.parallel.recompute import nested, recompute_blocks
from meshwright.parallel.replicate import Replicate
from meshwright.parallel.router_loss import RouterLoss
from meshwright.parallel.stage import StageModule, at_positions, cut_stages, get_module, logical_name
from meshwright.parallel.tensor import TensorAxis, joined, shard_tensors
from meshwright.parallel.tied import local, sum_local_pair, sum_tied_gradient
from meshwright.parallel.zero import Zero, shard
from meshwright.program.plan import Plan
from meshwright.program.router import has_router_term
from meshwright.program.units import leading_frozen
from meshwright.schedule.actions import ActionKind, Schedule
from meshwright.schedule.text import parse_schedule


def _multiply(tensors: list[Tensor], factor: float) -> None:
    """Multiply all tensors in place (one call for all of them: a private name of torch, see ``mesh.contract``)."""
    torch._foreach_mul_(tensors, factor)  # pyright: ignore[reportPrivateImportUsage]


NORM_ROW = 1024
"""Elements whose squares are summed in the gradients' own dtype: a CPU sums one by one, which a float32 sum of
8,000,000 squares pays with 2e-4 of its value; rows of this length are as fast and right to about 1e-8."""


def _square_sum(tensors: list[Tensor]) -> Tensor:
    """Return the sum of squares of all elements, float64: norms of rows in their own dtype, their sum in float64."""
    rows: list[Tensor] = []
    rest: list[Tensor] = []
    for tensor in tensors:
        flat = tensor.reshape(-1)
        whole = flat.numel() // NORM_ROW * NORM_ROW
        if whole:
            rows.append(torch.linalg.vector_norm(flat[:whole].view(-1, NORM_ROW), dim=1))
        if whole < flat.numel():
            rest.append(flat[whole:])
    if rest:
        rows.append(torch.stack(torch._foreach_norm(rest)))  # pyright: ignore[reportPrivateImportUsage]
    return torch.stack([r.to(torch.float64).square().sum() for r in rows]).sum()


def _silent(_: str) -> None:
    """Report nothing."""


Place = tuple[tuple[int, ...], int, tuple[tuple[int, int], ...]]
"""Logical shape, the dim that is cut, and (start, size) along it of each part that a rank holds."""


@dataclass
class ParallelModel:
    """A model cut by a plan, on one rank: forward and backward of a step, and the gradients it leaves.

    Attributes:
        stages: this rank's stages by index; ``module`` holds them all (it is the stage when there is one).
        engines: the data parallelism of each stage.
        stage_of: the stage of each parameter and packed matrix.
        params: this rank's parameters by logical (Hugging Face) name.
        owned: names whose elements this rank counts in sums over logical parameters (each element has one owner).
        decays: names that weight decay applies to: matrices, by their logical shape.
        tied_weight: this end of a tied embedding whose other end is on another rank.
        tied_pair: both ends of one whose two stages are on this rank.
        products: who multiplies this process's matrices while the model lives; None is torch's own library.
        packed: this rank's matrices of a base in 4 bits by logical name.
    """

    spec: ModelSpec
    plan: Plan
    view: MeshView
    table: PrecisionTable
    module: nn.Module
    stages: dict[int, StageModule]
    engines: dict[int, Replicate | Zero]
    stage_of: dict[str, int]
    pipeline: Pipeline | None
    params: dict[str, nn.Parameter]
    owned: frozenset[str]
    decays: frozenset[str]
    tied_weight: nn.Parameter | None = None
    tensor: TensorAxis | None = None
    dropout: Dropout | None = None
    context: ContextAxis | None = None
    tied_pair: tuple[nn.Parameter, nn.Parameter] | None = None
    experts: ExpertAxis | None = None
    products: Products | None = None
    packed: Mapping[str, Packed] = field(default_factory=dict[str, Packed])
    on_action: Callable[[str], None] = field(default=_silent)
    executed: list[str] = field(default_factory=list[str])

    @property
    def is_last(self) -> bool:
        """Whether this rank computes the loss."""
        return any(stage.is_last for stage in self.stages.values())

    def placeable(self) -> dict[str, Tensor]:
        """Return this rank's parameters and what it holds packed, by logical name.

        A packed matrix that every rank holds whole is a shape without values, one that they share a row of bytes.
        """
        shapes = {
            n: torch.empty(p.shape, device="meta") if p.row is None else p.row for n, p in self.packed.items()
        }
        return {**self.params, **shapes}

    def begin_step(self, step: int, rows_AB: Tensor) -> None:
        """Say which update comes and which rows of the global batch, [accumulation, B], this rank's micro-batches are.

        Dropout masks follow from them.
        """
        if self.dropout is not None:
            self.dropout.start(step, rows_AB)

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return this rank's trainable parameters by logical name."""
        return {n: p for n, p in self.params.items() if p.requires_grad}

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for engine in self.engines.values():
            engine.zero_grad()

    def forward_backward(
        self, inputs_ABT: Tensor, labels_ABT: Tensor, scale: float, positions_ABT: Tensor | None = None
    ) -> Tensor:
        """Run every micro-batch forward and backward; return the sum of token losses seen by this rank.

        Every rank of a context axis is given whole sequences, and takes its own tokens of them.

        Args:
            inputs_ABT: token ids, [accumulation, micro_batch, T].
            labels_ABT: shifted labels, [accumulation, micro_batch, T], -100 where no loss.
            scale: factor on the summed loss, 1 / global valid tokens (times the fp16 loss scale).
            positions_ABT: positions that begin again with each packed document, or None: rows are one document.

        Communication: activations over ``pp``; keys and values over ``cp``; parameters and gradients over ``dp_*``
        as the policy says.
        """
        inputs_ABT, labels_ABT = local_batch(self.context, inputs_ABT, labels_ABT, IGNORE)
        if self.pipeline is not None:
            sums = self.pipeline.run(inputs_ABT, labels_ABT, scale, positions_ABT)
            self.executed = list(self.pipeline.executed)
        else:
            sums = self._accumulate(inputs_ABT, labels_ABT, scale, positions_ABT)
        return self._total(sums)

    def part(self, name: str, full: Tensor) -> Tensor:
        """Return what this rank's place on the tensor and expert axes holds of the logical tensor ``name``."""
        if self.experts is not None:
            full = self.experts.part(name, full)
        return full if self.tensor is None else self.tensor.part(name, full)

    def place_of(self, name: str) -> tuple[Place, int] | None:
        """Return the part held here - logical shape, dim, (start, size) of each piece - and its first row, or None.

        The row is where the part begins in the logical tensor when another dim than the first is cut too.
        """
        rows = self.experts.place_of(name) if self.experts is not None else None
        place = self.tensor.place_of(name) if self.tensor is not None else None
        if place is None:
            return None if rows is None else (rows, 0)
        return place, 0 if rows is None else rows[2][0][0]

    def _total(self, sums: list[Tensor]) -> Tensor:
        if not sums or self.view.coords["tp"] != 0:  # every rank of a tensor axis has the same sum
            return torch.zeros((), dtype=torch.float64, device=self.view.device)
        return torch.stack([s.to(torch.float64) for s in sums]).sum()

    def _accumulate(
        self, inputs_ABT: Tensor, labels_ABT: Tensor, scale: float, positions_ABT: Tensor | None
    ) -> list[Tensor]:
        sums: list[Tensor] = []
        self.executed = []
        last = inputs_ABT.shape[0] - 1
        module, data = self.stages[0], self.engines[0]
        for k, (x_BT, y_BT) in enumerate(zip(inputs_ABT, labels_ABT, strict=True)):
            self._note(f"0F{k}")
            if self.dropout is not None:
                self.dropout.micro_batch(k)
            loss_sum = module(x_BT, labels=y_BT, **at_positions(positions_ABT, k))
            sums.append(loss_sum.detach())
            self._note(f"0B{k}")
            data.before_backward(last=k == last)
            (loss_sum * scale).backward()
        return sums

    def _note(self, action: str) -> None:
        self.executed.append(action)
        self.on_action(action)

    def finish_gradients(self) -> None:
        """Complete the step's gradients: data parallelism, then the tensor axis, then the tied pair."""
        for engine in self.engines.values():
            engine.finish()
        if self.tensor is not None:
            self.tensor.sum_gradients(self.params)
        if self.tied_pair is not None and self.tied_pair[0].requires_grad:
            sum_local_pair(*self.tied_pair)
        if self.tied_weight is not None and self.tied_weight.requires_grad:
            sum_tied_gradient(self.tied_weight, self.view.groups[TIED], self.view.device)

    def gradients(self) -> dict[str, Tensor]:
        """Return this rank's gradients (shards as DTensors) by logical name; missing ones are left out."""
        return {n: p.grad for n, p in self.trainable().items() if p.grad is not None}

    def without_gradient(self) -> list[str]:
        """Return the names of trainable parameters that the last step's backwards did not reach on this rank."""
        reached: set[int] = set()
        for engine in self.engines.values():
            if isinstance(engine, Replicate):  # its gradients always exist, as views of a buffer
                reached |= engine.reached
            else:
                reached |= {id(p) for p in self.params.values() if p.grad is not None}
        return [n for n, p in self.trainable().items() if id(p) not in reached]

    def square_sums(self) -> tuple[Tensor, Tensor]:
        """Return the sums of squares of the gradient elements that this rank owns, and of all that it holds.

        The second is for what every rank must agree on (a value that is not finite, on whichever replica). Both are
        float64 scalars.
        """
        held = self._square_sum(self._flat_gradients())
        if not self.owned:
            return torch.zeros_like(held), held
        if set(self.trainable()) <= self.owned:
            return held, held
        return self._square_sum([local(g) for n, g in self.gradients().items() if n in self.owned]), held

    def _flat_gradients(self) -> list[Tensor]:
        """Return all gradients of this rank in as few tensors as there are: buffers of units, or shards."""
        flat = [g for e in self.engines.values() if isinstance(e, Replicate) for g in e.flat_gradients()]
        return flat or [local(g) for g in self.gradients().values()]

    def _square_sum(self, grads: list[Tensor]) -> Tensor:
        grads = [g for g in grads if g.numel()]
        if not grads:
            return torch.zeros((), dtype=torch.float64, device=self.view.device)
        return _square_sum(grads).to(self.view.device)

    def scale_gradients(self, factor: float) -> None:
        """Multiply every gradient of this rank by ``factor`` in place."""
        grads = self._flat_gradients()
        if grads:
            _multiply(grads, factor)

    @torch.no_grad()
    def evaluate(self, inputs_ABT: Tensor, labels_ABT: Tensor, positions_ABT: Tensor | None = None) -> Tensor:
        """Return the sum of token losses (float64; 0 on stages without the loss), without gradients."""
        self.module.eval()
        inputs_ABT, labels_ABT = local_batch(self.context, inputs_ABT, labels_ABT, IGNORE)
        if self.pipeline is not None:
            sums = self.pipeline.evaluate(inputs_ABT, labels_ABT, positions_ABT)
        else:
            sums = [
                self.stages[0](x, labels=y, **at_positions(positions_ABT, k))
                for k, (x, y) in enumerate(zip(inputs_ABT, labels_ABT, strict=True))
            ]
        self.module.train()
        for engine in self.engines.values():
            if isinstance(engine, Zero):
                engine.reshard()
            elif isinstance(engine, Away):
                engine.rest()
        return self._total(sums)

    def away(self) -> list[Tensor]:
        """Return the tensors of parameters and gradients that rest away from the device."""
        homes = [away_homes(engine) for engine in self.engines.values()]
        return [t for home in homes if home is not None for t in home.homes()]

    def put_away(self, names: Sequence[str] | None = None) -> None:
        """Take the parameters that rest away as they are now (all, or ``names``), after an update or a load."""
        for engine in self.engines.values():
            home = away_homes(engine)
            if home is not None:
                home.seal(names)

    def verify_away(self) -> None:
        """Hold the parameters that rest in files against their checksums. Raises MeshwrightError E277."""
        for engine in self.engines.values():
            home = away_homes(engine)
            if home is not None:
                home.verify()

    def close(self) -> None:
        """Remove what rests in files and give torch its own matrix products back; no step can follow."""
        if self.products is not None:
            self.products.close()
            self.products = None
        for engine in self.engines.values():
            home = away_homes(engine)
            if home is not None:
                home.close()


def apply_plan(
    plan: Plan,
    spec: ModelSpec,
    view: MeshView,
    *,
    seed: int,
    weights: Mapping[str, Tensor] | None = None,
    on_action: Callable[[str], None] = _silent,
    compile_backend: str = "inductor",
    offload_dir: Path | None = None,
    matmul: str = "machine",
    played: Deferred | None = None,
) -> ParallelModel:
    """Return this rank's part of the model of ``plan``, ready to train. Every rank of the mesh calls it.

    ``compile_backend`` is what ``compile=blocks`` compiles with; parameters that rest in files are in ``offload_dir``.
    ``matmul`` is who multiplies matrices on a CPU (``parallel.products``): "machine" or "torch".
    ``played`` makes the parameters in place of the usual ways (whole, or part by part): for a rank that is only played,
    without values.

    Raises:
        MeshwrightError: E278 for a folder without room, E546 when a stage has nothing to train, E811, E812.
    """
    layout = plan.layout
    table = precision_table(layout)
    storage = dtype_of(table.storage)
    building = deferring(holds_a_part(layout, spec)) if played is None else nullcontext(played)
    with building as pending:
        causal_lm = build_model(
            plan.model_config,
            seed=seed,
            dtype=storage,
            weights=weights,
            pending=pending,
            device=pending.device,
        )
    if spec.adapter is not None:
        add_adapters(causal_lm, spec, seed)
    frozen = frozen_names(spec, plan.frozen)
    for name, p in causal_lm.named_parameters():
        p.requires_grad_(logical_name(name) not in frozen)
    dropout = _dropout(causal_lm, spec, seed)
    context = use_context(causal_lm, spec, view, plan.batch.seq_len) if layout.cp > 1 else None
    if dropout is not None:
        held = torch.arange(plan.batch.seq_len) if context is None else context.positions
        place_on_axes(dropout, view, spec.attention.num_heads, held)
    schedule = parse_schedule(plan.schedule_text, name=layout.schedule)
    mine = [s for s, r in enumerate(schedule.stage_ranks) if r == view.pp_rank]
    with pending.noting():
        stages = cut_stages(causal_lm, spec, layout.cut_layers, mine, dtype_of(table.wire))
    del causal_lm
    shapes: dict[str, tuple[int, ...]] = {}
    engines: dict[int, Replicate | Zero] = {}
    params: dict[str, nn.Parameter] = {}
    stage_of: dict[str, int] = {}
    packed: dict[str, Packed] = {}
    axes: list[TensorAxis] = []
    split = {a.stage for a in schedule.rows[view.pp_rank] if a.kind is ActionKind.WEIGHT_GRAD}
    recomputed = {s: Halves() for s in mine if s in split and layout.recompute != "none"}

    def again_in() -> AbstractContextManager[Any]:
        """Return what a recomputed forward needs again; asked for while the first forward runs."""
        contexts: list[AbstractContextManager[Any]] = [] if dropout is None else [dropout.held()]
        return nested(*contexts, *([Float64Throughout()] if table.compute == "fp64" else []))

    experts = expert_axis(spec, view) if layout.ep > 1 else None
    for index, stage in stages.items():
        stage.forward_context = lambda: forward_context(table, view.device.type)
        if context is not None:
            stage.told = context.told
        if layout.loss == "chunked":
            halves = any(a.kind is ActionKind.WEIGHT_GRAD for a in schedule.rows[view.pp_rank])
            stage.chunked_loss = partial(chunked_loss_sum, halves=halves, after=stage.after_head)
        if has_router_term(spec):
            stage.router_loss = RouterLoss(
                stage.causal_lm,
                spec,
                seq_len=plan.batch.seq_len,
                dtype=torch.float64 if layout.precision == "fp64" else torch.float32,
                counted=view.coords["tp"] == 0,
                context=context,
            )
        pack(stage, spec)
        if layout.tp > 1:
            with pending.noting():
                axes.append(shard_tensors(stage, spec, view))
        if experts is not None:
            shard_experts(stage, experts)
        if not (pending.active and _sharded(layout)):
            pending.fill(stage, torch.device("cpu") if parameters_away(layout) else view.device)
        shapes |= {logical_name(n): tuple(p.shape) for n, p in stage.named_parameters()}
        if not any(p.requires_grad for p in stage.parameters()):
            raise MeshwrightError(
                problem("E546", where="freeze", found=f"stage {index} has no trainable parameter left")
            )
        if layout.compile == "blocks":
            compile_blocks(stage_blocks(stage, spec), compile_backend, _own_attention(spec, layout))
        recompute_blocks(stage_blocks(stage, spec), layout.recompute, again_in, recomputed.get(index))
        if layout.zero == 3 and _sharded(layout):
            for matrix in packed_matrices(stage).values():
                matrix.share()
        homes = partial(home_store, layout, view, offload_dir, index)
        engine = engines[index] = _data_parallel(stage, spec, view, table, experts, pending, homes)
        leading = leading_frozen(spec, layout, index, plan.frozen)
        if isinstance(engine, Zero) and leading:
            engine.begin_backward_at([*stage_blocks(stage, spec), stage][leading])
        in_four_bits = packed_matrices(stage)
        rows = {id(m.row) for m in in_four_bits.values()}
        held = {logical_name(n): p for n, p in stage.named_parameters() if id(p) not in rows}
        if isinstance(engine, Away):
            held = engine.masters
        params |= held
        packed |= in_four_bits
        stage_of |= dict.fromkeys((*held, *in_four_bits), index)
    decays = frozenset(n for n, shape in shapes.items() if len(shape) >= 2)
    pair = _tied_pair(spec, params)
    model = ParallelModel(
        spec=spec,
        plan=plan,
        view=view,
        table=table,
        module=stages[mine[0]] if len(mine) == 1 else nn.ModuleList(stages.values()),
        stages=stages,
        engines=engines,
        stage_of=stage_of,
        pipeline=None,
        params=params,
        owned=_owned(spec, view, params, experts),
        decays=decays,
        tied_weight=None if pair is not None else _tied_weight(spec, view, params),
        tensor=joined(axes) if axes else None,
        experts=experts,
        context=context,
        tied_pair=pair,
        packed=packed,
        dropout=dropout,
        products=use_products(matmul, view.device.type) if played is None else None,
        on_action=on_action,
    )
    if layout.pp > 1:
        model.pipeline = _pipeline(model, schedule, recomputed)
    return model


def _own_attention(spec: ModelSpec, layout: Layout) -> tuple[str, ...]:
    """Return the name of this program's attention function where the model runs with it."""
    if layout.cp > 1:
        return (CONTEXT_ATTENTION,)
    return (DROPOUT_ATTENTION,) if draws_alike(spec) and drops_probabilities(spec) else ()


def _dropout(causal_lm: nn.Module, spec: ModelSpec, seed: int) -> Dropout | None:
    """Give a whole model masks that do not depend on the layout, where it has dropout."""
    if not draws_alike(spec):
        return None
    dropout = Dropout(seed)
    use_dropout(causal_lm, dropout, attends=drops_probabilities(spec))
    return dropout


def needs_tied_group(plan: Plan, spec: ModelSpec) -> bool:
    """Return whether a tied embedding's two stages lie on two ranks, which then sum its gradient."""
    homes = parse_schedule(plan.schedule_text, name=plan.layout.schedule).stage_ranks
    return spec.tied_embeddings and homes[0] != homes[-1]


def stage_blocks(module: StageModule, spec: ModelSpec) -> list[nn.Module]:
    """Return the repeated blocks that a stage holds."""
    return list(get_module(module.causal_lm, spec.paths.blocks).children())


def unviewed(module: nn.Module, _: Any, out: Tensor) -> Tensor:
    """Return a block's output as a tensor of its own, without a copy: FSDP2 hooks onto it, and not onto views.

    OPT's blocks return a view of a sum that nothing else reads.
    """
    return torch.ops.aten._unsafe_view(out, out.shape) if out._is_view() else out


def holds_a_part(layout: Layout, spec: ModelSpec) -> bool:
    """Return whether a rank of ``layout`` holds less than the whole model, so that it is built part by part.

    Adapters and experts spread over ranks are put into a model that was built whole.
    """
    if spec.adapter is not None or layout.ep > 1:
        return False
    return layout.pp > 1 or layout.tp > 1 or _sharded(layout)


def _sharded(layout: Layout) -> bool:
    return layout.zero >= 1 and layout.shard > 1


def _data_parallel(
    module: StageModule,
    spec: ModelSpec,
    view: MeshView,
    table: PrecisionTable,
    axis: ExpertAxis | None,
    pending: Deferred,
    homes: Callable[[], HostStore | FileStore],
) -> Replicate | Zero:
    layout = view.layout
    blocks = stage_blocks(module, spec)
    mixtures = list(stage_experts(module, axis).values()) if axis is not None else []
    mesh = view.submesh("dp_replicate", "dp_shard")
    if _sharded(layout):
        assert mesh is not None
        if spec.family == "opt":
            for block in blocks:
                block.register_forward_hook(unviewed)
        low = table.gather != table.storage
        away = parameters_away(layout)
        zero = shard(
            module,
            blocks,
            mesh,
            layout.zero,
            param_dtype=dtype_of(table.gather) if low else None,
            reduce_dtype=dtype_of(table.reduce) if low else None,
            experts=mixtures,
            expert_mesh=view.expert_mesh() if mixtures else None,
            prepare=(lambda unit: pending.fill(unit, view.device)) if pending.active else None,
            offload=CPUOffloadPolicy(pin_memory=pinned(layout, view)) if away else None,
        )
        if away:
            zero.homes = ShardHomes(module, zero.param_groups(), homes(), view.device)
        return zero
    if parameters_away(layout):
        names = {logical_name(n): p for n, p in module.named_parameters()}
        whole = view.groups.get("dp_replicate")
        return Away(module, blocks, names, whole, homes(), view.device, mixtures, _same_experts(view))
    in_blocks = {id(p) for b in blocks for p in b.parameters()}
    in_mixtures = {id(p) for m in mixtures for p in m.parameters()}
    units = [("root", [p for p in module.parameters() if p.requires_grad and id(p) not in in_blocks])]
    own: dict[str, dist.ProcessGroup | None] = {}
    for i, block in enumerate(blocks):
        params = [p for p in block.parameters() if p.requires_grad]
        units.append((f"block {i}", [p for p in params if id(p) not in in_mixtures]))
        units.append((f"experts of block {i}", [p for p in params if id(p) in in_mixtures]))
        own[f"experts of block {i}"] = _same_experts(view)
    return Replicate(units, view.groups.get("dp_replicate"), own_groups=own)


def _same_experts(view: MeshView) -> dist.ProcessGroup | None:
    """Return the group of the ranks that hold the same experts, None where each expert is on one rank."""
    same = view.groups.get(EXPERT_REPLICATE)
    return same if same is not None and same.size() > 1 else None


def _owned(
    spec: ModelSpec, view: MeshView, params: Mapping[str, Any], experts: ExpertAxis | None
) -> frozenset[str]:
    """Return the names whose local elements this rank counts: the first copy only, and a tied copy nowhere."""
    spread = frozenset(n for n in params if experts is not None and n in experts.tensors)
    if spread and group(view.layout, view.rank, EXPERT_REPLICATE)[0] != view.rank:
        params = {n: p for n, p in params.items() if n not in spread}
    degree, at = view.layout.tp, view.coords["tp"]
    copies = {
        t.name
        for t in spec.tensors()
        if t.tied_to is not None or at % tp_copies(t, degree, spec.attention) != 0
    }
    mine = frozenset(n for n in params if n not in copies)
    copy_of_context = view.layout.zero == 0 and view.coords["cp"] != 0
    if view.coords["dp_replicate"] != 0 or copy_of_context:
        return spread & mine
    return mine


def _tied_weight(spec: ModelSpec, view: MeshView, params: Mapping[str, nn.Parameter]) -> nn.Parameter | None:
    """Return this end's copy of a tied embedding that two stages hold, else None."""
    if TIED not in view.groups:
        return None
    pair = next((t for t in spec.tensors() if t.tied_to is not None), None)
    if pair is None:
        return None
    assert pair.tied_to is not None
    return params[pair.tied_to] if pair.tied_to in params else params.get(pair.name)


def _tied_pair(
    spec: ModelSpec, params: Mapping[str, nn.Parameter]
) -> tuple[nn.Parameter, nn.Parameter] | None:
    """Return embedding and head of a tied embedding when both are parameters of this rank, else None."""
    pair = next((t for t in spec.tensors() if t.tied_to is not None), None)
    if pair is None or pair.tied_to is None or pair.name not in params or pair.tied_to not in params:
        return None
    return params[pair.tied_to], params[pair.name]


def _pipeline(model: ParallelModel, schedule: Schedule, recomputed: Mapping[int, Halves]) -> Pipeline:
    plan, view = model.plan, model.view
    wire = dtype_of(model.table.wire)
    loss = torch.float64 if plan.layout.precision == "fp64" else torch.float32

    return Pipeline(
        model.stages,
        schedule,
        data=model.engines,
        rank=view.pp_rank,
        group=view.groups["pp"],
        device=view.device,
        micro_batch=plan.batch.micro_batch,
        seq_len=local_length(plan.layout, plan.batch.seq_len),
        hidden_size=model.spec.hidden_size,
        wire_dtype=wire,
        loss_dtype=loss,
        on_action=lambda action: model.on_action(action),  # who listens may change between steps
        before_forward=None if model.dropout is None else model.dropout.micro_batch,
        recomputed=recomputed,
    )


def away_homes(engine: Replicate | Zero) -> Away | ShardHomes | None:
    """Return what knows where an engine's parameters rest when that is not the device, else None."""
    return engine if isinstance(engine, Away) else engine.homes if isinstance(engine, Zero) else None


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the whole tensor of a shard (all_gather on its mesh), or a plain tensor unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
