"""Pipeline execution: our schedule rows on torch's pipelining stage and schedule runtime.

Maths: a stage's backward needs the gradient of its output, which the next stage sends; micro-batches are
independent, their gradients add. Communication: [B, T, D] activations forward and their gradients backward,
``pp`` point-to-point, in the order that the lowered rows say.

The rows are lowered by ``schedule.lower``; torch interprets them one action at a time. Private names of torch's
pipelining are used in this file only (``mesh.contract`` lists them).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

from meshwright.schedule.actions import Action, Schedule
from meshwright.schedule.lower import lower


class _Stage(PipelineStage):
    """A stage whose data-parallel switches are set by us before each backward."""

    def __init__(self, *args: Any, before_backward: Callable[[bool], None], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._before_backward = before_backward

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        self._before_backward(last_backward)
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Gradients were reduced by the last backward; what is left is finished after the schedule."""


class _Shell(nn.Module):
    """Hides the data-parallel wrapper from torch's pipelining, which would set its own switches."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


class Pipeline:
    """Runs the micro-batches of a step through this rank's stage, in the order of the schedule.

    Attributes:
        executed: the actions of the last step in the order in which they ran (the lowered row, as recorded).
    """

    def __init__(
        self,
        module: nn.Module,
        schedule: Schedule,
        *,
        stage: int,
        group: dist.ProcessGroup,
        device: torch.device,
        before_backward: Callable[[bool], None],
        micro_batch: int,
        seq_len: int,
        hidden_size: int,
        wire_dtype: torch.dtype,
        loss_dtype: torch.dtype,
        on_action: Callable[[str], None],
    ) -> None:
        self.schedule = schedule
        self.stage_index = stage
        self.is_first = stage == 0
        self.is_last = stage == schedule.num_stages - 1
        self.rows = lower(schedule)
        self.executed: list[str] = []
        self._on_action = on_action
        hidden = torch.empty(micro_batch, seq_len, hidden_size, dtype=wire_dtype, device="meta")
        tokens = torch.empty(micro_batch, seq_len, dtype=torch.int64, device="meta")
        loss = torch.empty((), dtype=loss_dtype, device="meta")
        wired = hidden.detach().requires_grad_(True)
        self._stage = _Stage(
            _Shell(module),
            stage,
            schedule.num_stages,
            device,
            input_args=(tokens if self.is_first else wired,),
            output_args=(loss.requires_grad_(True) if self.is_last else wired,),
            input_grads=(None if self.is_first else hidden,),
            output_grads=(loss.detach() if self.is_last else hidden,),
            group=group,
            before_backward=before_backward,
        )
        self._runtime = _PipelineScheduleRuntime(
            [self._stage], schedule.num_micro_batches, loss_fn=self._loss, scale_grads=False
        )
        rows: dict[int, list[_Action | None]] = {
            rank: [_Action.from_str(str(a)) for a in row] for rank, row in enumerate(self.rows)
        }
        self._runtime._prepare_schedule_with_comms(rows, format="compute_comms")
        self._stage.has_backward = True
        # Peers agree on static shapes now, so that no step of the run has other messages than the rows say.
        self._runtime._initialize_stages((tokens,) if self.is_first else (), {}, None)
        self._group = group
        self._module = module
        self._hidden = hidden
        self._record_actions()
        self._scale = 1.0
        self._sums: list[Tensor] = []

    def _record_actions(self) -> None:
        """Note each computing action as torch's stage runs it, by wrapping the stage's two entry points."""
        forward, backward = self._stage.forward_one_chunk, self._stage.backward_one_chunk

        def forward_one_chunk(index: int, *args: Any, **kwargs: Any) -> Any:
            self._note(f"{self.stage_index}F{index}")
            return forward(index, *args, **kwargs)

        def backward_one_chunk(index: int, *args: Any, **kwargs: Any) -> Any:
            self._note(f"{self.stage_index}B{index}")
            return backward(index, *args, **kwargs)

        stage: Any = self._stage
        stage.forward_one_chunk = forward_one_chunk
        stage.backward_one_chunk = backward_one_chunk

    def _note(self, action: str) -> None:
        self.executed.append(action)
        self._on_action(action)

    def _loss(self, loss_sum: Tensor, _target: Any) -> Tensor:
        self._sums.append(loss_sum.detach())
        return loss_sum * self._scale

    def run(self, inputs_ABT: Tensor, labels_ABT: Tensor, scale: float) -> list[Tensor]:
        """Run all micro-batches forward and backward; return the unscaled loss sums (last stage only).

        Args:
            inputs_ABT: token ids, [accumulation, B, T]; used on the first stage.
            labels_ABT: shifted labels, [accumulation, B, T]; used on the last stage.
            scale: factor on the summed loss before backward.
        """
        self.executed.clear()
        self._scale = scale
        self._sums = []
        self._stage.clear_runtime_states()
        args = [(x,) if self.is_first else () for x in inputs_ABT]
        kwargs = [{"labels": y} if self.is_last else {} for y in labels_ABT]
        self._runtime._step_microbatches(
            args, kwargs, list(labels_ABT) if self.is_last else None, None, return_outputs=False
        )
        return self._sums

    @torch.no_grad()
    def evaluate(self, inputs_ABT: Tensor, labels_ABT: Tensor) -> list[Tensor]:
        """Run all micro-batches forward only; return the loss sums (last stage only).

        Communication: one send/recv of [B, T, D] per micro-batch and stage border.
        """
        sums: list[Tensor] = []
        for x, y in zip(inputs_ABT, labels_ABT, strict=True):
            if not self.is_first:
                received = torch.empty_like(self._hidden, device=y.device)
                dist.recv(received, group=self._group, group_src=self.stage_index - 1)
                x = received
            out = self._module(x, labels=y) if self.is_last else self._module(x)
            if self.is_last:
                sums.append(out)
            else:
                dist.send(out, group=self._group, group_dst=self.stage_index + 1)
        return sums


def compute_actions(row: Sequence[Action]) -> list[str]:
    """Return the computing actions of a lowered row, as text."""
    return [str(a) for a in row if a.kind.value in ("F", "B", "I", "W")]
