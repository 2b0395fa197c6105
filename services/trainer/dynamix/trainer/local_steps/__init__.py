"""Local steps: rounds in which each rank steps alone, and what all ranks have at their end.

In a round of h steps a rank's gradient is the mean of its own samples and is not sent. At its end all ranks have

    theta = theta_start + sum_i (n_i / sum n) (theta_i - theta_start)        n_i: samples of rank i in the round

by the codec and the route of the exchange, the same bits on each: only what moved is sent, so that an error of a codec
is one of a step. A whole round may end with an outer step instead, with d the mean movement and v that of the rounds
before:

    v <- m v + d,  theta = theta_start + r (m v + d)             r = (1 - m) / (1 - a) where no rate is given

The agreement a is the cosine between d and v, smoothed, from 0 to 1/2; rank 0's counts. A round also ends before
another exchange is in effect, and with an epoch. Buffers are averaged as well; momentum and the like when local steps
end, and with an epoch, so that a checkpoint there holds what all ranks have.
"""

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from dynamix.schemas.messages.allocation import Exchange
from dynamix.trainer.data.plan import StepPlan
from dynamix.trainer.exchange.codec import BucketPart, BucketView, Largest, Residuals, just
from dynamix.trainer.exchange.layout import local
from dynamix.trainer.exchange.nodes import sum_plainly
from dynamix.trainer.exchange.plan import ExchangePlan, ModelExchange, Sent, StepExchange
from dynamix.trainer.gradient.hook import CoveredModels
from dynamix.trainer.gradient.learning_rate import Updates
from dynamix.trainer.gradient.noise import NOT_MEASURED, RoundMeasurement, SquaredNorms, StepSketches

_log = logging.getLogger("dynamix.trainer")

BUCKET_BYTES = 25 * 2**20
"""Size of a bucket of a sharded model: DDP's default."""


def mean_counts(num_samples: Iterable[int], num_steps: int) -> tuple[int, ...]:
    """Samples per step of each rank, to the nearest whole one."""
    return tuple((2 * number + num_steps) // (2 * num_steps) for number in num_samples)


MEAN = Exchange(every=2)
"""A round that ends early goes to the mean, whatever its outer step is."""

MOST_AGREEMENT = 0.5


def agreement_after(before: float, dot: float, moved: float, velocity: float) -> float:
    """The agreement after a round whose movement d has these products with v, itself, and v with itself."""
    if not moved * velocity > 0.0:
        return before
    cosine = dot / math.sqrt(moved * velocity)
    return min(max((before + cosine) / 2 if before else cosine, 0.0), MOST_AGREEMENT)


def outer_step(exchange: Exchange, moved: Tensor, velocity: Tensor | None, agreement: float) -> Tensor:
    """The outer step, given the mean movement; `velocity` is updated, and only needed with momentum.

    Products and sums are apart, since a processor that joins them rounds once instead of twice.
    """
    if not exchange.has_outer_step:
        return moved
    step = moved
    if exchange.outer_momentum:
        assert velocity is not None, "momentum needs it"
        velocity.mul_(exchange.outer_momentum).add_(moved)
        step = velocity.mul(exchange.outer_momentum).add_(moved)
    return step.mul(exchange.outer_rate or (1.0 - exchange.outer_momentum) / (1.0 - agreement))


class FlatBucket:
    """Some parameters of one model, one behind the other: where they began, and how far they came."""

    def __init__(self, number: int, named: Sequence[tuple[str, Tensor]]) -> None:
        """Note where all of them are now, in float32 or float64."""
        self._number = number
        self._tensors = [local(each.detach()) for _, each in named]
        is_double = any(each.dtype == torch.float64 for each in self._tensors)
        self._dtype = torch.float64 if is_double else torch.float32
        ends = itertools.pairwise(itertools.accumulate((each.numel() for each in self._tensors), initial=0))
        self._parts = tuple(
            BucketPart(key, start, stop, each.shape)
            for (key, _), each, (start, stop) in zip(named, self._tensors, ends, strict=True)
        )
        self._start = self._flat()

    def _flat(self) -> Tensor:
        return torch.cat([each.reshape(-1).to(self._dtype) for each in self._tensors])

    def moved(self, weight: float) -> BucketView:
        """The movement of the parameters, times this rank's weight."""
        flat = self._flat().sub_(self._start)
        flat = flat.mul_(weight) if weight else flat.zero_()  # not times zero: what does not count may be anything
        return BucketView(self._number, flat, self._parts)

    def move(self, by: Tensor) -> None:
        """Put them where they began, moved by so much."""
        place = self._start.add_(by)
        for part, tensor in zip(self._parts, self._tensors, strict=True):
            tensor.copy_(place[part.start : part.stop].view(tensor.shape))


def share_buffers(tensors: Iterable[Tensor], exchange: ModelExchange, weight: float, *, is_first: bool) -> None:
    """Replace buffers by their weighted mean over ranks, and whole numbers by those of rank 0; a collective.

    In float64, so that what is the same on all ranks stays so.
    """
    under_way = []
    for tensor in tensors:
        place = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        if place.is_floating_point():
            value = place.to(torch.float64, copy=True)
            value = value.mul_(weight) if weight else value.zero_()
        else:
            value = place.to(torch.int64, copy=True) if is_first else torch.zeros_like(place, dtype=torch.int64)
        under_way.append((place, value, exchange.send_plainly(value)))
    for place, value, sent in under_way:
        sent.wait()
        place.copy_(value)


class StatePlace(NamedTuple):
    """Position of a tensor in an optimizer's state, the same on all ranks."""

    optimizer: int
    parameter: int
    """Among those of all groups."""
    name: str
    shape: tuple[int, ...]
    dtype: str


def state_places(optimizers: Sequence[torch.optim.Optimizer]) -> list[StatePlace]:
    """The places of this rank's optimizer state; optimizers with integers, such as quantized ones, are left out."""
    found = []
    for number, optimizer in enumerate(optimizers):
        places = [
            StatePlace(number, index, name, tuple(value.shape), str(value.dtype).removeprefix("torch."))
            for index, parameter in enumerate(_parameters(optimizer))
            for name, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        ]
        if all(getattr(torch, place.dtype).is_floating_point or place.shape == () for place in places):
            found += places
        else:
            _log.warning("the state of %s cannot be averaged, each rank keeps its own", type(optimizer).__name__)
    return found


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


@dataclass
class _Round:
    """A round under way."""

    buckets: list[tuple[ModelExchange, FlatBucket]]
    """The parameters at the start of the round."""
    counts: list[int]
    """Samples so far, by rank."""
    computed_s: float = 0.0
    """Compute time of this rank in steps whose time is known."""
    num_timed: int = 0
    """Its samples in these."""
    num_steps: int = 0
    sketches: StepSketches | None = None
    """Those of the first step, where its noise is measured."""


class EndedRound(NamedTuple):
    """A round that has ended."""

    seconds_per_sample: list[float] | None
    """By rank, where they are to be shared."""
    counts: tuple[int, ...]
    """Samples per step, by rank."""
    norms: SquaredNorms
    """Where its noise is measured."""


@dataclass(eq=False)
class LocalSteps:
    """Rounds of local steps of the models of one session; nothing where no exchange asks for them."""

    exchange: ExchangePlan
    models: CoveredModels
    updates: Updates
    gather: Callable[[list[StatePlace]], list[list[StatePlace]]]
    """Returns what every rank has, from what this one has."""
    noise_every: int

    def __post_init__(self) -> None:
        """Begin without a round."""
        self._measurement = RoundMeasurement(self.noise_every)
        self._round: _Round | None = None
        self._velocities: dict[ModelExchange, Residuals] = {}
        """Momentum of the outer steps: laid out as buckets are, kept by parameter as residuals are."""
        self.agreement = 0.0
        """How far the newest rounds agree."""

    @property
    def is_begun(self) -> bool:
        """Whether the current step is local."""
        return self._round is not None

    @property
    def is_averaged(self) -> bool:
        """Whether all ranks have the same parameters."""
        return self._round is None or self._round.num_steps == 0

    def share(self, plan: StepPlan) -> float:
        """The share of a step's samples behind this rank's gradient, which may be that of its node."""
        if not self.is_begun:
            return 1.0
        return sum(plan.counts.values[rank] for rank in self.exchange.together) / plan.counts.total

    def outer_momentum(self) -> list[dict[str, Tensor]]:
        """The momentum of each model's outer steps, by parameter; the same on all ranks, copied to the CPU."""
        kept = [self._velocities[each].by_key() if each in self._velocities else {} for each in self.models.exchanges]
        return [{key: part.cpu().clone() for key, part in parts.items()} for parts in kept]

    def load_outer_momentum(self, saved: Sequence[Mapping[str, Tensor]]) -> None:
        """Go on from what `outer_momentum` returned."""
        for model, parts in zip(self.models.exchanges, saved, strict=False):
            if parts:
                self._velocities.setdefault(model, Residuals()).load(parts)

    def begin(self, step: int) -> None:
        """Begin a step; the first one of a round notes where it begins, the first of all shares rank 0's buffers."""
        if self._round is not None or self.exchange.at(step).every == 1:
            return
        self.exchange.pipeline()
        buckets: list[tuple[ModelExchange, FlatBucket]] = []
        for model, exchange in zip(self.models.models, self.models.exchanges, strict=True):
            cap = BUCKET_BYTES
            if isinstance(model, DistributedDataParallel):  # FSDP2 leaves each rank its buffers
                cap = model.bucket_bytes_cap
                if model.broadcast_buffers and model.modules_buffers:
                    is_first = self.exchange.rank == 0
                    share_buffers(model.modules_buffers, exchange, float(is_first), is_first=is_first)
                    model.broadcast_buffers = False
                    self.models.unshared.append(model)
            trained = [
                (key, parameter)
                for parameter, key in exchange.keys.items()
                if parameter.requires_grad and local(parameter).numel()  # a shard may be empty
            ]
            numbers, _ = c10d._compute_bucket_assignment_by_size(  # noqa: SLF001 - as DDP does, each of one type
                [local(parameter.detach()) for _, parameter in trained], [cap]
            )
            for number, indices in enumerate(numbers):
                buckets.append((exchange, FlatBucket(number, [trained[index] for index in indices])))
        self._round = _Round(buckets, [0] * self.exchange.world_size)

    def measures(self, step: int) -> bool:
        """Whether the noise is measured on a step: the first one of a round, where one is due."""
        return self._round is not None and self._measurement.measures(step, begins_round=self.is_averaged)

    def end_step(self, plan: StepPlan, *, ends_epoch: bool, seconds_per_sample: float | None) -> EndedRound | None:
        """End a step; a round's last one is a collective, after which all ranks have the same parameters."""
        assert self._round is not None, "the step was not local"
        self._round.num_steps += 1
        self._round.sketches = self.models.take_sketches(plan) or self._round.sketches
        for rank, count in enumerate(plan.counts.values):
            self._round.counts[rank] += count
        if seconds_per_sample is not None and seconds_per_sample > 0.0:
            num_samples = plan.counts.values[self.exchange.rank]
            self._round.computed_s += seconds_per_sample * num_samples
            self._round.num_timed += num_samples
        exchange, following = self.exchange.at(plan.step), self.exchange.at(plan.step + 1)
        if self._round.num_steps < exchange.every and exchange == following and not ends_epoch:
            return None
        weight, ended = self._average(exchange, following, shares_times=seconds_per_sample is not None)
        if following.every == 1 or ends_epoch:
            self._average_optimizers(weight)
        if following.every == 1:
            self.leave()
        return ended

    def average(self, step: int) -> None:
        """End a round before its time; a collective. Nothing where all ranks have the same."""
        if self._round is not None and self._round.num_steps:
            exchange, self._round.sketches = self.exchange.at(step - 1), None
            self._average_optimizers(self._average(exchange, exchange, shares_times=False)[0])

    def leave(self) -> None:
        """Restore DDP's broadcasts of buffers."""
        if not self.is_averaged and self.exchange.rank == 0:
            _log.warning(
                "the session ends in the middle of a round of local steps: each rank has parameters of its own; call "
                "session.average() on all ranks before"
            )
        self.models.broadcast_buffers()
        self._round = None

    def _average(self, exchange: Exchange, following: Exchange, *, shares_times: bool) -> tuple[float, EndedRound]:
        """End the round: all ranks get the mean, or make the outer step; returns this rank's weight in it as well."""
        assert self._round is not None, "no round"
        counts, num_steps, sketches = self._round.counts, self._round.num_steps, self._round.sketches
        layout, is_first = self.exchange.layout, self.exchange.rank == 0
        together = (self.exchange.rank,) if layout is None else layout.inside
        weight = sum(counts[rank] for rank in together) / sum(counts)
        step = StepExchange(exchange, following)
        beside = [each.cells for each in sketches.sketches] if sketches else []
        times, agreed = torch.zeros(self.exchange.world_size), torch.zeros(1)
        if shares_times:
            times[self.exchange.rank] = self._round.computed_s / max(self._round.num_timed, 1)
            beside.append(times)
        if not exchange.outer_rate:
            agreed[0] = self.agreement if is_first else 0.0
            beside.append(agreed)
        sent: list[tuple[ModelExchange, FlatBucket, BucketView, Sent]] = []
        for model, bucket in self._round.buckets:
            model.begin(step)
            view = bucket.moved(weight)
            sent.append((model, bucket, view, model.send(view, () if sent else beside)))
        for covered, model in zip(self.models.models, self.models.exchanges, strict=True):
            if covered in self.models.unshared:
                share_buffers(covered.modules_buffers, model, weight, is_first=is_first)
        for *_, under_way in sent:
            under_way.wait()
        for numbers in beside:
            self.exchange.sum_shards(numbers)
        self._move([each[:3] for each in sent], exchange if num_steps == exchange.every else MEAN, agreed.item())
        if following != exchange:  # another period moves another distance
            self._velocities.clear()
            self.agreement = 0.0
        self._round = None
        seconds: list[float] | None = times.tolist() if shares_times else None
        norms = sketches.norms() if sketches else NOT_MEASURED
        return weight, EndedRound(seconds, mean_counts(counts, num_steps), norms)

    def _move(
        self, moved: Sequence[tuple[ModelExchange, FlatBucket, BucketView]], exchange: Exchange, agreement: float
    ) -> None:
        """Move the parameters from where the round began, by these mean movements or by the outer step."""
        dot = squares = before = 0.0
        for model, bucket, view in moved:
            velocity = self._velocities.setdefault(model, Residuals()).of(view) if exchange.outer_momentum else None
            if velocity is not None and not exchange.outer_rate:
                dot += float(torch.dot(view.flat, velocity))
                squares += float(torch.dot(view.flat, view.flat))
                before += float(torch.dot(velocity, velocity))
            bucket.move(outer_step(exchange, view.flat, velocity, agreement))
        if before:
            self.agreement = agreement_after(agreement, dot, squares, before)

    def _average_optimizers(self, weight: float) -> None:
        """Average the state that any rank has, in the same order on all; counts become the largest one."""
        optimizers, pipeline = self.updates.optimizers, self.exchange.pipeline()
        places = sorted({place for each in self.gather(state_places(optimizers)) for place in each})
        under_way = []
        parameters = [list(_parameters(optimizer)) for optimizer in optimizers]
        for place in places:
            optimizer, parameter = optimizers[place.optimizer], parameters[place.optimizer][place.parameter]
            state = optimizer.state[parameter]
            if not isinstance(state.get(place.name), Tensor):  # zero where there was none
                on_device = bool(place.shape) or any(
                    group.get(flag) for group in optimizer.param_groups for flag in ("capturable", "fused")
                )
                device, dtype = parameter.device if on_device else torch.device("cpu"), getattr(torch, place.dtype)
                like = parameter if place.shape == parameter.shape else torch.empty(place.shape, device=device)
                state[place.name] = torch.zeros_like(like, dtype=dtype)  # of a shard another one
            tensor = local(state[place.name].detach())
            if not tensor.numel():
                continue
            dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
            value = tensor.to("cpu", dtype, copy=True)
            if place.shape:
                value = value.mul_(weight) if weight else value.zero_()
            leg = sum_plainly(value, self.exchange.nodes) if place.shape else just(Largest(value))
            under_way.append((tensor, value, pipeline.send(leg)))
        for tensor, value, sent in under_way:
            sent.wait()
            tensor.copy_(value)
