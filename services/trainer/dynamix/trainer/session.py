"""The session: what the user's training loop calls."""

import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple, ParamSpec, Self

import torch
from torch.utils.hooks import RemovableHandle

from dynamix.schemas.messages import Action
from dynamix.schemas.messages.allocation import Allocation

from .checkpoint import restore, save
from .data.loader import Loader
from .data.sampler import StepPlan
from .gradient.weighting import NOT_MEASURED, GradientHook, loss_factor
from .job.memory_caps import OUT_OF_MEMORY, MemoryCaps
from .job.reporting import reason_after
from .measurement.clock import StepTimes
from .measurement.meter import RankMeter, Scalar
from .steering.run import Run
from .steering.steering import Steering
from .wire.loggers import Loggers
from .wire.transport import Transport

_log = logging.getLogger("dynamix.trainer")

P = ParamSpec("P")


class ExitRules(NamedTuple):
    """How a session ends."""

    close_timeout_s: float
    """Longest wait for the last messages to leave."""
    may_restart: bool
    """Whether a launcher would start the job again after a failure."""


class Session:
    """Handle of one attached training job; made by `dynamix.trainer.attach`.

    As a context manager it closes itself, and remembers the size at which a rank ran out of memory.
    """

    def __init__(
        self,
        run: Run,
        *,
        loader: Loader,
        meter: RankMeter,
        steering: Steering,
        transport: Transport,
        loggers: Loggers,
        hook: GradientHook | None,
        memory_caps: MemoryCaps,
        optimizer_hooks: Sequence[RemovableHandle],
        exit_rules: ExitRules,
    ) -> None:
        """Made by `attach`; `hook` is `None` where the loss is scaled, `optimizer_hooks` are removed on close."""
        self._run = run
        self._loader = loader
        self._meter = meter
        self._steering = steering
        self._transport = transport
        self._loggers = loggers
        self._hook = hook
        self._memory_caps = memory_caps
        self._optimizer_hooks = optimizer_hooks
        self._exit_rules = exit_rules
        loader.bind(on_start=_weakly(self._on_start), on_ask=meter.clock.asked, on_batch=_weakly(self._on_batch))
        self._loss_scaled = False
        self._closed = False
        # the end is published, and the last messages leave, also when the script just ends
        self._leave = weakref.finalize(self, _leave, steering, transport, loggers, exit_rules)

    # --- the training loop -------------------------------------------------------------------------------------

    @property
    def loader(self) -> Loader:
        """Iterate over it for the batches of an epoch, or for what a resumed epoch still has."""
        return self._loader

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """The numbers of the epochs that are left, 0 to `num_epochs` - 1; after the last one the job is over."""
        self._run.total_samples = num_epochs * self._run.data.num_samples
        loader = self._loader
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
        if self._hook is None and not self._loss_scaled:
            raise RuntimeError("the gradient of this step is not weighted: use session.scale_loss(loss).backward()")
        plan = self._loader.finish_step()
        self._loss_scaled = False
        norms = NOT_MEASURED if self._hook is None else self._hook.take_norms()
        self._meter.record_step(plan, loss, num_correct, norms)
        self._meter.clock.end()
        self._steering.after_step(self._loader.position, None if self._hook is None else self._hook.take_times())

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to call `backward` on where a framework averages gradients over ranks: FSDP2, Accelerate, Lightning.

        Raises:
            RuntimeError: when the communication hook weighs already, or there is no current batch.
        """
        if self._hook is not None:
            raise RuntimeError(
                'the DDP hook weighs the gradients already: attach with weighting="loss" to scale the loss'
            )
        self._loss_scaled = True
        return loss * loss_factor(self._plan(), self._run.place.rank, self._run.options.reduction)

    def evaluated(self, accuracy: float) -> None:
        """Report the newest accuracy on held-out data, 0 ... 1; it travels with the next window's report."""
        self._run.held_out_accuracy = float(accuracy)

    def offer(self, action: Action) -> None:
        """Offer an action from within the process, as if the bus had delivered it; it counts in rank 0 only."""
        self._transport.offer(action)

    # --- where it stands ---------------------------------------------------------------------------------------

    @property
    def job(self) -> str:
        """The job's id on the bus."""
        return self._run.identity.job

    @property
    def generation(self) -> int:
        """Which start of the job this is, from 0; never the same twice, but numbers may be left out."""
        return self._run.identity.generation

    @property
    def step_index(self) -> int:
        """Optimizer steps done so far, over all generations: the number of the current or next step."""
        return self._loader.position.step

    @property
    def window(self) -> int:
        """Window of the current or next step, from 0 in each generation."""
        return self._run.window_of(self.step_index)

    @property
    def position(self) -> int:
        """Samples used so far, over all epochs and ranks."""
        return self._loader.position.samples_seen

    @property
    def allocation(self) -> Allocation:
        """What rules the current or next step: sizes, who divides them, how gradients travel."""
        return self._run.schedule.allocation_at(self.step_index)

    @property
    def local_batch_sizes(self) -> tuple[int, ...]:
        """The sizes that rule the current or next step, by rank."""
        return self.allocation.local_batch_sizes

    @property
    def global_batch_size(self) -> int:
        """Samples of the current step over all ranks: at the end of an epoch less than the sizes say."""
        plan = self._loader.plan
        return sum(self.local_batch_sizes) if plan is None else plan.counts.total

    @property
    def num_samples(self) -> int:
        """This rank's samples in the current step: 0 when its batch is a dummy that counts for nothing."""
        return self._plan().counts.values[self._run.place.rank]

    @property
    def times(self) -> StepTimes | None:
        """Times of the newest step that was timed; on a GPU that is a window's last."""
        return self._meter.clock.last

    # --- stopping and going on ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs of us: save it with model, optimizer and scheduler, load it in all ranks.

        No collective: rank 0 may call it alone, between two steps.

        Raises:
            RuntimeError: between a batch and `session.step()`: the resumed run would use that batch twice.
        """
        if self._loader.plan is not None:
            raise RuntimeError(
                f"step {self._loader.plan.step} is not finished, a run resumed from here would repeat its batch: save "
                "after session.step()"
            )
        self._steering.complete_posted()
        return save(self._run, self._loader.position)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was saved: the next sample, the sizes in force and those already adopted.

        Raises:
            RuntimeError: when the training has begun.
            ValueError: when the state is of other data, or cannot be read.
        """
        if self._run.started:
            raise RuntimeError("load_state_dict after the first step: attach again to go back in a run")
        self._loader.position = restore(self._run, state)

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
            self._steering.end(reason_after(error, may_restart=self._exit_rules.may_restart))
        self._release()

    def _on_start(self) -> None:
        """Begin with the first batch: only now is it known whether a state was loaded."""
        if self._run.ended:
            raise RuntimeError("this session has ended: attach again to train on")
        if not self._run.started:
            self._steering.start(self._loader.position)

    def _on_batch(self, plan: StepPlan) -> None:
        self._loss_scaled = False
        if self._hook is not None:
            shares_times = self._run.schedule.allocation_at(plan.step).split == "tracking"
            self._hook.begin(plan, shares_times=shares_times)
        self._meter.clock.handed_out(plan.counts.values[self._run.place.rank])

    def _plan(self) -> StepPlan:
        if self._loader.plan is None:
            raise RuntimeError("there is no current batch: this is known between a batch and session.step()")
        return self._loader.plan

    def _remember_failure(self) -> None:
        size = self.local_batch_sizes[self._run.place.rank]
        cap = self._memory_caps.lower(self._run.place.rank, size, self._run.options.min_local_batch_size)
        if cap is None:
            _log.error(
                "out of memory at a local batch of %d: attach with memory_caps_path to start again below it", size
            )
        else:
            _log.error("out of memory at a local batch of %d: a restarted job gives this rank at most %d", size, cap)

    def _end(self, reason: str) -> None:
        if not self._run.ended:
            self._steering.complete_posted()
            self._steering.end(reason)
            self._transport.begin_close(self._exit_rules.close_timeout_s)

    def _release(self) -> None:
        if self._closed:
            return
        self._closed = True
        for handle in self._optimizer_hooks:
            handle.remove()
        self._steering.collectives.close()
        self._leave.detach()
        self._loggers.close(self._exit_rules.close_timeout_s)
        self._transport.close(self._exit_rules.close_timeout_s)


def _weakly(method: Callable[P, None]) -> Callable[P, None]:
    """Call it for as long as its owner lives: a session ends with its last name, not when cycles are looked for."""
    weak = weakref.WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        alive = weak()
        if alive is None:
            raise RuntimeError("the session of this loader is gone: keep it, its step() ends each step")
        alive(*args, **kwargs)

    return call


def _leave(steering: Steering, transport: Transport, loggers: Loggers, rules: ExitRules) -> None:
    """End a session that was not closed: when it is garbage-collected, or at the end of the process."""
    error = getattr(sys, "last_value", None)  # what ends the process, as far as the interpreter has noted one
    steering.end(reason_after(error, may_restart=rules.may_restart))
    steering.collectives.close()
    loggers.close(rules.close_timeout_s)
    transport.close(rules.close_timeout_s)
