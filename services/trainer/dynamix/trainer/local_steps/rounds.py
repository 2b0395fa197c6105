"""Rounds of local steps: when they begin and end, and what all ranks have then.

In a round of h steps a rank's gradient is the mean of its own samples and is not sent. At its end all ranks have

    theta = theta_start + sum_i (n_i / sum n) (theta_i - theta_start)        n_i: samples of rank i in the round

by the codec and the route of the exchange, the same bits on each: only what moved is sent, so that an error of a codec
is one of a step. A round also ends before another exchange rules, and with an epoch. Buffers are averaged alike, whole
numbers as rank 0 has them. The state of the optimizers is averaged when local steps end, and with an epoch, so that a
checkpoint there holds what all ranks have. The learning rate stays that of the global batch.
"""

import logging
from collections.abc import Callable
from typing import NamedTuple

from torch.nn.parallel import DistributedDataParallel

from dynamix.schemas.messages.allocation import Exchange
from dynamix.trainer.communication.job_exchange import JobExchange, keeps_residuals
from dynamix.trainer.communication.model_exchange import ModelExchange, StepExchange
from dynamix.trainer.data.plan import StepPlan
from dynamix.trainer.exchange.codec import BucketView
from dynamix.trainer.gradient.buckets import NOT_MEASURED, SquaredNorms, StepSketches, Waitable
from dynamix.trainer.gradient.covered import CoveredModels
from dynamix.trainer.gradient.noise import RoundMeasurement
from dynamix.trainer.gradient.time_slots import TimeSlots
from dynamix.trainer.gradient.updates import Updates

from .buffers import SharedBuffers
from .drift import RoundDrift
from .optimizer_state import StatePlace, average_states, state_places
from .outer import OuterOptimizer
from .parameters import FlatBucket, buckets_of
from .round_times import RoundTimes, mean_counts

_log = logging.getLogger("dynamix.trainer")

GatherPlaces = Callable[[list[StatePlace]], list[list[StatePlace]]]
"""What every rank has, from what this one has; a collective call."""


class _Round(NamedTuple):
    """What a round began with."""

    buckets: list[tuple[ModelExchange, FlatBucket]]
    counts: list[int]
    """Samples so far, by rank."""
    times: RoundTimes


class EndedStep(NamedTuple):
    """What a local step brought besides the mean."""

    times: list[float] | None = None
    """Seconds per sample by rank over the round, where they are to be shared and it ended."""
    counts: tuple[int, ...] = ()
    """Samples per step by rank in the round that ended."""
    norms: SquaredNorms = NOT_MEASURED
    drift: RoundDrift | None = None
    """That of the round that ended."""


class LocalSteps:
    """Rounds of local steps of the models of one session; nothing where no exchange asks for them."""

    def __init__(
        self,
        exchange: JobExchange,
        models: CoveredModels,
        updates: Updates,
        gather: GatherPlaces,
        *,
        noise_every: int | None,
    ) -> None:
        """`noise_every` is that of `attach`, `None` where local gradients tell no noise."""
        self._measurement = None if noise_every is None else RoundMeasurement(noise_every)
        self._exchange = exchange
        self._models = models
        self._updates = updates
        self._gather = gather
        self._slots = TimeSlots(exchange.rank, exchange.world_size)
        self._buffers: list[tuple[DistributedDataParallel, SharedBuffers | None]] = []
        """The models whose steps are local, with what DDP would broadcast."""
        self._round: _Round | None = None
        self._num_steps = 0
        self._sketches: StepSketches | None = None
        """Those of the first step of the round, where its noise is measured."""
        self.outer = OuterOptimizer()

    @property
    def is_begun(self) -> bool:
        """Whether the current step is local."""
        return self._round is not None

    @property
    def is_averaged(self) -> bool:
        """Whether all ranks have the same parameters."""
        return self._num_steps == 0

    def begin(self, step: int) -> None:
        """Begin a step; the first one of a round notes where it begins, the first of all shares rank 0's buffers."""
        if self._round is not None or self._exchange.at(step).every == 1:
            return
        self._exchange.connect()
        self._switch_broadcasts_off()
        for _, buffers in self._buffers:
            if buffers is not None:
                buffers.begin()
        pairs = zip(self._models.models, self._models.exchanges, strict=True)
        buckets = [(exchange, bucket) for model, exchange in pairs for bucket in buckets_of(model, exchange)]
        self._round = _Round(buckets, [0] * self._exchange.world_size, RoundTimes())

    def measures(self, step: int) -> bool:
        """Whether the noise is measured on a step: the first one of a round, where one is due."""
        if self._round is None or self._measurement is None:
            return False
        return self._measurement.measures(step, begins_round=self._num_steps == 0)

    def end_step(self, plan: StepPlan, *, ends_epoch: bool, seconds_per_sample: float | None) -> EndedStep:
        """End a step; with a round's last one, a collective, the ranks have their mean."""
        assert self._round is not None, "the step was not local"
        self._num_steps += 1
        self._sketches = self._models.take_sketches(plan) or self._sketches
        for rank, count in enumerate(plan.counts.values):
            self._round.counts[rank] += count
        if seconds_per_sample is not None:
            self._round.times.add(seconds_per_sample, plan.counts.values[self._exchange.rank])
        exchange, following = self._exchange.at(plan.step), self._exchange.at(plan.step + 1)
        if self._num_steps < exchange.every and exchange == following and not ends_epoch:
            return EndedStep()
        counts = mean_counts(self._round.counts, self._num_steps)
        weight, drift = self._average(exchange, following, shares_times=seconds_per_sample is not None)
        if following.every == 1 or ends_epoch:
            self._average_optimizers(weight)
        if following.every == 1:
            self.leave()
        sketches, self._sketches = self._sketches, None
        norms = sketches.norms() if sketches else NOT_MEASURED
        return EndedStep(self._slots.take_seconds(), counts, norms, drift)

    def average(self, step: int) -> None:
        """End a round before its time; a collective. Nothing between two rounds."""
        if not self.is_averaged:
            exchange = self._exchange.at(step - 1)
            self._average_optimizers(self._average(exchange, exchange, shares_times=False)[0])
            self._sketches = None

    def leave(self) -> None:
        """Let DDP broadcast buffers again."""
        if not self.is_averaged and self._exchange.rank == 0:
            _log.warning(
                "the session ends in the middle of a round of local steps: each rank has parameters of its own; call "
                "session.average() on all ranks before"
            )
        self._models.broadcast_buffers()
        self._buffers, self._round, self._num_steps = [], None, 0

    def _average(self, exchange: Exchange, following: Exchange, *, shares_times: bool) -> tuple[float, RoundDrift]:
        """Let all ranks have the mean; returns this rank's weight in it, and how far they were apart."""
        assert self._round is not None, "no round"
        counts = self._round.counts
        weight = counts[self._exchange.rank] / sum(counts)
        drift = RoundDrift()
        ruling = StepExchange(exchange, flushes=not keeps_residuals(exchange, following))
        sent: list[tuple[ModelExchange, FlatBucket, BucketView, Waitable]] = []
        for model, bucket in self._round.buckets:
            model.begin(ruling)
            view = bucket.moved(weight)
            drift.add_own(view.flat, weight)
            sent.append((model, bucket, view, model.send(view)))
        some_model = self._round.buckets[0][0]
        cells = [each.cells for each in self._sketches.sketches] if self._sketches else []
        sketches = [some_model.send_plainly(each) for each in cells]
        numbers: Waitable | None = None
        if shares_times:
            numbers = some_model.send_plainly(self._slots.write_apart(self._round.times.seconds_per_sample))
        for _, buffers in self._buffers:
            if buffers is not None:
                buffers.average(weight)
        for model, bucket, view, under_way in sent:
            under_way.wait()
            bucket.move(self.outer.step(exchange, model, view))
            drift.add_mean(view.flat)
        self.outer.end_round(following)
        for each in sketches:
            each.wait()
        if numbers is not None:
            numbers.wait()
            self._slots.receive_apart()
        self._round, self._num_steps = None, 0
        return weight, drift

    def _average_optimizers(self, weight: float) -> None:
        optimizers = self._updates.optimizers
        places = sorted({place for each in self._gather(state_places(optimizers)) for place in each})
        average_states(optimizers, places, weight, self._exchange.pipeline())

    def _switch_broadcasts_off(self) -> None:
        """DDP would broadcast rank 0's buffers in each forward pass, for which ranks would wait."""
        known = [model for model, _ in self._buffers]
        for model, exchange in zip(self._models.models, self._models.exchanges, strict=True):
            assert isinstance(model, DistributedDataParallel), "others have no exchange"
            if any(model is each for each in known):
                continue
            buffers = None
            if model.broadcast_buffers and model.modules_buffers:
                buffers = SharedBuffers(model.modules_buffers, exchange, is_first=self._exchange.rank == 0)
                self._models.keep_buffers(model)
            self._buffers.append((model, buffers))
