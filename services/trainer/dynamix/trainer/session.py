"""The session: what the user's training loop calls.

One step:

1. `loader` hands out a batch; `_on_batch` prepares the hook, the learning rate and local steps for it.
2. The script's `backward` runs the hook (`gradient/hook.py`), which weights and exchanges the gradient.
3. The script's `optimizer.step` runs between the hooks of `Updates` (`gradient/learning_rate.py`).
4. When the script asks for the next batch, or calls `step`, `_finish_batch` ends local steps, records the batch
   (`measurement/meter.py`) and calls `Steering.after_step`, which ends windows and adopts actions (`steering/`).
"""

import contextlib
import logging
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import astuple, replace
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, ParamSpec, Self, TypeVar

import msgspec
import torch
from msgspec.structs import replace as replace_fields
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from dynamix.schemas.apportion import apportion
from dynamix.schemas.messages import Action, Summary
from dynamix.schemas.messages.allocation import Allocation, is_permitted
from dynamix.trainer.arguments import AtLeast0, Share, checked
from dynamix.trainer.data.loader import Loader
from dynamix.trainer.data.orders import DataIdentity
from dynamix.trainer.data.plan import MicroBatch, Position
from dynamix.trainer.gradient.clock import StepTimes
from dynamix.trainer.gradient.hook import CoveredModels
from dynamix.trainer.gradient.learning_rate import Schedulers, Updates
from dynamix.trainer.gradient.models import unwrapped, unwrapped_optimizer
from dynamix.trainer.gradient.noise import NoiseAverage, is_measured
from dynamix.trainer.job.identity import Attempt, generation_after, lower_cap, merge_caps
from dynamix.trainer.local_steps import LocalSteps
from dynamix.trainer.measurement.meter import Scalar, detached
from dynamix.trainer.steering.run import Run, reason_after
from dynamix.trainer.steering.steering import Steering

from .groups import Groups

P = ParamSpec("P")
AnswerT = TypeVar("AnswerT")

_log = logging.getLogger("dynamix.trainer")

AVERAGED_SHARE = 0.02
"""The share of the samples so far that `Session.averaged` averages the weights over."""


def while_it_lives(method: Callable[P, AnswerT]) -> Callable[P, AnswerT]:
    """A bound method that keeps nothing alive: a session ends with its last name, not when cycles are looked for."""
    held = weakref.WeakMethod(method)

    def ask(*args: P.args, **kwargs: P.kwargs) -> AnswerT:
        if (living := held()) is None:
            raise RuntimeError("the session of this loader is gone: keep what attach returned, it ends each step")
        return living(*args, **kwargs)

    return ask


def leave(steering: Steering, models: CoveredModels, close_timeout_s: float, may_restart: bool) -> None:
    """End a session that was not closed: when it is garbage-collected, or at the end of the process."""
    error = getattr(sys, "last_value", None)  # what ends the process, as far as the interpreter has noted one
    steering.end(reason_after(error, may_restart=may_restart))
    models.remove()
    steering.close(close_timeout_s)


class Gradients(NamedTuple):
    """The parts that weight, exchange and apply gradients."""

    models: CoveredModels
    updates: Updates
    local_steps: LocalSteps
    schedulers: Schedulers
    needs_scaling: bool
    """Whether the script weights each loss by `session.scale_loss`."""


class Session:
    """Handle of one attached training job; made by `dynamix.trainer.attach`.

    It unpacks into itself and its loader: `session, loader = attach(model, optimizer, loader)`. As a context manager it
    closes itself, and remembers the size at which a rank ran out of memory.
    """

    def __init__(
        self,
        steering: Steering,
        loader: Loader,
        gradients: Gradients,
        *,
        caps_path: Path | None,
        close_timeout_s: float,
        may_restart: bool,
        groups: Groups | None = None,
    ) -> None:
        """Made by `attach`.

        The last messages have `close_timeout_s` to leave; a launcher restarts the job after a failure if it
        `may_restart`.
        """
        self._run = steering.run
        self._loader = loader
        self._meter = steering.meter
        self._steering = steering
        self._transport = steering.transport
        self._models, self._updates, self._local, self._schedulers, self._needs_scaling = gradients
        self._caps_path = caps_path
        self._close_timeout_s = close_timeout_s
        self._may_restart = may_restart
        loader.on_start = while_it_lives(self._on_start)
        loader.on_trained = while_it_lives(self._finish_trained)
        loader.on_ask = self._meter.clock.asked
        loader.on_batch = while_it_lives(self._on_batch)
        loader.on_exhausted = while_it_lives(self.average)
        self._groups = groups
        self.num_repeated_steps = 0
        """Steps of this process that torchft did not commit; they were made again with the same samples."""
        if groups is not None:
            loader.on_step = while_it_lives(self._open_step)
        self._reported: tuple[Scalar | None, Scalar | None] | None = None
        """Loss and number of correct samples of the batch to train on, once the script has reported them."""
        self._allocation: Allocation | None = None
        """Allocation of the batch to train on."""
        self._loss_scaled = False
        self._averaged: list[tuple[AveragedModel, torch.nn.Module]] = []
        self._num_unaveraged = 0
        """Samples since they were updated."""
        self._state_loaded = self._counts_epochs = False
        # the end is published, and the last messages leave, also when the script just ends
        self._leave = weakref.finalize(self, leave, steering, self._models, close_timeout_s, may_restart)
        if groups is not None:
            self._go_on()

    def __iter__(self) -> Iterator[Any]:
        return iter((self, self._loader))

    # --- the training loop -------------------------------------------------------------------------------------

    @property
    def loader(self) -> Loader:
        """Iterate over it for the batches of an epoch, or for what a resumed epoch still has."""
        return self._loader

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """The numbers of the epochs that are left, 0 to `num_epochs` - 1; after the last one the job is over.

        A resumed run passes the number of epochs of the whole run, not of those that are left.
        """
        num_epochs = checked("session.epochs(num_epochs)", num_epochs, AtLeast0)
        self._run.total_samples = num_epochs * self._run.data.size or None
        loader = self._loader
        first = loader.position.epoch + (1 if loader.epoch_is_over else 0)
        planned = max(self._run.num_epochs or 0, first)
        if self._state_loaded and num_epochs < planned and self._run.place.rank == 0:
            _log.warning(
                "session.epochs(%d) after a resume trains %d more epochs, since it counts from the start of the run, "
                "of which %d are done: for the rest of the %d that the saved run had, pass session.epochs(%d)",
                *(num_epochs, max(num_epochs - first, 0), first, planned, planned),
            )
        self._run.num_epochs = num_epochs
        self._counts_epochs = True
        epoch = first
        while epoch < num_epochs:
            loader.begin_epoch(epoch)
            yield epoch
            epoch = max(epoch + 1, loader.position.epoch)  # a group that was behind is where the others are
        self._end("completed")

    @property
    def sync_gradients(self) -> bool:
        """Whether the current batch is the last of its step: only then call `optimizer.step()` and `zero_grad()`.

        Always true without `micro_batch_size` and `gradient_accumulation_steps`.
        """
        return self._current().is_last

    def step(self, loss: Scalar | None = None, num_correct: Scalar | None = None) -> None:
        """Report the loss of a batch; optional. If the optimizer has stepped, the step ends here, else with the batch.

        A batch that is skipped on all ranks must be reported, or the next one's update is refused.

        Args:
            loss: the criterion's value, as it was reduced over this rank's samples; a tensor is not waited for.
            num_correct: how many of this rank's samples were classified correctly, if the script counts.

        Raises:
            RuntimeError: without a batch, after the end, when weighting by the loss and `scale_loss` was not called,
                or when the script accumulates gradients on its own.
            ValueError: when a number is of several elements, or no number.
        """
        self._require_running()
        batch = self._loader.current
        if batch is None:
            raise RuntimeError(
                "session.step() without a batch: call it once in each batch of the loader; itertools.cycle repeats "
                "batches that it kept, write `while True: yield from loader`"
            )
        if self._models.losses is not None:
            self._models.losses.look_at_loss(loss)
        self._reported = detached("loss", loss), detached("num_correct", num_correct)
        if not batch.is_last or self._updates.any_since_step:
            self._finish_batch(batch)

    def _finish_trained(self) -> bool:
        """Finish the batch that was trained on, if there is one; the script asks for another."""
        batch = self._loader.current
        if batch is None or self._run.ended:
            return False
        if self._groups is not None and not self._groups.is_committed:
            self._repeat_step(batch)
            return False
        is_done = self._is_updated
        if not is_done and self._loader.is_full:  # something was done with it, or it was reported as skipped
            is_alone = len(self.local_batch_sizes) == 1
            is_done = not batch.is_last or self._models.saw_backward or self._reported is not None
            is_done = is_done or (self._needs_scaling and self._loss_scaled)
            is_done = is_done or (is_alone and any(model.training for model in self._models.models))
        if is_done:
            self._finish_batch(batch)
        return is_done

    def _finish_batch(self, batch: MicroBatch) -> None:
        began = time.perf_counter()
        if self._needs_scaling and not self._loss_scaled and (self._updates.any_since_step or not batch.is_last):
            raise RuntimeError("the gradient of this batch is not weighted: use session.scale_loss(loss).backward()")
        self._loss_scaled = False
        (loss, num_correct), self._reported = self._reported or (None, None), None
        if not batch.is_last:
            self._loader.finish_batch()
            self._meter.record_batch(batch, loss, num_correct)
            self._loader.begin_held()
            return
        norms = self._models.end_step(updated=self._updates.any_since_step)
        self._updates.end_step()
        self._loader.finish_batch()
        clock, times, counts = self._meter.clock, self._models.take_times(), batch.plan.counts.values
        if self._local.is_begun:
            tracks = self._run.schedule.allocation_at(batch.plan.step).split == "tracking"
            seconds = clock.seconds_per_sample() if tracks else None
            with clock.averaging():
                ended = self._local.end_step(
                    batch.plan, ends_epoch=self._loader.epoch_is_over, seconds_per_sample=seconds
                )
            if ended is not None:
                times, counts, norms = ended
        self._update_averaged(batch.plan.counts.total)
        self._meter.record_batch(batch, loss, num_correct, norms)
        clock.end()
        if self._groups is not None:
            self._groups.is_open = False
        with self._losing_groups():
            self._steering.after_step(self._loader.position, times, counts)
        if self._schedulers:
            self._schedulers.advance(self.progress)
        self._meter.clock.own_s += time.perf_counter() - began
        self._loader.begin_held()

    # --- replica groups that come and go -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _losing_groups(self) -> Iterator[None]:
        """Where replica groups come and go, what fails because one was lost makes the others meet again."""
        try:
            yield
        except RuntimeError as error:
            if self._groups is None:
                raise
            self._groups.give_up(error)

    def _open_step(self) -> None:
        """Open the next step of all replica groups, in another world if one came or was lost."""
        run, groups, began = self._run, self._groups, time.perf_counter()
        assert groups is not None, "there are groups"
        if not self._counts_epochs:
            raise ValueError("under a torchft Manager loop over session.epochs(n): a group that joins begins later")
        is_ready = False
        while not is_ready:
            with self._losing_groups():
                if groups.open():
                    self._change_world(groups)
                if not run.started:
                    self._steering.start(self._loader.position)
                    self._schedulers.begin(self.progress)
                is_ready = True
        self._meter.clock.charged_s += time.perf_counter() - began

    def _change_world(self, groups: Groups) -> None:
        """Set again what knows the number of ranks, and go on in the next generation; a collective."""
        run, steering = self._run, self._steering
        steering.leave_world()
        options, before = replace(run.options, local_batch_sizes=groups.sizes), run.place
        collectives, sockets, identity, place = groups.meet(options=options, data=run.data, state=self.state_dict())
        run.options, run.place, run.started = options, place, False
        run.schedule.reset(0, options.initial_allocation)
        run.use_identity(identity)
        steering.collectives = collectives
        meter, plans = self._meter, self._loader.plans
        meter.rank, meter.local_rank, meter.sockets = place.rank, place.local_rank, sockets
        plans.division = plans.division._replace(rank=place.rank)
        self._models.enter_world(place.rank, collectives.world_size)
        if (min(before.rank, 1), min(before.local_rank, 1)) != (min(place.rank, 1), min(place.local_rank, 1)):
            self._transport.begin_close(self._close_timeout_s)
            self._transport = steering.transport = groups.make_transport()
        self._go_on()
        self._loader.draw_again()
        if place.rank == 0:
            _log.info(
                "step %d: generation %d of job %s has %d groups, which take %s samples",
                *(self.step_index, identity.generation, identity.job, collectives.world_size, self.local_batch_sizes),
            )

    def _go_on(self) -> None:
        """Go on from the state that the groups have chosen: the speeds of those that stay are known."""
        groups, run = self._groups, self._run
        if groups is None or (state := groups.state) is None:
            return
        position, known = Position(**state["position"]), groups.known
        run.noise, run.num_epochs = NoiseAverage(*state["noise"]), state["num_epochs"]
        speeds, _, longest_s = state["fast_loop"]
        slowest = speeds[0].index(max(speeds[0]))  # whose rate and fixed costs a newcomer has, until it is measured
        of_ranks = [[each[slowest if n is None else n] for n in known] for each in speeds]
        run.fast_loop.restore([of_ranks, 0, longest_s])
        newest = msgspec.convert(state["schedule"][-1][1:], Allocation)
        sizes, caps = newest.local_batch_sizes, run.identity.max_local_batch_sizes
        shares = [sizes[n] if n is not None else max(sum(sizes) // len(sizes), 1) for n in known]
        allocation = run.bounded(newest.with_sizes(apportion(sum(sizes), shares, [0] * len(caps), caps)), caps)
        if newest.split == "tracking":
            allocation = allocation.with_sizes(run.fast_loop.divide(allocation.local_batch_sizes))
        run.schedule.reset(position.step, allocation)
        self._allocation, self._state_loaded = None, True
        self._loader.go_to(position, state["order"])

    def _repeat_step(self, batch: MicroBatch) -> None:
        """Forget a step that was not committed; its samples come again."""
        assert self._groups is not None, "only then steps are repeated"
        if self._models.saw_backward:
            self.num_repeated_steps += 1
            _log.warning(
                "step %d was not committed (%s): its %d samples are used again; %d steps were repeated so far",
                *(batch.plan.step, self._groups.reason, batch.plan.counts.total, self.num_repeated_steps),
            )
        self._groups.is_open = False
        self._models.end_step(updated=True)
        self._models.take_times()
        for model in self._models.models:
            model.zero_grad()  # what was added up may be anything
        self._updates.end_step()
        self._meter.clock.discard()
        self._reported = None
        self._loader.draw_again()

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to call `backward` on where sharded models (FSDP) or a framework average gradients over ranks.

        Where communication hooks weigh gradients (DDP, so also under Accelerate and Lightning), it changes nothing.

        Raises:
            RuntimeError: when there is no current batch.
        """
        batch, self._loss_scaled = self._current(), True
        return loss * self._models.loss_factor(batch) if self._needs_scaling else loss

    def schedule(self, scheduler: LRScheduler) -> None:
        """Advance a learning-rate scheduler by the samples used: once per reference step (`num_reference_steps`).

        The script then no longer calls `scheduler.step()`. Load the scheduler's own state as usual.

        Raises:
            TypeError: when the scheduler does not count steps.
        """
        self._schedulers.add(scheduler, self.progress)

    def cover(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Weigh the gradients of a further model, and scale the learning rates of its optimizer; on all ranks.

        Raises:
            RuntimeError: when the model is covered already, or has a communication hook, or in the middle of a round of
                local steps.
            ValueError: when the model is not under DDP, but the session's first one is.
        """
        self._require_average("a model that is covered now would not begin alike on all ranks")
        self._models.cover(unwrapped(model))
        if optimizer is not None:
            self._updates.cover(unwrapped_optimizer(optimizer))

    def averaged(self, model: torch.nn.Module) -> AveragedModel:
        """A copy of a model for evaluation and export, with its weights averaged over the last fiftieth of the samples.

        An exponential moving average, updated after each step in which ranks take the mean of gradients or parameters.
        Training stays as it is. Buffers are the newest. To resume, save and load its own `state_dict` as well.
        """
        inner = unwrapped(model)
        inner = inner.module if isinstance(inner, DistributedDataParallel) else inner
        averaged = AveragedModel(inner).requires_grad_(False)
        averaged.zero_grad()
        self._averaged.append((averaged, inner))
        return averaged

    def _update_averaged(self, num_samples: int) -> None:
        self._num_unaveraged += num_samples
        if not (self._averaged and self.is_averaged):
            return
        decay = max(0.0, 1.0 - self._num_unaveraged / (AVERAGED_SHARE * self._loader.position.samples_seen))
        for averaged, model in self._averaged:
            averaged.multi_avg_fn = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
            averaged.update_parameters(model)
        self._num_unaveraged = 0

    def ignore(self, model: torch.nn.Module) -> None:
        """Exclude a DDP model from the session; it trains on batches of its own, equally long on all ranks."""
        self._models.ignore(unwrapped(model))

    @property
    def is_averaged(self) -> bool:
        """Whether all ranks have the same parameters: false in a round of local steps."""
        return self._local.is_averaged

    def average(self) -> None:
        """End a round of local steps now, between two steps; on all ranks. Elsewhere it does nothing."""
        self._finish_trained()
        self._local.average(self._loader.position.step)

    def _require_average(self, otherwise: str) -> None:
        if not self._local.is_averaged:
            raise RuntimeError(
                f"step {self._loader.position.step} is in the middle of a round of local steps, {otherwise}: wait "
                "until session.is_averaged, or call session.average() on all ranks before"
            )

    def evaluated(self, accuracy: float) -> None:
        """Report the newest accuracy on held-out data, 0 ... 1; the next window's report includes it.

        Raises:
            ValueError: when it is not a number from 0 to 1, as percent are not.
        """
        self._run.held_out_accuracy = checked("session.evaluated(accuracy)", accuracy, Share)

    def offer(self, action: Action) -> None:
        """Offer an action from within the process, as if the bus had delivered it; it counts in rank 0 only."""
        self._transport.offer(action)

    # --- questions that change nothing -------------------------------------------------------------------------

    @property
    def job(self) -> str:
        """The job's id on the bus."""
        return self._run.identity.job

    @property
    def generation(self) -> int:
        """Number of this start of the job, from 0; never the same twice, but numbers may be left out."""
        return self._run.identity.generation

    @property
    def step_index(self) -> int:
        """Optimizer steps done so far, over all generations: the number of the current or next step."""
        return self._position.step

    @property
    def window(self) -> int:
        """Window of the current or next step, from 0 in each generation."""
        return self._run.windows.window_of(self.step_index)

    @property
    def position(self) -> int:
        """Samples used so far, over all epochs and ranks."""
        return self._position.samples_seen

    @property
    def progress(self) -> float:
        """Reference steps so far: optimizer steps of plain training on as many samples. For loops that count steps."""
        return self._run.reference_steps.before(self._position)

    @property
    def num_reference_steps(self) -> int:
        """Reference steps of an epoch: what `len(loader)` is in plain training, whatever the batch does."""
        return self._run.reference_steps.per_epoch

    @property
    def allocation(self) -> Allocation:
        """The allocation of the current or next step: sizes, who divides them, how gradients are exchanged."""
        return self._run.schedule.allocation_at(self._loader.position.step)

    @property
    def local_batch_sizes(self) -> tuple[int, ...]:
        """The sizes of the current or next step, by rank."""
        return self.allocation.local_batch_sizes

    @property
    def global_batch_size(self) -> int:
        """Samples of the current step over all ranks: at the end of an epoch fewer than the sum of the sizes."""
        batch = self._loader.current
        return sum(self.local_batch_sizes) if batch is None else batch.plan.counts.total

    @property
    def num_samples(self) -> int:
        """This rank's samples in the current batch, or in the last one; 0 in a dummy that counts for nothing."""
        return (self._loader.current or self._loader.last_finished or self._current()).num_samples

    @property
    def times(self) -> StepTimes | None:
        """Times of the newest step that was timed; on a GPU that is a window's last."""
        return self._meter.clock.last

    def summary(self) -> Summary | None:
        """The gain over the windows so far, as rank 0 reports it at the end; `None` before the first one has ended.

        Steps, samples, time, our own work in it, and estimated times at equal sizes and at the script's batch.
        """
        return self._steering.summary()

    def metrics(self) -> list[dict[str, float | str]]:
        """The windows so far, the newest 4,096, as the loggers get them: `pandas.DataFrame(session.metrics())`.

        Sizes, times, throughput, noise, loss; what is not known is left out. In global rank 0 also the decision and
        its reason.
        """
        return self._steering.history.rows()

    @property
    def _is_updated(self) -> bool:
        """Whether the optimizer has made the step that is not finished yet."""
        batch = self._loader.current
        return batch is not None and batch.is_last and self._updates.any_since_step

    @property
    def _position(self) -> Position:
        return self._loader.saved(self._is_updated)[0] or self._loader.position

    def _current(self) -> MicroBatch:
        if self._loader.current is None:
            raise RuntimeError("there is no current batch: this is known between a batch and session.step()")
        return self._loader.current

    # --- stopping and going on ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """State for a resumed run: save it with model, optimizer and scheduler, load it in all ranks.

        No collective: rank 0 may call it alone, between two steps. Under a codec with loss every rank has residuals of
        its own, as large as the model: a resume is exact where every rank saves and loads its own state.

        Raises:
            RuntimeError: between a batch and `optimizer.step()`: the resumed run would use that batch twice. Also in
                the middle of a round of local steps: each rank has parameters of its own.
        """
        position, digest = self._loader.saved(self._is_updated)
        if position is None:
            raise RuntimeError(
                f"step {self._loader.position.step} is not finished, a run resumed from here would repeat its batch: "
                "save after optimizer.step()"
            )
        self._require_average("each rank has parameters of its own")
        self._steering.complete_posted()
        run = self._run
        entries, caps = run.schedule.entries_since(position.step), run.identity.max_local_batch_sizes
        return {
            "version": VERSION,
            "job": run.identity.job,
            "generation": run.identity.generation,
            "attempt": run.identity.attempt._asdict(),
            "data": run.data._asdict(),
            "position": position._asdict(),
            "order": digest,
            "num_epochs": run.num_epochs,
            "schedule": [[step, *msgspec.to_builtins(allocation)] for step, allocation in entries],
            "fast_loop": run.fast_loop.state,
            "noise": list(astuple(run.noise)),
            "local_batch_sizes": list(run.options.local_batch_sizes),
            "base_global_batch_size": run.options.base_global_batch_size,
            "memory_caps": list(caps) if run.search is None and min(caps) < run.options.max_local_batch_size else [],
            "decided_by": _policy_of(run),
            "rank": run.place.rank,
            "residuals": [each.residuals() for each in self._models.exchanges],
            "outer_momentum": list(self._local.outer_momentum()),
            "outer_agreement": self._local.agreement,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was saved: at the next sample, with its sizes, in a generation above all before.

        A world of another size keeps the global batch, divided again among its ranks; their speeds are measured again.
        Where the script itself names other sizes than when it was saved and the global batch is fixed, the new ones
        count.

        Raises:
            RuntimeError: when the training has begun.
            ValueError: when the state is of another version, or was saved over other data.
        """
        run = self._run
        if self._groups is not None and self._groups.state is not None:
            _log.info("this group has joined others, and goes on from their state instead of a saved one")
            return
        if run.started:
            raise RuntimeError("load_state_dict after the first step: attach again to go back in a run")
        try:
            self._restore(state)
        except (AttributeError, KeyError, IndexError, TypeError, msgspec.ValidationError) as error:
            raise ValueError(f"{error!r} in the session state: pass what session.state_dict() returned") from error

    def _restore(self, state: dict[str, Any]) -> None:
        run = self._run
        _check_saved(state, run.data)
        position = Position(**state["position"])
        generation, caps = run.identity.generation, run.identity.max_local_batch_sizes
        if state["job"] == run.identity.job:
            after = generation_after(state["generation"], Attempt(**state["attempt"]), run.identity.attempt)
            generation = max(generation, after)
        if is_same_world := len(state["local_batch_sizes"]) == len(run.options.local_batch_sizes):
            known = (dict(enumerate(caps)), dict(enumerate(state["memory_caps"])))
            run.search = None if state["memory_caps"] else run.search
            caps = merge_caps(known, len(caps), run.options.max_local_batch_size, run.options.min_local_batch_size)
        run.use_identity(run.identity._replace(generation=generation, max_local_batch_sizes=caps))
        is_same_script = state["local_batch_sizes"] == list(run.options.local_batch_sizes)
        if not is_same_world or is_same_script:
            run.options = replace(run.options, base_global_batch_size=state["base_global_batch_size"])
        _restore_schedule(run, state, position.step, is_same_world=is_same_world, is_same_script=is_same_script)
        run.noise = NoiseAverage(*state["noise"])
        run.num_epochs = state["num_epochs"]
        self._loader.go_to(position, state["order"])
        active = run.schedule.allocation_at(position.step).exchange
        if is_same_world and state["rank"] == run.place.rank:  # residuals differ between ranks; others begin without
            for exchange, residuals in zip(self._models.exchanges, state["residuals"], strict=False):
                exchange.load_residuals({name: parts for name, parts in residuals.items() if name == active.codec})
        if active.outer_momentum > 0:
            self._local.load_outer_momentum(state["outer_momentum"])
            self._local.agreement = state["outer_agreement"]
        self._state_loaded = True

    def close(self) -> None:
        """End the job on the bus and let the last messages leave, for a short and bounded time."""
        self._end("closed")
        if self._leave.detach() is not None:  # else closed before
            self._updates.remove()
            self._models.remove()
            self._steering.close(self._close_timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            rank = self._run.place.rank
            size, fewest = self.local_batch_sizes[rank], self._run.options.min_local_batch_size
            advice = "attach with memory_caps_path to start again below it"
            if self._caps_path is not None:
                cap = lower_cap(self._caps_path, rank, size, fewest)
                advice = f"a restarted job gives this rank at most {cap}"
            _log.error("out of memory at a local batch of %d: %s", size, advice)
        if error is not None:  # nothing is waited for: the others may never come to the collective
            self._steering.end(reason_after(error, may_restart=self._may_restart))
        self.close()

    def _on_start(self) -> None:
        """Begin with the first batch: only now is it known whether a state was loaded."""
        self._require_running()
        self._meter.clock.discard()
        if not self._run.started:
            if not (self._state_loaded or self._loader.plans.orders.script_epoch):  # its own resume goes on there
                warn_of_missing_state(self._run, from_snapshot=self._updates.begin_from_snapshot)
            if self._groups is None:
                self._steering.start(self._loader.position)
                self._schedulers.begin(self.progress)

    def _require_running(self) -> None:
        if self._run.ended:
            raise RuntimeError("this session has ended: attach again to train on")

    def _on_batch(self, batch: MicroBatch) -> None:
        began = time.perf_counter()
        self._loss_scaled = False
        allocation = self._run.schedule.allocation_at(batch.plan.step)
        if allocation is not self._allocation:
            self._allocation = allocation
            self._updates.follow(allocation.global_batch_size, allocation.rate_factor)
        step = batch.plan.step
        if allocation.exchange.every > 1 and batch.is_first:
            self._local.begin(step)
        self._updates.share = self._local.share(batch.plan)
        if self._local.is_begun:
            measures = batch.is_last and self._local.measures(step)
        else:
            measures = is_measured(step, self._run.options.noise_every * self._run.calm_times)
        shares_times = allocation.split == "tracking" and self._run.fast_loop.measures(step)
        self._models.begin(batch, measures=measures, shares_times=shares_times)
        self._meter.clock.own_s += time.perf_counter() - began
        self._meter.clock.handed_out(batch.size)

    def _end(self, reason: str) -> None:
        if not self._run.ended:
            with self._losing_groups():
                self._steering.complete_posted()
            self._steering.end(reason)
            self._local.leave()
            self._models.remove()
            self._transport.begin_close(self._close_timeout_s)


# --- the checkpoint: numbers, lists and tensors, safe for `torch.load(weights_only=True)`

VERSION = 9


def _policy_of(run: Run) -> list[Any]:
    """The policy of the job, and its options."""
    return [run.options.policy, dict(run.options.policy_options)]


def _check_saved(state: dict[str, Any], expected: DataIdentity) -> None:
    """Raise ValueError for a state of another version, or over other data."""
    if state.get("version") != VERSION:
        version = state.get("version")
        raise ValueError(f"session state of version {version!r}, not {VERSION}: resume with the program that saved it")
    if (data := DataIdentity(**state["data"])) != expected:
        differing = ", ".join(
            f"{name} {was!r}, now {now!r}"
            for name, was, now in zip(data._fields, data, expected, strict=True)
            if was != now
        )
        raise ValueError(f"the session state was saved over other data or in another order ({differing}): attach alike")


def _restore_schedule(run: Run, state: dict[str, Any], step: int, *, is_same_world: bool, is_same_script: bool) -> None:
    """Restore speeds and sizes, none above its rank's bound; in another world their sum, or the script's new sizes.

    The split is that of the job now, which may have another policy, or a hook that cannot carry times. So is the
    exchange, unless the same policy had decided otherwise and the job still permits it.
    """
    if is_same_world:
        run.fast_loop.restore(state["fast_loop"])
    now, caps, options = run.schedule.newest, run.identity.max_local_batch_sizes, run.options
    entries = [(step, msgspec.convert(parts, Allocation)) for step, *parts in state["schedule"]]
    if not is_same_world or not (is_same_script or options.global_batch == "adaptive"):
        saved = options.local_batch_sizes if is_same_world else entries[0][1].local_batch_sizes
        lower = [min(options.min_local_batch_size, cap) for cap in caps]
        allocation = now.with_sizes(apportion(sum(saved), now.local_batch_sizes, lower, caps))
        if allocation.global_batch_size != sum(saved) and run.place.rank == 0:
            _log.warning(
                "after this resume a step has %d samples instead of %d, since the bounds of %d ranks permit no other "
                "sum: set max_local_batch_size and min_local_batch_size in attach to permit it, or use more ranks",
                *(allocation.global_batch_size, sum(saved), len(caps)),
            )
        run.schedule.reset(step, allocation)
        return
    keeps = state["decided_by"] == _policy_of(run) and options.supports_exchange

    def restored(saved: Allocation) -> Allocation:
        allocation = now.with_sizes(saved.local_batch_sizes)
        if keeps and is_permitted(saved.exchange, options.exchange, options.named_codecs):
            allocation = replace_fields(allocation, exchange=saved.exchange)
        return run.bounded(allocation, caps)

    (first_step, first), *later = [(step, restored(allocation)) for step, allocation in entries]
    run.schedule.reset(max(first_step, 0), first)
    for later_step, allocation in later:
        run.schedule.revise(later_step, allocation)


def warn_of_missing_state(run: Run, *, from_snapshot: bool) -> None:
    """Warn if a script resumes its model and optimizer (`from_snapshot`), but not its session."""
    if run.place.rank != 0:
        return
    generation, job = run.identity.generation, run.identity.job
    what = f"start {generation} of job {job} follows an earlier one" if generation else ""
    if from_snapshot:
        what = "the optimizer has made steps already"
    if what:
        is_new_run = generation and not from_snapshot and not run.identity.attempt.restarts
        _log.warning(
            "%s, %s this session begins at epoch 0 with sample 0%s: if the model comes from a snapshot, save "
            "session.state_dict() in it, and call session.load_state_dict(...) on all ranks before the first batch",
            what,
            "and" if is_new_run else "but",
            ", as a new run under an id that was used before should" if is_new_run else "",
        )
