"""Plan: which exchange is in effect on a step, and the codecs of each model that carry it out."""

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from dynamix.schemas.apportion import balanced_shares
from dynamix.schemas.messages.allocation import EXACT, SERVERS, Exchange
from dynamix.trainer.data.plan import Schedule
from dynamix.trainer.exchange.codec import BucketView, CodedSquares, ErrorFeedback, ExchangeCodec, Member, legs_of

from .codecs import exchange_codec
from .collectives import Sum, just
from .pipeline import Pipeline, UnderWay
from .servers import GradientServers
from .transport import timeout_of


class StepExchange(NamedTuple):
    """The exchange of one step."""

    exchange: Exchange
    flushes: bool = False
    """Whether another codec, or none, is active on the next step: then residuals are sent with this gradient."""


class ExchangePlan:
    """The exchanges of a job, step by step, and the pipeline that all its models share."""

    def __init__(self, schedule: Schedule, servers: GradientServers, *, is_decided: bool) -> None:
        """`is_decided`: whether the schedule's exchanges are carried out here, for the ranks of `servers`."""
        self._servers = servers
        self.world_size = world_size = servers.num_ranks
        self._schedule = schedule
        self.rank = servers.rank
        self._is_decided = is_decided and world_size > 1
        self._timeout: timedelta | None = None
        self._pipeline: Pipeline | None = None
        self.on_connect: Callable[[], None] = lambda: None
        """Called when the ranks have made new connections, on all of them in the same step."""

    def of_model(self, model: DistributedDataParallel) -> "ModelExchange":
        """The exchange of a model's buckets; its group's time-out is that of the exchange."""
        self._timeout = self._timeout or timeout_of(model.process_group)
        keys = {parameter: name for name, parameter in model.module.named_parameters()}
        return ModelExchange(self, keys)

    def of_step(self, step: int) -> StepExchange | None:
        """The exchange of a step, `None` for DDP's own all-reduce; a collective call on the first other step.

        That of the next step is known by then: a decision arrives two steps before it takes effect, or three where the
        last step before it has to do something (`margin_steps`).
        """
        exchange = self.at(step)
        if exchange == EXACT:
            return None
        self.connect()
        return StepExchange(exchange, flushes=not keeps_residuals(exchange, self.at(step + 1)))

    def member(self, exchange: Exchange) -> Member:
        """This rank in an exchange."""
        return member_of(exchange, self.rank, self.world_size, len(self._servers.addresses))

    def connect(self) -> None:
        """Make the pipeline if there is none yet; a collective."""
        if self._pipeline is None:
            self._pipeline = Pipeline(self._timeout, self._servers)
            self.on_connect()

    def at(self, step: int) -> Exchange:
        """The exchange of a step, as far as it is carried out here."""
        return self._schedule.allocation_at(step).exchange if self._is_decided else EXACT

    def close(self) -> None:
        """End what runs in the background. No collective."""
        if self._pipeline is not None:
            self._pipeline.close()

    def pipeline(self) -> Pipeline:
        """The pipeline of collectives, once an exchange was in effect."""
        assert self._pipeline is not None, "no exchange was in effect yet"
        return self._pipeline


def keeps_residuals(exchange: Exchange, following: Exchange) -> bool:
    """Whether the next exchange can send the residuals of this one: the same codec, of the same quantity."""
    return exchange.codec == following.codec and (exchange.every > 1) == (following.every > 1)


def member_of(exchange: Exchange, rank: int, world_size: int, num_servers: int = 0) -> Member:
    """This rank in an exchange: without a route over owners it has no shares."""
    if exchange.route == SERVERS:
        shares = exchange.shares or balanced_shares((1.0,) * world_size, (1.0,) * num_servers)
        return Member(rank, world_size, shares, num_servers)
    if exchange.route != "shares":
        return Member(rank, world_size)
    return Member(rank, world_size, exchange.shares or (1.0,) * world_size)


class Sent:
    """Numbers on their way, in one part or several; of a GPU through the memory of its host.

    Codecs compute there, and gloo sends from there.
    """

    __slots__ = ("_flat", "_host", "_parts")

    def __init__(self, parts: list[UnderWay], flat: Tensor, host: Tensor | None) -> None:
        self._parts, self._flat, self._host = parts, flat, host

    def wait(self) -> None:
        """Return when the sum is in place. Raises as `UnderWay.wait`."""
        for part in self._parts:
            part.wait()
        if self._host is not None:
            self._flat.copy_(self._host)


class ModelExchange:
    """Sends the buckets of one model by the active exchange.

    Codecs are made when they are first in effect, and kept with what they learned.
    """

    def __init__(self, plan: ExchangePlan, keys: Mapping[Tensor, str]) -> None:
        """`keys` names the parameters."""
        self.keys = keys
        self._plan = plan
        self._codecs: dict[str, ExchangeCodec] = {}
        self._step: StepExchange | None = None
        self._member = plan.member(EXACT)

    def begin(self, step: StepExchange) -> None:
        """Begin a step: the buckets that follow are sent by its exchange."""
        if self._step is None or step.exchange != self._step.exchange:
            self._member = self._plan.member(step.exchange)
        self._step = step

    def send(self, bucket: BucketView) -> Sent:
        """Begin to sum a bucket over ranks, in place; all ranks send the same buckets in the same order."""
        assert self._step is not None, "no exchange is in effect"
        codec = self._codec(self._step.exchange.codec)
        host = _host_copy(bucket.flat)
        sent = bucket if host is None else bucket._replace(flat=host)
        if self._step.flushes and isinstance(codec, ErrorFeedback):
            legs = [codec.residuals.flush(sent, self._member)]
        else:
            legs = legs_of(codec, sent, self._member)
        return Sent([self._plan.pipeline().send(leg) for leg in legs], bucket.flat, host)

    def send_plainly(self, numbers: Tensor) -> Sent:
        """Begin to add up numbers over ranks, in place and without a codec, behind the buckets sent so far."""
        host = _host_copy(numbers)
        return Sent([self._plan.pipeline().send(just(Sum(numbers if host is None else host)))], numbers, host)

    def coded(self) -> CodedSquares:
        """Squared norms of what lossy codecs have sent and should have sent."""
        found = CodedSquares()
        for codec in list(self._lossy().values()):
            found = found.and_more(codec.coded)
        return found

    def residuals(self) -> dict[str, dict[str, Tensor]]:
        """This rank's residuals, by codec and parameter; copies on the CPU."""
        copied = {
            name: {key: each.cpu().clone() for key, each in codec.residuals.by_key().items()}
            for name, codec in self._lossy().items()
        }
        return {name: parts for name, parts in copied.items() if any(bool(each.any()) for each in parts.values())}

    def load_residuals(self, saved: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Go on from what `residuals` returned."""
        for name, parts in saved.items():
            codec = self._codec(name)
            if isinstance(codec, ErrorFeedback):
                codec.residuals.load(parts)

    def _lossy(self) -> dict[str, ErrorFeedback]:
        return {name: codec for name, codec in self._codecs.items() if isinstance(codec, ErrorFeedback)}

    def _codec(self, name: str) -> ExchangeCodec:
        if name not in self._codecs:
            self._codecs[name] = exchange_codec(name)
        return self._codecs[name]


def _host_copy(flat: Tensor) -> Tensor | None:
    """A tensor of a GPU in the memory of its host, once the device has computed it; `None` for one of the CPU."""
    return torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True).copy_(flat) if flat.is_cuda else None
