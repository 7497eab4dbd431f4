"""Pipeline execution: our schedule rows on torch's pipelining stage and schedule runtime.

Maths: a stage's backward needs the gradient of its output, which the next stage sends; micro-batches are
independent, their gradients add. A backward may be in two halves: I makes the gradient of the input, W that of the
weights. Communication: [B, T, D] activations forward and their gradients backward, ``pp`` point-to-point, in the
order that the lowered rows say, and with a routers' term [2, B, E] beside each (``parallel.router_loss``); between two
stages of one rank nothing is sent.

The rows are lowered by ``schedule.lower``; torch interprets them one action at a time. Private names of torch's
pipelining are used in this file only (``mesh.contract`` lists them).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

from meshwright.parallel.halves import Halves
from meshwright.parallel.stage import StageModule, at_positions, with_router_term
from meshwright.schedule.actions import Action, ActionKind, Schedule
from meshwright.schedule.lower import lower, lower_forward

SPLIT = (ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD)


class StageData(Protocol):
    """What a pipeline asks of the data parallelism of one stage (``Replicate`` or ``Zero``)."""

    def before_backward(self, *, last: bool) -> None:
        """Prepare for a whole backward; ``last`` of the stage's step."""

    def before_half(self) -> None:
        """Prepare for a half of a backward that reduces nothing by itself."""

    def after_weights(self, params: Iterable[Tensor], *, last: bool) -> None:
        """Take the gradients of ``params`` that a half (or whole) backward outside autograd's hooks has left."""

    def end_of_stage(self) -> None:
        """Start what the stage's last backward still owes, before another stage begins its own."""


class _Stage(PipelineStage):
    """A stage whose data-parallel switches are set by us before each backward.

    ``split``: the stage has backwards in halves. FSDP2 would reduce in the middle of such a backward, so there all
    its reductions are started by hand, after the weight half (or the whole backward).
    """

    def __init__(
        self, *args: Any, data: StageData, split: bool, recomputed: Halves | None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._data = data
        self._split = split
        self._recomputed = recomputed

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        if not self._split:
            self._data.before_backward(last=last_backward)
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        self._data.before_half()
        result = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        if self._recomputed is not None:
            self._recomputed.settle(result[1] if backward_type == "input" else None)
        if backward_type != "input":
            groups: list[dict[str, Any]] = bwd_kwargs.get("param_groups") or []
            made = [node.variable for group in groups for node in group["params"]]
            self._data.after_weights(made, last=last_backward)
        return result

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Start what is left, so that every rank of a data-parallel group starts it at the same place of its row."""
        self._data.end_of_stage()


class _Runtime(_PipelineScheduleRuntime):
    """Torch's runtime with losses by micro-batch: forwards of the last stage may come in any order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._losses: dict[int, Tensor] = {}

    def _maybe_compute_loss(
        self, stage: Any, output: Any, target_mbs: Any, mb_index: int, loss_kwargs: Any = None
    ) -> None:
        if stage.is_last:
            self._losses[mb_index] = self._compute_loss(output, target_mbs[mb_index], loss_kwargs)

    def _maybe_get_loss(self, stage: Any, mb_index: int) -> Tensor | None:
        return self._losses.pop(mb_index) if stage.is_last else None


class _Shell(nn.Module):
    """Hides the data-parallel wrapper from torch's pipelining, which would set its own switches.

    Torch hands the same keyword arguments to every stage of a rank; only the last one wants labels. ``noted`` is what
    the routers' term needs of the stages before, where there is one.
    """

    def __init__(self, inner: StageModule) -> None:
        super().__init__()
        self.inner = inner

    def forward(
        self,
        x: Tensor,
        noted: Tensor | None = None,
        labels: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Any:
        given: dict[str, Any] = {} if positions is None else {"positions": positions}
        if self.inner.is_last:
            given["labels"] = labels
        return with_router_term(self.inner, self.inner(x, **given), noted, x, labels)


class Pipeline:
    """Runs the micro-batches of a step through this rank's stages, in the order of the schedule.

    Attributes:
        executed: the actions of the last step in the order in which they ran (the lowered row, as recorded).
    """

    def __init__(
        self,
        modules: Mapping[int, StageModule],
        schedule: Schedule,
        *,
        data: Mapping[int, StageData],
        rank: int,
        group: dist.ProcessGroup,
        device: torch.device,
        micro_batch: int,
        seq_len: int,
        hidden_size: int,
        wire_dtype: torch.dtype,
        loss_dtype: torch.dtype,
        on_action: Callable[[str], None],
        before_forward: Callable[[int], None] | None = None,
        recomputed: Mapping[int, Halves] | None = None,
    ) -> None:
        self._before_forward = before_forward
        self.schedule = schedule
        self.rank = rank
        self.rows = lower(schedule)
        self.executed: list[str] = []
        self._on_action = on_action
        self._last = schedule.num_stages - 1
        self._modules = dict(modules)
        self._group = group
        self._scale = 1.0
        self._sums: list[Tensor] = []
        self._hidden = torch.empty(micro_batch, seq_len, hidden_size, dtype=wire_dtype, device="meta")
        tokens = torch.empty(micro_batch, seq_len, dtype=torch.int64, device="meta")
        loss = torch.empty((), dtype=loss_dtype, device="meta")
        message = (self._hidden, *_noted(modules, micro_batch, loss_dtype))
        wired = tuple(x.detach().requires_grad_(True) for x in message)
        halves = {a.stage for a in schedule.rows[rank] if a.kind in SPLIT}
        self._stages = [
            _Stage(
                _Shell(module),
                stage,
                schedule.num_stages,
                device,
                input_args=(tokens,) if stage == 0 else wired,
                output_args=(loss.requires_grad_(True),) if stage == self._last else wired,
                input_grads=(None,) if stage == 0 else message,
                output_grads=(loss.detach(),) if stage == self._last else message,
                group=group,
                data=data[stage],
                split=stage in halves,
                recomputed=None if recomputed is None else recomputed.get(stage),
            )
            for stage, module in modules.items()
        ]
        self._runtime = _Runtime(
            self._stages, schedule.num_micro_batches, loss_fn=self._loss, scale_grads=False
        )
        rows: dict[int, list[_Action | None]] = {
            r: [_Action.from_str(str(a)) for a in row] for r, row in enumerate(self.rows)
        }
        self._runtime._prepare_schedule_with_comms(rows, format="compute_comms")
        for stage in self._stages:
            stage.has_backward = True
            self._record_actions(stage)
        # Peers agree on static shapes now, so that no step of the run has other messages than the rows say.
        self._runtime._initialize_stages((tokens,) if 0 in modules else (), {}, None)

    def _record_actions(self, stage: Any) -> None:
        """Note each computing action as torch's stage runs it, by wrapping the stage's entry points."""
        index = stage.stage_index
        forward, backward, weight = (
            stage.forward_one_chunk,
            stage.backward_one_chunk,
            stage.backward_weight_one_chunk,
        )

        def forward_one_chunk(k: int, *args: Any, **kwargs: Any) -> Any:
            self._note(f"{index}F{k}")
            if self._before_forward is not None:
                self._before_forward(k)
            return forward(k, *args, **kwargs)

        def backward_one_chunk(k: int, *args: Any, full_backward: bool = True, **kwargs: Any) -> Any:
            self._note(f"{index}{'B' if full_backward else 'I'}{k}")
            return backward(k, *args, full_backward=full_backward, **kwargs)

        def backward_weight_one_chunk(k: int, *args: Any, **kwargs: Any) -> Any:
            self._note(f"{index}W{k}")
            return weight(k, *args, **kwargs)

        stage.forward_one_chunk = forward_one_chunk
        stage.backward_one_chunk = backward_one_chunk
        stage.backward_weight_one_chunk = backward_weight_one_chunk

    def _note(self, action: str) -> None:
        self.executed.append(action)
        self._on_action(action)

    def buffers(self) -> list[Tensor]:
        """Return what rests for messages: a place for each micro-batch's activations and gradients that are received."""
        found: list[Tensor] = []
        for stage in self._stages:
            for infos in (*stage.args_recv_info.values(), *stage.grad_recv_info.values()):
                places = (getattr(info, "buffer", None) for info in infos)
                found += [place for place in places if isinstance(place, Tensor)]
        return found

    def _loss(self, loss_sum: Tensor, _target: Any) -> Tensor:
        self._sums.append(loss_sum.detach())
        return loss_sum * self._scale

    def run(
        self, inputs_ABT: Tensor, labels_ABT: Tensor, scale: float, positions_ABT: Tensor | None = None
    ) -> list[Tensor]:
        """Run all micro-batches forward and backward; return the unscaled loss sums (last stage only).

        Args:
            inputs_ABT: token ids, [accumulation, B, T]; used on the first stage.
            labels_ABT: shifted labels, [accumulation, B, T]; used on the last stage.
            scale: factor on the summed loss before backward.
            positions_ABT: positions that begin again with each packed document; used on every stage.
        """
        self.executed.clear()
        self._scale = scale
        self._sums = []
        for stage in self._stages:
            stage.clear_runtime_states()
        args = [(x,) if 0 in self._modules else () for x in inputs_ABT]
        kwargs = [
            ({"labels": y} if self._last in self._modules else {}) | at_positions(positions_ABT, k)
            for k, y in enumerate(labels_ABT)
        ]
        self._runtime._step_microbatches(args, kwargs, list(labels_ABT), None, return_outputs=False)
        return self._sums

    @torch.no_grad()
    def evaluate(
        self, inputs_ABT: Tensor, labels_ABT: Tensor, positions_ABT: Tensor | None = None
    ) -> list[Tensor]:
        """Run all micro-batches forward only, as the schedule's forwards stand; return the loss sums (last stage).

        Communication: one send/recv of [B, T, D] per micro-batch and border between ranks.
        """
        sums: list[Tensor] = []
        m = self.schedule.num_micro_batches
        for start in range(0, inputs_ABT.shape[0], m):
            row = lower_forward(self.schedule, min(m, inputs_ABT.shape[0] - start))[self.rank]
            positions = None if positions_ABT is None else positions_ABT[start:]
            sums += self._forwards(row, inputs_ABT[start:], labels_ABT[start:], positions)
        return sums

    def _forwards(
        self, row: Sequence[Action], inputs_ABT: Tensor, labels_ABT: Tensor, positions_ABT: Tensor | None
    ) -> list[Tensor]:
        sums: list[Tensor] = []
        at: dict[tuple[int, int], Tensor] = {}
        arriving: dict[tuple[int, int], Any] = {}
        leaving: list[tuple[Any, Tensor]] = []
        ranks = self.schedule.stage_ranks
        for action in row:
            stage, k = action.stage, action.micro_batch
            assert k is not None
            if action.kind is ActionKind.RECV_F:
                at[stage, k] = torch.empty_like(self._hidden, device=labels_ABT.device)
                arriving[stage, k] = dist.irecv(at[stage, k], group=self._group, group_src=ranks[stage - 1])
            elif action.kind is ActionKind.SEND_F:
                out = at.pop((stage + 1, k))
                leaving.append((dist.isend(out, group=self._group, group_dst=ranks[stage + 1]), out))
            else:
                if (stage, k) in arriving:
                    arriving.pop((stage, k)).wait()
                x = inputs_ABT[k] if stage == 0 else at.pop((stage, k))
                given = at_positions(positions_ABT, k)
                if stage == self._last:
                    sums.append(self._modules[stage](x, labels=labels_ABT[k], **given))
                else:
                    at[stage + 1, k] = self._modules[stage](x, **given)
        for work, _ in leaving:
            work.wait()
        return sums


def _noted(modules: Mapping[int, StageModule], micro_batch: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return, without memory, what travels beside hidden states for the routers' term; nothing where there is none."""
    routers = [m.router_loss for m in modules.values() if m.router_loss is not None]
    return tuple(torch.empty(r.shape(micro_batch), dtype=dtype, device="meta") for r in routers[:1])


def compute_actions(row: Sequence[Action]) -> list[str]:
    """Return the computing actions of a lowered row, as text."""
    return [str(a) for a in row if a.kind.value in ("F", "B", "I", "W")]
