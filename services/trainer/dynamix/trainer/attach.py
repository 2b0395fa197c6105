"""`attach`: puts a session together around a user's model, optimizer and data set."""

import gc
import logging
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Literal, Unpack
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore  # public, missing in the stubs of dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from dynamix.runtime.settings import BusSettings, node_name
from dynamix.schemas.messages.allocation import Exchange, ExchangePermission, Explored, GlobalBatch
from dynamix.trainer.bus_client.transport import Transport
from dynamix.trainer.data.loader import (
    PREFETCH_FACTOR,
    CountTokens,
    Loader,
    LoaderOptions,
    check_loader_options,
)
from dynamix.trainer.data.orders import DataIdentity, DistributedOrders, OwnSampler, Permutations
from dynamix.trainer.data.plan import Division
from dynamix.trainer.data.source import source_of
from dynamix.trainer.exchange.layout import Layout
from dynamix.trainer.exchange.nodes import Nodes
from dynamix.trainer.exchange.plan import ExchangePlan, ModelExchange
from dynamix.trainer.exchange.servers import GradientServers
from dynamix.trainer.gradient.clock import Clock, DeviceClock
from dynamix.trainer.gradient.hook import BaseHook, CoveredModels, GradientHook, Reduction, StepWeights
from dynamix.trainer.gradient.learning_rate import FACTORS, Rule, Schedulers, Updates
from dynamix.trainer.gradient.losses import WEIGHTED, LossWarnings
from dynamix.trainer.gradient.models import (
    Averaging,
    Weighting,
    averaging_of,
    check_accumulation,
    is_replicated,
    needs_equal_steps,
    unwrapped,
    unwrapped_optimizer,
    world_size_of,
)
from dynamix.trainer.job.identity import (
    Attempt,
    JobIdentity,
    Peer,
    Place,
    attempt_of,
    check_alike,
    hosts_of,
    merge_caps,
    nodes_of,
    propose_job,
    read_caps,
)
from dynamix.trainer.job.options import (
    JobOptions,
    options_of,
    warn_of_missing_bus,
    warn_of_momentum,
    warn_of_policy,
)
from dynamix.trainer.local_steps import LocalSteps
from dynamix.trainer.loggers import MetricHistory, MetricLogger, find_loggers
from dynamix.trainer.measurement.memory import MemorySearch
from dynamix.trainer.measurement.meter import RankMeter
from dynamix.trainer.measurement.sockets import PeerSockets, default_store, this_process
from dynamix.trainer.steering.collectives import Collectives
from dynamix.trainer.steering.run import Run
from dynamix.trainer.steering.steering import Steering

from .groups import GroupHook, Groups
from .session import Gradients, Session, while_it_lives
from .settings import Environment, read_environment

_log = logging.getLogger("dynamix.trainer")

SPARE_STEPS = 2
"""Steps by which an action is broadcast earlier than prefetching alone demands."""


def attach(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    data: Dataset[Any] | DataLoader[Any],
    *,
    local_batch_size: int | Sequence[int] | None = None,
    global_batch: GlobalBatch = "fixed",
    micro_batch_size: int | None = None,
    gradient_accumulation_steps: int = 1,
    look_ahead: int = 0,
    name: str | None = None,
    family: str | None = None,
    explores: Sequence[Explored] = (),
    window_steps: int | None = None,
    min_local_batch_size: int | None = None,
    max_local_batch_size: int | Literal["auto"] | None = None,
    max_lag_windows: int = 4,
    base_global_batch_size: int | None = None,
    learning_rate_rule: Rule = "sqrt",
    reduction: Reduction = "mean",
    weighting: Weighting = "auto",
    base_hook: BaseHook | None = None,
    exchange: ExchangePermission | Exchange = "exact",
    policy: str | None = None,
    policy_options: Mapping[str, float | str] | None = None,
    manager: Any = None,
    seed: int | None = None,
    shuffle: bool | None = None,
    drop_last: bool | None = None,
    sampler: OwnSampler | None = None,
    token_counts: Sequence[int] | None = None,
    count_tokens: CountTokens | None = None,
    noise_every: int = 10,
    memory_caps_path: str | Path | None = None,
    connect: BusSettings | Literal[False] | None = None,
    loggers: str | Sequence[str | MetricLogger] = (),
    **loader_options: Unpack[LoaderOptions],
) -> Session:
    """Attach to a training job; a collective call, after `init_process_group` and wrapping the model.

    `session, loader = attach(model, optimizer, loader)` takes over the script's own loader; the loop stays as it is. A
    step ends when the optimizer has stepped; `session.step(loss)` reports a loss. Each loop over the loader is an
    epoch. Without a bus, or without an action, the job keeps its sizes. A single process needs no process group.

    Args:
        model: a `DistributedDataParallel` model, a sharded one (FSDP2; FSDP1 with `session.scale_loss`), or one whose
            gradients a framework averages over ranks (`weighting="loss"`); several as a list. Wrappers of
            `torch.compile` and frameworks are removed.
        optimizer: its learning rates are scaled for the samples of each step, by `learning_rate_rule`; or a list.
        data: the script's `DataLoader`, whose data set, batch size, sampler, `drop_last`, workers, `collate_fn` and
            `generator` stay: of equal batches each rank has the samples of plain training, without those that a
            `DistributedSampler` repeats to fill up (a `RandomSampler` draws another order, for a resumed run to draw it
            again). Or a data set, for a new script that loops over `session.loader`:
            map-style, with a length, or a stream (`IterableDataset`), which every rank reads as a whole. The same on
            all ranks.
        local_batch_size: initial samples per rank and step: one number, or one per rank. Default: those of the loader.
        global_batch: `fixed` keeps the sum of the sizes; only its division over the ranks follows their speeds. With
            `adaptive` the policy also changes the sum: schedules and loops that count steps then need
            `session.schedule`, `session.progress` and `session.num_reference_steps`.
        micro_batch_size: most samples in one batch, to bound memory. If a rank's share of a step is larger, it comes in
            several batches; call `optimizer.step()` only if `session.sync_gradients`. Do not divide the loss by the
            number of batches: gradients would be too small, which cannot be detected.
        gradient_accumulation_steps: exact number of batches of each rank in a step, for a script that divides each loss
            by it, as frameworks do; instead of `micro_batch_size`.
        look_ahead: batches that the script fetches before `session.step()` of the previous one, as prefetchers do.
        name: name of the job on the bus, `[a-z0-9-]`; a run id is added. Default: the script's file name under
            `dynamix train`, else `training`. `dynamix train --name` and `DYNAMIX_JOB` override it.
        family: name of a family of recurring runs, or `auto` for a fingerprint of script, model, optimizer and data. A
            run starts from what earlier runs of its family learned, if the policy supports it (`rule`), and drops it
            when its first windows disagree. Default: no family.
        explores: what runs of the family may try out, in two runs at most: `learning_rate` (a factor on the
            optimizer's). Runs are compared by `session.evaluated`; a run that falls behind by a quarter returns to the
            best known factor.
        window_steps: k, the steps of a window. Default: 10, or a multiple if the loader draws further ahead; after the
            first windows up to 16 times that, so that they last a second.
        min_local_batch_size: lower bound of decisions; 0 permits ranks without samples. Default: one sample in each
            batch, or two if the model has BatchNorm.
        max_local_batch_size: upper bound of decisions. Default: twice the largest initial size, or at least 1024 with
            an adaptive global batch. `auto`: what fits each GPU's memory, by what the first three steps need.
        max_lag_windows: older actions, by windows, are refused.
        base_global_batch_size: global batch size that the learning rate was chosen for. Default: the initial sum.
        learning_rate_rule: `sqrt`, `linear` or `none`, of the global batch size over `base_global_batch_size`.
        reduction: how the loss combines its samples, `mean` or `sum`.
        weighting: `hook` (DDP, FSDP2 on CPUs), `loss` (call `session.scale_loss`), or `auto` by the model's type.
        base_hook: your own DDP communication hook, called with None as its state: bind a state by `functools.partial`.
            It must average over ranks, as torch's do.
        exchange: what decisions may do to the gradient exchange: `exact` permits other routes and lossless codecs,
            `lossy` also rounding, with the error added to the next step's gradient, `local` also several steps between
            two averagings. An `Exchange` sets it for the whole run instead. It needs our own hook, under
            FSDP2 on a mesh inside of each node.
        policy: name of the policy. Default: `split`, or `rule` with an adaptive global batch. Under both the ranks
            divide the global batch by their measured speeds from the first step on, with or without a bus; under
            `static` nothing changes.
        policy_options: options of the policy: numbers, or names (`codec`, `route`).
        manager: torchft's `Manager`, whose replica groups may come and go: each is one process with plain models.
            Name `base_global_batch_size`, and call `optimizer.step()` only if `manager.should_commit()`.
        seed: beside a data set or of a stream, random seed of the order of the samples. Default: 0.
        shuffle: beside a data set, False uses the samples in its order.
        drop_last: beside a data set, omit the end of an epoch that does not fill a step.
        sampler: beside a data set, order of each epoch: a function from the epoch's number to indices, or a sampler of
            torch (weighted, class-balanced, a subset); called in rank 0, for all ranks. An epoch has as many samples as
            it draws, and `shuffle` is ignored.
        token_counts: tokens of each sample that count in its loss, in the data set's order: batches are then made by
            tokens, and every size, bound and report is in tokens.
        count_tokens: number of tokens of a batch that count in its loss, for example
            `lambda batch: (batch["labels"] != -100).sum()`; sizes stay in samples.
        noise_every: steps between two measurements of the gradient noise, after 20 of which each is measured; a
            measurement costs two passes over the gradient.
        memory_caps_path: path beside your checkpoint, at which a rank that ran out of memory stores its bound.
        connect: the bus. None: the one that `DYNAMIX_NATS_...` variables name, as `dynamix train` sets them; without
            any the job has no bus, opens no connection and no thread. False: no bus.
        loggers: receivers of each window's metrics in global rank 0: `tensorboard`, `wandb`, `mlflow`, `csv`, `jsonl`,
            names registered in the entry-point group `dynamix.loggers`, or objects with `log(metrics, *, step)` and
            `close()` such as those of `dynamix.extras.loggers`.
        loader_options: beside a data set, for `torch.utils.data.DataLoader`: num_workers, prefetch_factor, collate_fn,
            pin_memory, ...

    Raises:
        TypeError: for an argument that is unknown.
        ValueError: for what cannot work, naming the value, the limit and how to fix it.
        RuntimeError: when torch.distributed is not initialised, or the model has a communication hook already.
    """
    given = dict(locals())
    models = [unwrapped(each) for each in (model if isinstance(model, Sequence) else [model])]
    optimizers = [unwrapped_optimizer(each) for each in (optimizer if isinstance(optimizer, Sequence) else [optimizer])]
    if not models or not optimizers:
        raise ValueError("attach needs at least one model and one optimizer")
    environment = read_environment()
    groups = None if manager is None else Groups(manager, given, attach.__kwdefaults__ or {}, models, optimizers)
    world_size = world_size_of(models, environment.launch.world_size) if groups is None else groups.group.size()
    averaging: Averaging = averaging_of(models, weighting, world_size) if groups is None else "hook"
    # The first DDP model imports torch._dynamo, which leaves its frames in a cycle (`torch.fx.wrap`), and with them
    # those of all callers: what they name, such as the model and its group, would live to the end of the process.
    gc.collect()
    check_loader_options(loader_options, look_ahead, attach.__annotations__)
    source = source_of(given, loader_options, world_size if groups is None else 1)  # each group draws for itself
    dataset, orders, loader_options = source.dataset, source.orders, source.options
    given |= {**source._asdict(), "shuffle": orders.identity.shuffle, "seed": seed or 0, "groups": groups}
    drawn_ahead = loader_options.get("num_workers", 0) * (loader_options.get("prefetch_factor") or PREFETCH_FACTOR)
    options = options_of(
        *(given, models, optimizers),
        averaging=averaging,
        world_size=world_size,
        margin_steps=drawn_ahead + look_ahead + SPARE_STEPS,
        policy=environment.trainer.policy,
        gradient_servers=environment.trainer.gradient_servers,
    )
    if groups is not None:
        groups.check_options(options, orders)
    metric_loggers = find_loggers(
        loggers, rank=groups.group.rank() if groups else dist.get_rank() if world_size > 1 else 0
    )
    if token_counts is not None:
        most = options.max_local_batch_size
        orders.count_by_tokens(token_counts, dataset, most=min(most, micro_batch_size or most))
    if options.accumulates:
        check_accumulation(averaging, models, counts_in_batches=count_tokens is not None)
    caps_path = None if memory_caps_path is None else Path(memory_caps_path)
    if not (connect is None or connect is False or isinstance(connect, BusSettings)):
        raise TypeError(
            f"connect={connect!r} is of type {type(connect).__name__}: leave connect out and set DYNAMIX_NATS_URL, "
            "pass dynamix.runtime.settings.BusSettings(url=...), or pass False to train without a bus"
        )
    bus = environment.bus if connect is None else connect or None
    device = next(models[0].parameters()).device
    meet = partial(meet_ranks, name=name, caps_path=caps_path, environment=environment, bus=bus, groups=groups)
    collectives, sockets, identity, place = meet(options=options, data=orders.identity)
    search = MemorySearch(device) if max_local_batch_size == "auto" else None
    run = Run(options=options, data=orders.identity, place=place, identity=identity, search=search)
    if place.rank == 0:
        if connect is None and bus is None:
            warn_of_missing_bus(options)
        if shuffle is False and sampler is None:
            _warn_of_sampler(sys._getframe(1))  # noqa: SLF001 - the script; reading its f_locals keeps what is in them alive
        warn_of_momentum(options, optimizers)
    orders.connect(collectives if groups is None else Collectives(), dataset, loader_options)
    loader = Loader(
        *(source, run.schedule),
        division=Division(place.rank, micro_batch_size, needs_equal_steps(models), gradient_accumulation_steps),
        shares_tail=global_batch == "adaptive",
        look_ahead=look_ahead,
        count_tokens=count_tokens,
    )
    clock: Clock = DeviceClock() if device.type == "cuda" else Clock()
    gradients = _gradients(
        *(given, models, optimizers),
        run=run,
        loader=loader,
        clock=clock,
        collectives=collectives,
        averaging=averaging,
        measures_nodes=environment.trainer.nodes == "auto",
    )
    meter = RankMeter(
        rank=place.rank,
        local_rank=place.local_rank,
        clock=clock,
        sockets=sockets,
        device=device,
        reduction=reduction,
        times_split=averaging == "hook",
        learning_rate=gradients.updates.newest_rate,
        coded=gradients.models.coded,
    )

    make_transport = partial(_transport_of, run, bus, environment)
    if groups is not None:
        groups.meet, groups.make_transport = meet, make_transport
    steering = Steering(
        run=run,
        meter=meter,
        sampler=loader.plans,
        collectives=collectives,
        transport=make_transport(),
        history=MetricHistory(metric_loggers),
        losses=gradients.models.losses,
        says_summary=environment.trainer.summary,
    )
    gradients.models.exchange.on_connect = while_it_lives(steering.expect_sockets)
    return Session(
        *(steering, loader, gradients),
        caps_path=caps_path,
        close_timeout_s=environment.trainer.close_timeout_s,
        may_restart=environment.launch.restart_count < environment.launch.max_restarts,
        groups=groups,
    )


def _warn_of_sampler(caller: FrameType) -> None:
    """Warn of shuffle=False in a script that knows a sampler which shuffles."""
    names = (*caller.f_globals.values(), *caller.f_locals.values())
    if any(DistributedSampler in (name, type(name)) for name in names):
        _log.warning(
            "shuffle=False uses the samples in the data set's order in every epoch, but this script knows a "
            "DistributedSampler, beside which a DataLoader has shuffle=False although it shuffles: leave "
            "shuffle=False out of attach to shuffle as it does"
        )


def _transport_of(run: Run, bus: BusSettings | None, environment: Environment) -> Transport:
    """The transport of this rank's place: the first rank of each node reports, rank 0 also listens."""
    place = run.place
    if bus is None or place.local_rank > 0:
        return Transport()
    from .bus_client.client import BusClient  # noqa: PLC0415 - with it nats: 40 ms that a job without a broker saves

    client = BusClient(
        bus,
        node=place.node,
        outbox_messages=environment.trainer.outbox_messages,
        actions_of=run.identity.job if place.rank == 0 else None,
        traces_of=run.identity.job if run.traces is not None else None,
    )
    client.start()
    return client


def _gradients(
    given: Mapping[str, Any],
    models: Sequence[torch.nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    run: Run,
    loader: Loader,
    clock: Clock,
    collectives: Collectives,
    averaging: Averaging,
    measures_nodes: bool,
) -> Gradients:
    """Make the parts that weight, exchange and apply gradients; `given` are further arguments of `attach`."""
    options, is_first = run.options, run.place.rank == 0
    by_samples = given["count_tokens"] is None and given["token_counts"] is None
    servers = GradientServers(options.gradient_servers, run.identity.job, run.place.rank, collectives.world_size)
    is_ddp = all(isinstance(each, DistributedDataParallel) for each in models)
    nodes = Nodes.among(run.identity.hosts, run.place.rank) if is_ddp else None
    is_decided = options.supports_tracking and all(map(is_replicated, models))
    exchanges = ExchangePlan(run.schedule, servers, nodes, is_decided=is_decided)
    losses, sizes = None, options.local_batch_sizes
    if is_first and len(sizes) > 1 and (options.policy != "static" or len(set(sizes)) > 1):
        losses = LossWarnings(
            is_sum=options.reduction == "sum",
            weighs_samples=by_samples,
            is_joint=needs_equal_steps(models),
            has_equal_data=options.shuffle and isinstance(loader.plans.orders, Permutations | DistributedOrders),
            is_in_parts=options.micro_batch_size is not None,
        )
        losses.look_at_modules([*models, *(each for each in gc.get_objects() if issubclass(type(each), WEIGHTED))])
    weights = StepWeights(
        None if given["count_tokens"] is None else collectives.post_total,
        # samples of one batch of one rank, as the script was written: N in a step where it divides each loss by N
        base_size=options.base_global_batch_size / len(sizes) / options.gradient_accumulation_steps
        if options.reduction == "sum"
        else None,
    )

    groups = given["groups"]
    base_hook, met = given["base_hook"], list[type]()  # a circle through what is given would keep the group alive

    def make_hook(model: torch.nn.Module, exchange: ModelExchange) -> GradientHook:
        """The hook of a model; of a sharded one a collective."""
        shared: dict[str, Any] = {
            "group": getattr(model, "process_group", dist.group.WORLD),
            "model_exchange": exchange,
            "clock": clock,
            "weights": weights,
            "reduction": options.reduction,
            "base_hook": base_hook,
            "losses": losses,
        }
        if groups is not None:
            trained = [each for each in model.parameters() if each.requires_grad]
            return GroupHook(**shared | {"group": groups}, parameters=trained)
        layout = None if isinstance(model, DistributedDataParallel) else Layout.of(model)
        assert not isinstance(layout, str), "refused before"
        layout = layout and layout.met(model, collectives.gather_objects)
        copies = layout if layout and layout.peers else None
        if met and (copies and copies.peers) != (exchanges.layout and exchanges.layout.peers):
            raise ValueError("models with a copy on each node and others exclude each other: attach them on their own")
        exchanges.layout = copies
        met.append(type(model))
        if layout is None:
            return GradientHook(**shared)
        from .gradient.shards import ShardHook  # noqa: PLC0415 - DDP needs none

        return ShardHook(layout=layout, **shared)

    covered_models = CoveredModels(
        make_hook=make_hook if averaging == "hook" else None,
        reduction=options.reduction,
        weights=weights,
        exchange=exchanges,
        weighs_alone=averaging == "none" and (options.accumulates or options.reduction == "sum"),
        losses=losses,
        check_commit=None if groups is None else groups.check_update,
    )
    schedulers = Schedulers()

    def before_update() -> None:
        clock.before_update()
        run.before_update()
        covered_models.check_gradients()

    updates = Updates(
        loader=loader,
        prepare=before_update,
        factor=lambda samples: FACTORS[options.learning_rate_rule](samples / run.options.base_global_batch_size),
        warns=is_first,
        schedulers=schedulers if options.global_batch == "adaptive" and is_first else None,
    )
    for model in models:
        covered_models.cover(model)
    for optimizer in optimizers:
        updates.cover(optimizer)
    covered_models.refuse_others()
    if measures_nodes:
        exchanges.measure_nodes(models)
    run.use_identity(run.identity._replace(num_replicas=exchanges.num_replicas))
    local_steps = LocalSteps(
        *(exchanges, covered_models, updates, collectives.gather_objects, options.noise_every),
    )
    return Gradients(covered_models, updates, local_steps, schedulers, averaging == "loss")


# --- the rendezvous: identities, places and options of all ranks, in one gather

NATS_PORT = 4222
"""Default port of a broker URL without one."""


def meet_ranks(
    *,
    name: str | None,
    options: JobOptions,
    data: DataIdentity,
    caps_path: Path | None,
    environment: Environment,
    bus: BusSettings | None,
    groups: Groups | None = None,
    state: dict[str, Any] | None = None,
) -> tuple[Collectives, PeerSockets, JobIdentity, Place]:
    """Exchange identities, places and options with all other ranks; a collective call.

    Replica groups meet in each new world; `state` is that of the session, in one that was in the world before.

    Raises:
        ValueError: on all ranks alike, when they attached with different options.
    """
    launch, trainer = environment.launch, environment.trainer
    job = propose_job(name or trainer.name, environment.shared.job, launch, trainer.run_id)
    collectives = Collectives(None if groups is None else groups.group)
    last = None
    may_be_known = environment.shared.job or trainer.run_id or launch.elastic  # else `propose_job` makes a new id
    if bus is not None and collectives.rank == 0 and may_be_known and state is None:
        from .bus_client.client import last_generation  # noqa: PLC0415 - as in `attach`

        last = last_generation(bus, job, node=node_name(environment.shared))
    # ports of connections that carry no gradients: the broker, and the store of torch.distributed
    ports = set() if bus is None else {urlsplit(url.strip()).port or NATS_PORT for url in bus.url.split(",")}
    store = default_store()
    if is_tcp := isinstance(store, TCPStore):
        ports.add(store.port)
    sockets = PeerSockets(ports)
    peers = collectives.gather_objects(
        Peer(
            node=node_name(environment.shared),
            process=this_process(),
            job=job,
            attempt=Attempt(launch.id, launch.restart_count, launch.max_restarts),
            last_generation=last,
            connections=sockets.candidates(),
            memory_caps={} if caps_path is None else read_caps(caps_path),
            options=options.fingerprint | data._asdict(),
            group=None if trainer.nodes == "off" else launch.group,
            held=None if groups is None or state is None else (state, groups.members),
        )
    )
    if groups is not None:
        groups.choose(peers)
    is_connected = launch.elastic and not launch.connects_late and collectives.world_size > 1  # by the gather
    if is_connected and collectives.rank == 0 and is_tcp and hasattr(store, "list_keys"):
        # torchrun's store outlives a restart of the ranks: one that is faster than another would read the address by
        # which gloo's groups found a process that is gone, and fail or wait there (torch 2.13)
        for key in store.list_keys():
            if key.startswith("default_pg/") and "//cpu//" in key:
                store.delete_key(key)
    check_alike(peers)
    attempt, nodes = attempt_of(peers), nodes_of(peers)
    node = next(each for each in nodes if collectives.rank in each.ranks)
    place = Place(collectives.rank, node.ranks.index(collectives.rank), node.node, node.ranks)
    sockets.match([peer.connections for peer in peers], place.rank, place.node_ranks)
    identity = JobIdentity(
        job=peers[0].job,
        generation=max(attempt.restarts, 0 if peers[0].last_generation is None else peers[0].last_generation + 1),
        attempt=attempt,
        nodes=nodes,
        max_local_batch_sizes=merge_caps(
            (peer.memory_caps for peer in peers),
            collectives.world_size,
            options.max_local_batch_size,
            options.min_local_batch_size,
        ),
        hosts=hosts_of(peers),
    )
    if collectives.rank == 0:
        warn_of_policy(options)
        if not environment.shared.job and len(identity.nodes) > 1:
            _log.warning(
                "%d nodes attach without DYNAMIX_JOB: set it alike on all of them, or the job may come back under "
                "another id than %s when a restart makes a process of another node rank 0",
                len(identity.nodes),
                identity.job,
            )
    return collectives, sockets, identity, place
