"""Which exchange is in effect on a step, and what carries it out: a codec per model, and a pipeline of two threads.

Two threads ("lanes") have groups of their own. The first collective of a bucket runs in the first lane, all that follow
in the second one: while the sums of a bucket come back, the next bucket is already on its way. Both take buckets in the
order in which the training thread sends them, the same on all ranks. When a collective fails in one lane, all groups of
both are broken: no rank or server waits for this rank longer than for one whose process has ended.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial, reduce
from itertools import chain
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from dynamix.runtime.extensions import Group, extension_names, load_extension
from dynamix.schemas.apportion import balanced_shares
from dynamix.schemas.messages.allocation import EXACT, SERVERS, Exchange
from dynamix.schemas.spelling import suggestion
from dynamix.trainer.data.plan import Schedule

from .codec import (
    BucketView,
    CodedSquares,
    ErrorFeedback,
    ExchangeCodec,
    Largest,
    Member,
    PlainExchange,
    Trade,
    chunks_of,
    just,
    leg_of,
    side_by_side,
    sum_together,
)
from .layout import Layout
from .narrow import Cast, Int8, NarrowExchange
from .nodes import (
    MEASURED,
    WORTHWHILE,
    NodeLeg,
    Nodes,
    Scope,
    Within,
    measured_s,
    sum_by_node,
    sum_plainly,
)
from .rows import RowsExchange
from .servers import GradientServers, ServedGroup
from .transport import LentTensor, break_group, keep_for_ever, launched, perform, timeout_of

_log = logging.getLogger("dynamix.trainer")

# --- which exchange, and which codec ---------------------------------------------------------------------------------

GROUP: Group = "dynamix.codecs"
"""Entry points of other packages' codecs: each names a class without arguments, like those here."""

CODECS: dict[str, Callable[[], ExchangeCodec]] = {
    "none": PlainExchange,
    "rows": RowsExchange,
    "bf16": lambda: NarrowExchange("bf16", Cast(torch.bfloat16)),
    "fp16": lambda: NarrowExchange("fp16", Cast(torch.float16)),
    "int8": lambda: NarrowExchange("int8", Int8()),
}
"""Codecs of the core, which are looked up first; an instance is made once per model."""


def exchange_codec(name: str) -> ExchangeCodec:
    """A new codec for one model.

    Raises:
        ValueError: when neither the core nor an installed package has the name, or what a package registers does not
            fit.
    """
    if name in CODECS:
        return CODECS[name]()
    found = load_extension(GROUP, name, _checked)
    if found is None:
        known = suggestion(name, [*CODECS, *extension_names(GROUP)])
        raise ValueError(
            f"exchange codec {name!r} is unknown: it is none of {', '.join(CODECS)}, and no installed package "
            f"registers it (group {GROUP}){known}"
        )
    return found


def _checked(found: object) -> ExchangeCodec:
    if not isinstance(found, ExchangeCodec):
        raise TypeError(f"{type(found).__name__} is not an exchange codec: it needs name, is_lossless and reduce(...)")
    if not found.is_lossless and not isinstance(found, ErrorFeedback):
        raise TypeError(f"{type(found).__name__} rounds: it must derive from {ErrorFeedback.__qualname__}")
    return found


def member_of(exchange: Exchange, rank: int, world_size: int, num_servers: int = 0) -> Member:
    """This rank in an exchange: without a route over owners it has no shares."""
    if exchange.route == SERVERS:
        shares = exchange.shares or balanced_shares((1.0,) * world_size, (1.0,) * num_servers)
        return Member(rank, world_size, shares, num_servers)
    if exchange.route != "shares":
        return Member(rank, world_size)
    return Member(rank, world_size, exchange.shares or (1.0,) * world_size)


class StepExchange(NamedTuple):
    """The exchange that is active in one step."""

    exchange: Exchange
    following: Exchange
    """Active in the next step, which all ranks know by now: a decision arrives two steps before it takes effect, or
    three where the last step before it has to do something (`margin_steps`)."""

    @property
    def is_local(self) -> bool:
        """Whether the step updates each rank's own parameters."""
        return self.exchange.every > 1

    @property
    def flushes(self) -> bool:
        """Whether the next one cannot send the residuals of this one: another codec, or of another quantity."""
        return self.exchange.codec != self.following.codec or self.is_local != (self.following.every > 1)


class ExchangePlan:
    """The exchanges of a job, step by step, and the pipeline that all its models share."""

    def __init__(
        self, schedule: Schedule, servers: GradientServers, nodes: Nodes | None = None, *, is_decided: bool
    ) -> None:
        """`is_decided`: whether the schedule's exchanges are carried out here, for the ranks of `servers`."""
        self._servers = servers
        self.rank, self.world_size, self.num_servers = servers.rank, servers.num_ranks, len(servers.addresses)
        self._schedule = schedule
        self._is_decided = is_decided and self.world_size > 1
        self.nodes = nodes if self._is_decided and not servers.addresses else None
        """Where ranks of a node sum among themselves first; `None` elsewhere."""
        self.layout: Layout | None = None
        """Where sharded models lie: their buckets are summed among the ranks with the same shard."""
        self._timeout: timedelta | None = None
        self._pipeline: Pipeline | None = None
        self.on_connect: Callable[[], None] = lambda: None
        """Called when the ranks have made new connections, on all of them in the same step."""

    def of_model(self, model: Module) -> "ModelExchange":
        """The exchange of a model's buckets; its group's time-out is that of the exchange."""
        group: Any = dist.group.WORLD
        if isinstance(model, DistributedDataParallel):
            group, model = model.process_group, model.module
        self._timeout = self._timeout or timeout_of(group)
        return ModelExchange(self, {parameter: name for name, parameter in model.named_parameters()})

    def measure_nodes(self, models: Sequence[torch.nn.Module]) -> None:
        """Keep the node level if sums of the first model's gradient are faster with it; a collective."""
        model = models[0]
        if self.nodes is None or not isinstance(model, DistributedDataParallel):
            return
        trained = [each for each in model.parameters() if each.requires_grad]
        most = sum(each.numel() for each in trained)
        numbers = torch.zeros(min(most, max(MEASURED)), device=trained[0].device)
        exchange = self.of_model(model)
        exchange.begin(StepExchange(EXACT, EXACT))

        def flat(length: int) -> None:
            model.process_group.allreduce([numbers[:length]]).wait()
            if numbers.is_cuda:
                torch.cuda.synchronize(numbers.device)

        def by_node(length: int) -> None:
            exchange.send(BucketView(0, numbers[:length], ())).wait()

        pipeline = self.pipeline()
        flat_s, by_node_s = measured_s((flat, by_node), lambda each: pipeline.send(just(Largest(each))).wait(), most)
        if by_node_s > WORTHWHILE * flat_s:
            self.nodes = None
        pipeline.close()
        self._pipeline = None  # made again for the first step, when `on_connect` is known
        if self.rank == 0:
            _log.info(
                "the ranks of a node %s gradients among themselves first: a sum takes %.3g ms, and %.3g without that",
                *("sum" if self.nodes else "do not sum", 1e3 * by_node_s, 1e3 * flat_s),
            )

    def of_step(self, step: int) -> StepExchange | None:
        """The exchange of a step, `None` for DDP's own all-reduce; a collective call on the first other step."""
        exchange = self.at(step)
        if exchange == EXACT and self.nodes is None:
            return None
        self.pipeline()
        return StepExchange(exchange, self.at(step + 1))

    def at(self, step: int) -> Exchange:
        """The exchange of a step, as far as it is carried out here."""
        return self._schedule.allocation_at(step).exchange if self._is_decided else EXACT

    def pipeline(self) -> "Pipeline":
        """The pipeline of collectives; the first call makes it, a collective."""
        if self._pipeline is None:
            columns = self.layout.columns if self.layout else ()
            self._pipeline = Pipeline(self._timeout, self._servers, self.nodes, columns)
            self.on_connect()
        return self._pipeline

    def sum_shards(self, numbers: Tensor) -> None:
        """Add up numbers on the CPU over the shards of a model, in place; nothing where a rank has it whole."""
        if self.layout is not None:
            launched(self.layout.shard_group.allreduce, [LentTensor(numbers).alias]).wait()

    @property
    def together(self) -> tuple[int, ...]:
        """The ranks that step as one in local steps: this one, or those of its node."""
        if self.layout is not None:
            return self.layout.inside
        return (self.rank,) if self.nodes is None else self.nodes.inside

    @property
    def peers(self) -> tuple[int, ...]:
        """The ranks that exchange with this one: those with the same shard, or the same place in their nodes."""
        if self.layout is not None:
            return self.layout.peers
        return tuple(range(self.world_size)) if self.nodes is None else self.nodes.peers

    @property
    def num_replicas(self) -> int:
        """Number that exchange gradients where those of a node sum them first; 0 where all ranks do."""
        return len(self.peers) if self.nodes or self.layout else 0

    def member(self, exchange: Exchange) -> Member:
        """This rank's part in an exchange among its peers."""
        peers = self.peers
        if self.nodes is not None:
            exchange = self.nodes.between(exchange)
        elif self.layout is not None and exchange.shares:
            shares = tuple(exchange.shares[rank] for rank in peers)
            exchange = replace(exchange, shares=shares if any(shares) else ())
        return member_of(exchange, peers.index(self.rank), len(peers), self.num_servers)

    def close(self) -> None:
        """End what runs in the background. No collective."""
        if self._pipeline is not None:
            self._pipeline.close()


class ModelExchange:
    """Sends the buckets of one model by the active exchange.

    Codecs are made when they are first in effect, and kept with what they learned.
    """

    def __init__(self, plan: ExchangePlan, keys: Mapping[Tensor, str]) -> None:
        self.keys = keys
        self.plan = plan
        self._codecs: dict[str, ExchangeCodec] = {}
        self._step: StepExchange | None = None
        self._member: Member

    def begin(self, step: StepExchange) -> None:
        """Begin a step: the buckets that follow are sent by its exchange."""
        if self._step is None or step.exchange != self._step.exchange:
            self._member = self.plan.member(step.exchange)
        self._step = step

    def send(self, bucket: BucketView, beside: Sequence[Tensor] = ()) -> "Sent":
        """Begin to sum a bucket over ranks, in place; all ranks send the same buckets in the same order.

        `beside`: a few numbers on the host, summed in place and without a codec by the messages of the bucket.
        """
        assert self._step is not None, "no exchange is in effect"
        codec = self._codec(self._step.exchange.codec)
        host = _host_copy(bucket.flat)
        sent = bucket if host is None else bucket._replace(flat=host)
        member, nodes = self._member, self.plan.nodes
        reduced = partial(leg_of, codec, member=member, flushes=self._step.flushes)
        chunks = chunks_of(codec, sent, member)
        legs: list[NodeLeg] = []
        if nodes is None:
            first, *others = map(reduced, chunks)
            legs += [side_by_side(first, sum_together(beside, member)) if beside else first, *others]
        else:
            cuts = not isinstance(codec, PlainExchange)
            legs += [sum_by_node(chunk, nodes, reduced, cuts=cuts) for chunk in chunks]
            legs += [sum_plainly(each, nodes) for each in beside]
        return self.plan.pipeline().send(*legs, back=None if host is None else (bucket.flat, host))

    def send_plainly(self, numbers: Tensor, *, inside: bool = False) -> "Sent":
        """Begin to add up numbers, in place and without a codec, behind the buckets sent so far.

        Over all ranks, or those `inside` of the node.
        """
        host = _host_copy(numbers)
        back = None if host is None else (numbers, host)
        leg = sum_plainly(numbers if host is None else host, self.plan.nodes, inside=inside)
        return self.plan.pipeline().send(leg, back=back)

    def coded(self) -> CodedSquares:
        """Squared norms of what lossy codecs have sent and should have sent."""
        return reduce(CodedSquares.and_more, (codec.coded for codec in self._lossy().values()), CodedSquares())

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
    """Pinned host copy of a GPU tensor, where codecs compute and gloo sends from; `None` for a CPU tensor."""
    return torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True).copy_(flat) if flat.is_cuda else None


# --- two threads -----------------------------------------------------------------------------------------------------

CLOSE_S = 2.0
"""Longest wait for a thread to end; it may wait for a dead rank until the time-out of its group."""


class Sent(NamedTuple):
    """Numbers on their way, in one part or several."""

    parts: list[Future[None]]
    back: tuple[Tensor, Tensor] | None
    """The tensor of a GPU that is summed, and its copy in the memory of the host."""

    def wait(self) -> None:
        """Return when the sum is in place; called in the training thread.

        Raises:
            RuntimeError: when it failed, or one before it: as from an all-reduce, training cannot continue.
        """
        for part in self.parts:
            if (error := part.exception()) is not None:
                raise RuntimeError(f"the exchange between the ranks failed: {error}") from error
        if self.back is not None:
            flat, host = self.back
            flat.copy_(host)


_Task = tuple[NodeLeg, Future[None]]


@dataclass(eq=False)
class _Lane:
    """A thread, its tasks, and its process groups."""

    groups: dict[Scope, dist.ProcessGroup]
    served: ServedGroup | None
    tasks: "SimpleQueue[_Task | None]" = field(default_factory=SimpleQueue)
    thread: threading.Thread = field(init=False)


class Pipeline:
    """Two threads with a process group each; all ranks make it at the same point and send the same buckets."""

    def __init__(
        self,
        timeout: timedelta | None = None,
        servers: GradientServers | None = None,
        nodes: Nodes | None = None,
        columns: Sequence[tuple[int, ...]] = (),
    ) -> None:
        """A collective call of all ranks; `timeout` is that of the groups: of all ranks, or one for each of `columns`.

        Raises:
            RuntimeError: when a server cannot be reached, or does not join.
        """
        make: Any = dist.new_subgroups_by_enumeration  # without types in torch
        columns = columns or [tuple(range(dist.get_world_size()))]
        groups = [make(columns, timeout, "gloo")[0] for _ in range(2)]
        served: list[ServedGroup] | list[None] = [None, None]
        if servers is not None and servers.addresses:
            served = servers.join(groups[0], timeout)
        self._lanes = [
            _Lane({"all": group, **(nodes.groups(timeout) if nodes else {})}, of_lane)
            for group, of_lane in zip(groups, served, strict=True)
        ]
        self._error: BaseException | None = None
        """The first error, in either thread; later ones are consequences."""
        self._lock = threading.Lock()
        for number, (lane, following) in enumerate(zip(self._lanes, (self._lanes[1], None), strict=True)):
            lane.thread = threading.Thread(
                target=self._run, args=(lane, following), name=f"dynamix exchange {number}", daemon=True
            )  # a daemon: a process that fails must not wait for a rank that is gone
            lane.thread.start()

    def send(self, *legs: NodeLeg, back: tuple[Tensor, Tensor] | None = None) -> Sent:
        """Carry out legs behind all that were sent before them; `back` as in `Sent`."""
        parts: list[Future[None]] = []
        for leg in legs:
            parts.append(Future())
            self._lanes[0].tasks.put((leg, parts[-1]))
        return Sent(parts, back)

    def close(self) -> None:
        """End the threads and leave the groups, where nothing is under way in them. No collective."""
        for lane in self._lanes:
            lane.tasks.put(None)
            lane.thread.join(CLOSE_S)
        lanes, self._lanes = self._lanes, []
        for lane in lanes:
            if lane.thread.is_alive():
                keep_for_ever(lane)
            else:
                for group in lane.groups.values():
                    with contextlib.suppress(ValueError):  # the script has destroyed it, with all others
                        dist.destroy_process_group(group)

    def _run(self, lane: _Lane, following: _Lane | None) -> None:
        """Carry out tasks; after the first failure in either thread every task fails, because ranks are out of step."""
        while (task := lane.tasks.get()) is not None:
            leg, under_way = task
            failed = self._error
            if failed is None:
                try:
                    _carry_out(task, lane, following)
                except BaseException as error:  # noqa: BLE001 - the training thread raises it
                    with self._lock:
                        is_first, self._error = self._error is None, self._error or error
                        failed = self._error
                    if is_first:
                        served = [each.served.group for each in self._lanes if each.served is not None]
                        for group in chain(*(each.groups.values() for each in self._lanes), served):
                            break_group(group)
            if failed is not None:
                leg.close()
                under_way.set_exception(failed)
            del task, leg, under_way  # else they live until the next task comes
        if self._error is None and lane.served is not None:
            try:
                lane.served.leave()
            except RuntimeError as error:
                _log.warning("a gradient server was gone before it was told of the end of the job: %s", error)


def _carry_out(task: _Task, lane: _Lane, following: _Lane | None) -> None:
    """Carry out a leg, or if there is a lane for those that follow its first collective over links; waits for them."""
    leg, under_way = task
    for collective in leg:
        if isinstance(collective, Trade) and collective.served_sizes:
            assert lane.served is not None, "there are no servers"
            perform(collective, lane.served.trade(collective))
        else:
            within = collective if isinstance(collective, Within) else Within("all", collective)
            perform(within.collective, lane.groups[within.scope])
            if within.scope == "node":
                continue
        if following is not None:
            following.tasks.put(task)  # from here on it is the other lane's
            return
    under_way.set_result(None)
