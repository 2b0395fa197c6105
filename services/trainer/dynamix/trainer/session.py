"""The session: what the user's training loop holds in its hands."""

import logging
import weakref
from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch

from dynamix.schemas.messages import Action

from .checkpoint import Checkpoint, DataIdentity, dump, parse, restore_noise, restore_schedule, restore_speeds
from .data.loader import Loader
from .data.sampler import StepPlan
from .data.schedule import Schedule
from .gradient.learning_rate import Handle
from .gradient.weighting import NOT_MEASURED, GradientHook, loss_factor
from .job.identity import generation_after
from .job.options import JobOptions
from .job.shutdown import error_of_script, reason_after
from .measurement.clock import AnyClock, StepTimes
from .measurement.memory import OUT_OF_MEMORY, MemoryCaps, merge_caps
from .measurement.window import Scalar, WindowRecorder
from .steering.steering import Steering
from .wire.client import BusClient

_log = logging.getLogger("dynamix.trainer")


class SessionParts(NamedTuple):
    """What `attach` puts together."""

    rank: int
    options: JobOptions
    data: DataIdentity
    schedule: Schedule
    loader: Loader
    clock: AnyClock
    recorder: WindowRecorder
    steering: Steering
    hook: GradientHook | None
    """`None` where the loss is scaled instead."""
    memory_caps: MemoryCaps
    client: BusClient | None
    """Only in ranks that speak on the bus."""
    actions: deque[Action]
    removables: tuple[Handle, ...]
    """What was put on the user's optimizer."""
    close_timeout_s: float
    may_restart: bool
    """Whether a launcher would start the job again after a failure."""


class Session:
    """Handle of one attached training job; made by `dynamix.trainer.attach`.

    As a context manager it closes itself, and remembers the size at which a rank ran out of memory.
    """

    def __init__(self, parts: SessionParts) -> None:
        self._parts = parts
        parts.loader.bind(on_start=self._on_start, on_batch=self._on_batch)
        self._loss_scaled = False
        self._closed = False
        self._leave: weakref.finalize[..., Session] | None = None
        if parts.hook is not None:
            weakref.finalize(self, parts.hook.settle)
        if parts.client is not None:  # the end is told, and the last messages leave, also when the script just ends
            self._leave = weakref.finalize(
                self, _leave, parts.steering, parts.client, parts.close_timeout_s, may_restart=parts.may_restart
            )

    # --- the training loop -------------------------------------------------------------------------------------

    @property
    def loader(self) -> Loader:
        """Iterate over it for the batches of an epoch, or for what a resumed epoch still has."""
        return self._parts.loader

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """The numbers of the epochs that are left, 0 to `num_epochs` - 1; after the last one the job is over."""
        self._parts.steering.total_samples = num_epochs * self._parts.data.num_samples
        loader = self._parts.loader
        first = loader.position.epoch + (1 if loader.epoch_is_over else 0)
        for epoch in range(first, num_epochs):
            loader.begin_epoch(epoch)
            yield epoch
        self._end("completed")

    def step(self, loss: Scalar | None = None, num_correct: Scalar | None = None) -> None:
        """End a step: call it once after each `optimizer.step()`, on all ranks.

        Args:
            loss: the criterion's value, as it was reduced over this rank's samples; a tensor is not waited for.
            num_correct: how many of this rank's samples were classified correctly, if the script counts.

        Raises:
            RuntimeError: without a batch, or when weighting by the loss and `scale_loss` was not called.
        """
        parts = self._parts
        if parts.hook is None and not self._loss_scaled:
            raise RuntimeError("the gradient of this step is not weighted: use session.scale_loss(loss).backward()")
        plan = parts.loader.finish_step()
        self._loss_scaled = False
        norms = NOT_MEASURED if parts.hook is None else parts.hook.take()
        parts.recorder.add(plan, loss, num_correct, norms)
        parts.clock.end()
        parts.steering.after_step(parts.loader.position, None if parts.hook is None else parts.hook.take_times())

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to call `backward` on where a framework averages gradients over ranks: FSDP2, Accelerate, Lightning.

        Raises:
            RuntimeError: when the communication hook weighs already, or there is no current batch.
        """
        if self._parts.hook is not None:
            raise RuntimeError(
                'the DDP hook weighs the gradients already: attach with weighting="loss" to scale the loss'
            )
        self._loss_scaled = True
        return loss * loss_factor(self._plan(), self._parts.rank, self._parts.options.reduction)

    def evaluated(self, accuracy: float) -> None:
        """Tell the newest accuracy on held-out data, 0 ... 1; it travels with the next window's report."""
        self._parts.steering.held_out_accuracy = float(accuracy)

    def offer(self, action: Action) -> None:
        """Offer an action from within the process, as if the bus had delivered it; it counts in rank 0 only."""
        self._parts.actions.append(action)

    # --- where it stands ---------------------------------------------------------------------------------------

    @property
    def job(self) -> str:
        """The job's id on the bus."""
        return self._parts.steering.identity.job

    @property
    def generation(self) -> int:
        """Which start of the job this is, from 0; never the same twice, but numbers may be left out."""
        return self._parts.steering.identity.generation

    @property
    def step_index(self) -> int:
        """Optimizer steps done so far, over all generations: the number of the current or next step."""
        return self._parts.loader.position.step

    @property
    def window(self) -> int:
        """Window of the current or next step, from 0 in each generation."""
        return self._parts.steering.window_of(self.step_index)

    @property
    def position(self) -> int:
        """Samples used so far, over all epochs and ranks."""
        return self._parts.loader.position.samples_seen

    @property
    def local_batch_sizes(self) -> tuple[int, ...]:
        """The sizes that rule the current or next step, by rank."""
        return self._parts.schedule.allocation_at(self.step_index).local_batch_sizes

    @property
    def global_batch_size(self) -> int:
        """Samples of the current step over all ranks: at the end of an epoch less than the sizes say."""
        plan = self._parts.loader.plan
        return sum(self.local_batch_sizes) if plan is None else plan.counts.total

    @property
    def num_samples(self) -> int:
        """This rank's samples in the current step: 0 when its batch is a dummy that counts for nothing."""
        return self._plan().counts.values[self._parts.rank]

    @property
    def times(self) -> StepTimes | None:
        """Times of the newest step that they are known of; on a GPU that is a window's last."""
        return self._parts.clock.last

    # --- stopping and going on ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs of us: save it with model, optimizer and scheduler, load it in all ranks.

        No collective: rank 0 may call it alone, between two steps.

        Raises:
            RuntimeError: between a batch and `session.step()`: the resumed run would use that batch twice.
        """
        parts = self._parts
        if parts.loader.plan is not None:
            raise RuntimeError(
                f"step {parts.loader.plan.step} is not finished, a run resumed from here would repeat its batch: save "
                "after session.step()"
            )
        parts.steering.finish()
        noise = parts.steering.noise
        return dump(
            Checkpoint(
                job=self.job,
                generation=self.generation,
                attempt=parts.steering.identity.attempt,
                data=parts.data,
                position=parts.loader.position,
                world_size=len(parts.options.local_batch_sizes),
                schedule=parts.schedule.entries_since(self.step_index),
                speeds=parts.steering.fast_loop.tracker.filter.state,
                noise=(noise.trace, noise.squared_norm, noise.weight),
                memory_caps=parts.steering.identity.max_local_batch_sizes,
            )
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was saved: the next sample, the sizes in force and those already adopted.

        Raises:
            RuntimeError: when the training has begun.
            ValueError: when the state is of other data, or cannot be read.
        """
        parts, steering = self._parts, self._parts.steering
        if steering.started:
            raise RuntimeError("load_state_dict after the first step: attach again to go back in a run")
        saved = parse(state, parts.data)
        after = generation_after(saved.generation, saved.attempt, steering.identity.attempt)
        steering.identity = steering.identity._replace(
            generation=max(self.generation, after) if saved.job == self.job else self.generation,
            max_local_batch_sizes=self._merged_caps(saved),
        )
        bounds = parts.options.min_local_batch_size, steering.identity.max_local_batch_sizes
        steering.reset_bounds()
        restore_schedule(parts.schedule, saved, *bounds)
        restore_speeds(steering.fast_loop.tracker.filter, saved, len(bounds[1]))
        restore_noise(steering.noise, saved)
        parts.loader.position = saved.position

    def close(self) -> None:
        """End the job on the bus and let the last messages leave, for a short and bounded time."""
        self._end("closed")
        self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, OUT_OF_MEMORY):
            self._remember_failure()
        if error is None:
            self._end("closed")
        else:  # nothing is waited for: the others may never come to the collective
            self._parts.steering.end(reason_after(error, may_restart=self._parts.may_restart))
        self._release()

    def _on_start(self) -> None:
        """Begin with the first batch: only now is it known whether a state was loaded."""
        if self._parts.steering.ended:
            raise RuntimeError("this session has ended: attach again to train on")
        if not self._parts.steering.started:
            self._parts.steering.start(self._parts.loader.position)

    def _on_batch(self, plan: StepPlan) -> None:
        self._loss_scaled = False
        if self._parts.hook is not None:
            shares_times = self._parts.schedule.allocation_at(plan.step).split == "tracking"
            self._parts.hook.begin(plan, shares_times=shares_times)

    def _plan(self) -> StepPlan:
        if self._parts.loader.plan is None:
            raise RuntimeError("there is no current batch: this is known between a batch and session.step()")
        return self._parts.loader.plan

    def _merged_caps(self, saved: Checkpoint) -> tuple[int, ...]:
        current = self._parts.steering.identity.max_local_batch_sizes
        if saved.world_size != len(current):
            return current
        options = self._parts.options
        return merge_caps(
            (dict(enumerate(current)), dict(enumerate(saved.memory_caps))),
            len(current),
            options.max_local_batch_size,
            options.min_local_batch_size,
        )

    def _remember_failure(self) -> None:
        size = self.local_batch_sizes[self._parts.rank]
        cap = self._parts.memory_caps.lower(self._parts.rank, size, self._parts.options.min_local_batch_size)
        if cap is None:
            _log.error(
                "out of memory at a local batch of %d: attach with memory_caps_path to start again below it", size
            )
        else:
            _log.error("out of memory at a local batch of %d: a restarted job gives this rank at most %d", size, cap)

    def _end(self, reason: str) -> None:
        if not self._parts.steering.ended:
            self._parts.steering.finish()
            self._parts.steering.end(reason)
            if self._parts.client is not None:
                self._parts.client.begin_close(self._parts.close_timeout_s)

    def _release(self) -> None:
        if self._closed:
            return
        self._closed = True
        for handle in self._parts.removables:
            handle.remove()
        if self._parts.hook is not None:
            self._parts.hook.settle()
        if self._leave is not None:
            self._leave.detach()
        if self._parts.client is not None:
            self._parts.client.close(self._parts.close_timeout_s)


def _leave(steering: Steering, client: BusClient, timeout_s: float, *, may_restart: bool) -> None:
    """End what nobody closed: when the session is forgotten, or at the end of the process."""
    steering.end(reason_after(error_of_script(), may_restart=may_restart))
    client.close(timeout_s)
