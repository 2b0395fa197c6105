"""The rendezvous when ranks attach: identities, places and options of all ranks, in one gather."""

import asyncio
import logging
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist
from torch.distributed import distributed_c10d

from dynamix.runtime.bus import Bus
from dynamix.runtime.settings import BusSettings, node_name
from dynamix.schemas import subjects
from dynamix.schemas.codec import decode
from dynamix.schemas.messages import Action, Job
from dynamix.schemas.messages.allocation import MAX_GENERATION
from dynamix.schemas.streams import ACTIONS, JOBS

from .bus_client import SERVICE
from .data.orders import DataIdentity
from .job.identity import (
    JobIdentity,
    Peer,
    Place,
    attempt_of,
    check_alike,
    merge_caps,
    nodes_of,
    propose_job,
    read_caps,
)
from .job.options import JobOptions, warn_of_policy
from .measurement.sockets import PeerSockets, this_process
from .settings import Environment
from .steering.collectives import Collectives

NATS_PORT = 4222
"""Default port of a broker URL without one."""

LOOKUP_S = 2.0
"""The longest that attaching waits for the bus. Without a broker the refused connection is an answer."""

_log = logging.getLogger("dynamix.trainer")


def meet_ranks(
    *,
    name: str | None,
    options: JobOptions,
    data: DataIdentity,
    caps_path: Path | None,
    environment: Environment,
    bus: BusSettings | None,
) -> tuple[Collectives, PeerSockets, JobIdentity, Place]:
    """Exchange identities, places and options with all other ranks; a collective call.

    Raises:
        ValueError: on all ranks alike, when they attached with different options.
    """
    launch, trainer = environment.launch, environment.trainer
    job = propose_job(name or trainer.name, environment.shared.job, launch, trainer.run_id)
    collectives = Collectives()
    last = None
    may_be_known = environment.shared.job or trainer.run_id or launch.elastic  # else `propose_job` makes a new id
    if bus is not None and collectives.rank == 0 and may_be_known:
        last = last_generation(bus, job, name=f"{SERVICE}-{node_name(environment.shared)}")
    # ports of connections that carry no gradients: the broker, and the store of torch.distributed
    ports = set() if bus is None else {urlsplit(url.strip()).port or NATS_PORT for url in bus.url.split(",")}
    # torch has no public name for the first, and its stubs lack the other names
    store: Any = distributed_c10d._get_default_store() if dist.is_initialized() else None  # noqa: SLF001
    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    if is_tcp := isinstance(store, dist.TCPStore):  # type: ignore[attr-defined]
        ports.add(store.port)
    sockets = PeerSockets(ports)
    peers = collectives.gather_objects(
        Peer(
            node=node_name(environment.shared),
            process=this_process(),
            job=job,
            attempt=launch.attempt,
            last_generation=last,
            connections=sockets.candidates(),
            memory_caps={} if caps_path is None else read_caps(caps_path),
            options=options.fingerprint | data._asdict(),
        )
    )
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


def last_generation(settings: BusSettings, job: str, *, name: str) -> int | None:
    """The generation of the job's last start; `None` if there was none, or the bus does not answer in time.

    In a thread of its own: the caller may run an event loop.
    """
    found: list[int | None] = []

    async def look_up() -> int | None:
        async with asyncio.timeout(LOOKUP_S):
            bus = await Bus.connect(settings, name=name, wait=False)
            try:
                start = await bus.newest(JOBS.name, subjects.of("job", job))
                action = await bus.newest(ACTIONS.name, subjects.of("action", job))
            finally:
                await bus.close()
        # others' jobs can push a start out of its stream, but no action
        generations = [] if action is None else [decode(Action, action.subject, action.payload).generation]
        if start is not None:
            generation = decode(Job, start.subject, start.payload).generation
            if generation > MAX_GENERATION:
                _log.warning("%s has generation %d on the bus, which no job reaches: it was forged", job, generation)
            else:
                generations.append(generation)
        return max(generations, default=None)

    def ask() -> None:
        try:
            found.append(asyncio.run(look_up()))
        except Exception as error:  # noqa: BLE001 - whatever is wrong with the bus, training begins without an answer
            _log.info("cannot ask the bus for earlier starts of %s: %s: %s", job, type(error).__name__, error)

    thread = threading.Thread(target=ask, name="dynamix bus look-up", daemon=True)
    thread.start()
    thread.join(LOOKUP_S)
    return found[0] if found else None
