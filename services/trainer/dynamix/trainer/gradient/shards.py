"""Sharded models (FSDP2): each rank's gradient is weighed before it is reduced, and copies of a model are summed by us.

`fully_shard` hands the gradients of each module that it was called on, in one flat tensor, to a reduce-scatter that can
be replaced. Ours scales this rank's part first, as the communication hook does under DDP. Where the mesh covers only
some of the ranks, such as those of a node, every node has a copy of the model, and the all-reduce hook sums each shard
over its copies: by the active exchange, or not in a local step.

All that waits for other ranks passes here, so what a rank computes is known apart from waiting. On the CPU only: on a
GPU waits stand in streams beside the computing. FSDP2 does not tell which reduction of a backward pass is its last one,
so we wait in a callback that the autograd engine calls when the pass is over, behind FSDP2's own.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dynamix.trainer.data.plan import MicroBatch
from dynamix.trainer.exchange.codec import BucketPart, BucketView
from dynamix.trainer.exchange.layout import Layout, sharded_groups
from dynamix.trainer.exchange.plan import Sent
from dynamix.trainer.exchange.transport import LentTensor, launched

from .hook import GradientHook, squared_norm, weigh
from .noise import NormSketch

T = TypeVar("T")


@dataclass(kw_only=True, eq=False)
class ShardHook(GradientHook):
    """Weighs the gradients of one FSDP2 model, in one session.

    A gradient's `Parameter.grad` is a view of what the reduce-scatter left, unless there was one before, so sums over
    copies go on behind the computing until the backward pass is over.
    """

    layout: Layout
    _is_queued: bool = field(default=False, init=False)
    """Whether the engine will call us at the end of the backward pass under way."""
    _is_trained: bool = field(default=False, init=False)
    """Whether the newest forward pass was one of training."""
    _outputs: list[tuple[int, Tensor, dist.Work | Sent | None]] = field(default_factory=list, init=False)
    """Gradients that were reduced in the backward pass under way."""
    _own_scale: float = field(default=0.0, init=False)
    """The factor on this rank's gradient that makes it the mean over its own samples, in a local step."""

    def _install(self, model: Any, place: Any) -> None:
        """Have FSDP2 reduce by the hook in this place, now and in later sessions."""
        groups = sharded_groups(model)
        if any(group._all_reduce_hook is not None for group in groups):  # noqa: SLF001 - no public name, as below
            raise RuntimeError("the model has an all-reduce hook already: leave set_all_reduce_hook out")
        model.register_forward_pre_hook(partial(_note_forward, place), prepend=True)
        for number, (group, module) in enumerate(groups.items()):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            module.set_custom_all_gather(_Gather(group._all_gather_comm, place))  # noqa: SLF001
            module.set_custom_reduce_scatter(_Scatter(group._reduce_scatter_comm, place, number))  # noqa: SLF001
            module.set_all_reduce_hook(partial(_sum_copies, place, number, group))

    def begin(self, batch: MicroBatch, *arguments: Any, **options: Any) -> None:
        """Begin a step with its last batch, as under DDP; in a local step the ranks of a copy step together."""
        super().begin(batch, *arguments, **options)
        self._is_queued = False
        self._outputs.clear()
        step, counts = self._step, batch.plan.counts
        self._own_scale = step.scale
        if step.is_local:
            together = sum(counts.values[rank] for rank in self.layout.inside)
            step.scale *= counts.values[self._rank] / together if together else 0.0
            if self.sketch is not None:
                self.sketch = NormSketch(batch.plan.step, together / counts.total)

    def note_forward(self) -> None:
        """A forward pass begins; what an evaluation waits for is not part of a step's computing."""
        self._is_trained, self._is_queued = torch.is_grad_enabled(), False

    def waiting(self, wait: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Call what may wait for other ranks."""
        if not (self._is_trained and self.clock.in_step):
            return wait(*arguments, **options)
        self.clock.gradient_ready()
        result = wait(*arguments, **options)
        self.clock.reduced()
        return result

    def scatter(self, number: int, inner: Callable[..., T], shard: Tensor, gradient: Tensor, **options: Any) -> T:
        """Weigh this rank's gradient of a module and reduce it."""
        self._weigh(number, gradient)
        return inner(shard, gradient, **options)

    def _weigh(self, number: int, gradient: Tensor) -> None:
        began, step = time.perf_counter(), self._step
        if not self._is_queued:
            self._is_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish_pass)  # noqa: SLF001
            if step.is_local and self.sketch is not None:
                self.sketch.cells.zero_()
                self.sketch.local = 0.0
        if self.losses is not None:
            self.losses.gradient_begins()
        if step.in_step:
            self.weights.post()
        if step.measures:
            step.local[number] = squared_norm(gradient) if step.scale else 0.0
        elif step.is_local and self.sketch is not None and step.scale:
            self.sketch.local += float(squared_norm(gradient)) * self._own_scale**2
        weigh(gradient, step.scale)
        self.clock.own_s += time.perf_counter() - began

    def sum_copies(self, number: int, shard: Tensor, *, is_kept: bool) -> None:
        """Begin to sum a shard over the copies; the sum must be there at once unless the tensor is kept."""
        if len(self.layout.inside) == 1:  # then FSDP2 scatters nothing
            self.waiting(self._weigh, number, shard)
        if self.layout.sums_copies and self._is_trained and self.clock.in_step:
            self.clock.reduced()  # FSDP2 has just summed them
        under_way = self._send_shard(number, shard)
        self._outputs.append((number, shard, under_way))
        if not is_kept:
            self.waiting(self._receive)

    def _send_shard(self, number: int, shard: Tensor) -> dist.Work | Sent | None:
        step, peers = self._step, self.layout.peer_group
        if peers is None:
            return None
        if step.is_local:
            if self.sketch is not None:
                place, local = self.layout.inside.index(self._rank), self.sketch.local
                self.sketch.add(shard, 1 + number * len(self.layout.inside) + place)
                self.sketch.local = local
            return None
        if step.exchange is None:
            lent = LentTensor(shard)
            return launched(peers.allreduce, [lent.alias])
        part = BucketPart(f"shard {number}", 0, len(shard), torch.Size([len(shard)]))
        return self.model_exchange.send(BucketView(number, shard, (part,)))

    def _receive(self) -> None:
        """Wait for what is under way, and finish it."""
        step = self._step
        correction = self.weights.correction() if step.in_step else 1.0
        for number, shard, under_way in self._outputs:
            if under_way is not None:
                under_way.wait()
            if correction != 1.0:
                shard.mul_(correction)
            if step.measures:
                step.reduced[number] = squared_norm(shard)
        self._outputs.clear()

    def _finish_pass(self) -> None:
        """The backward pass is over: wait for all sums, and exchange the compute times."""
        self._is_queued, step = False, self._step
        times = None
        if step.shares_times:
            times = launched(self.group.allreduce, [self.slots.write_apart(self.clock.seconds_per_sample()).alias])
        self._receive()
        if times is not None:
            times.wait()
            self.slots.receive()
        if step.measures:
            whole = torch.tensor([sum(step.reduced.values())], dtype=torch.float64)
            launched(self.layout.shard_group.allreduce, [LentTensor(whole).alias]).wait()
            step.reduced = {0: whole.item()}
        self.num_reduced += 1
        self.reduced_at = time.perf_counter()
        if step.in_step:
            self.clock.reduced()


def _note_forward(place: Any, *_: Any) -> None:
    place.hook.note_forward()


class _Gather:
    """FSDP2's all-gather of parameters, in which ranks wait for each other."""

    def __init__(self, inner: Any, place: Any) -> None:
        self._inner, self._place, self.allocate = inner, place, inner.allocate

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._place.hook.waiting(self._inner, *arguments, **options)


class _Scatter:
    """FSDP2's reduce-scatter of a module's gradients."""

    def __init__(self, inner: Any, place: Any, number: int) -> None:
        self._inner, self._place, self._number, self.allocate = inner, place, number, inner.allocate

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **options: Any) -> Any:
        hook = self._place.hook
        return hook.waiting(hook.scatter, self._number, self._inner, output_tensor, input_tensor, **options)


def _sum_copies(place: Any, number: int, group: Any, shard: Tensor) -> None:
    """FSDP2's all-reduce hook of a module."""
    is_kept = group._orig_dtype == shard.dtype and not any(  # noqa: SLF001
        each.offload_to_cpu
        or each.sharded_param.grad is not None
        or getattr(each.sharded_param, "_post_accumulate_grad_hooks", None)
        for each in group.fsdp_params
    )
    place.hook.sum_copies(number, shard, is_kept=is_kept)
