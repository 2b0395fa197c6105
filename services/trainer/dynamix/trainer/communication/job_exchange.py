"""The exchanges of a job: which rules a step, and the pipeline that all models share."""

from collections.abc import Callable
from datetime import timedelta

from torch.nn.parallel import DistributedDataParallel

from dynamix.schemas.messages.allocation import EXACT, EXCHANGE_CODECS, LOSSY_CODECS, Exchange
from dynamix.trainer.data.plan import Schedule

from .gradient_servers import GradientServers
from .model_exchange import ModelExchange, StepExchange
from .pipeline import Pipeline, timeout_of


class JobExchange:
    """What decisions say about how gradients travel, step by step."""

    def __init__(self, schedule: Schedule, servers: GradientServers, *, is_decided: bool) -> None:
        """`is_decided` says whether the schedule's exchanges are to be carried out here, for the ranks of `servers`."""
        self._servers = servers
        self.world_size = world_size = servers.num_ranks
        self._schedule = schedule
        self.rank = servers.rank
        self._is_decided = is_decided and world_size > 1
        self._timeout: timedelta | None = None
        self._pipeline: Pipeline | None = None
        self.on_connect: Callable[[], None] = _nothing
        """Called when the ranks have made new connections, on all of them in the same step."""

    def of_model(self, model: DistributedDataParallel) -> ModelExchange:
        """What sends the buckets of a model; its group's time-out is that of the exchange."""
        self._timeout = self._timeout or timeout_of(model.process_group)
        keys = {parameter: name for name, parameter in model.module.named_parameters()}
        return ModelExchange(self.rank, self.world_size, keys, self.pipeline, len(self._servers.addresses))

    def ruling(self, step: int) -> StepExchange | None:
        """What rules a step, `None` for DDP's own all-reduce; a collective call where it is the first one that rules.

        What rules the next step is known by then: a decision arrives two steps before it rules, or three where the
        last step before it has to do something (`margin_steps`).
        """
        exchange = self.at(step)
        if exchange == EXACT:
            return None
        self.connect()
        if exchange.codec in EXCHANGE_CODECS and exchange.codec not in LOSSY_CODECS:
            return StepExchange(exchange)
        return StepExchange(exchange, flushes=not keeps_residuals(exchange, self.at(step + 1)))

    def connect(self) -> None:
        """Make the pipeline where there is none yet; a collective."""
        if self._pipeline is None:
            self._pipeline = Pipeline(self._timeout, self._servers)
            self.on_connect()

    def at(self, step: int) -> Exchange:
        """How the schedule lets gradients travel in a step, as far as it is carried out here."""
        return self._schedule.allocation_at(step).exchange if self._is_decided else EXACT

    def close(self) -> None:
        """End what runs in the background. No collective."""
        if self._pipeline is not None:
            self._pipeline.close()

    def pipeline(self) -> Pipeline:
        """What carries out collectives, once an exchange ruled."""
        assert self._pipeline is not None, "no exchange ruled yet"
        return self._pipeline


def keeps_residuals(exchange: Exchange, following: Exchange) -> bool:
    """Whether what one exchange has not sent yet can be sent by the next one: in the same codec, of the same thing."""
    return exchange.codec == following.codec and (exchange.every > 1) == (following.every > 1)


def _nothing() -> None:
    """What is called until there is something to call."""
