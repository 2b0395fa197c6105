"""The rendezvous when ranks attach: identities, places and options of all ranks, in one gather."""

import logging
from typing import NamedTuple
from urllib.parse import urlsplit

import torch.distributed as dist
from torch.distributed import distributed_c10d

from dynamix.runtime.settings import BusSettings, node_name

from .data.sampler import DataIdentity
from .job.identity import (
    JobIdentity,
    Peer,
    Place,
    attempt_of,
    check_alike,
    generation_of,
    is_fresh,
    nodes_of,
    place_of,
    propose_job,
)
from .job.memory_caps import MemoryCaps, merge_caps
from .job.options import JobOptions
from .measurement.process import this_process
from .measurement.sockets import PeerSockets
from .settings import Environment
from .steering.collectives import Collectives
from .wire.client import SERVICE
from .wire.earlier_starts import last_generation

NATS_PORT = 4222
"""Default port of a broker URL without one."""


_log = logging.getLogger("dynamix.trainer")


class Rendezvous(NamedTuple):
    """What the ranks found out about each other."""

    collectives: Collectives
    sockets: PeerSockets
    identity: JobIdentity
    place: Place


def meet_ranks(
    *,
    name: str,
    options: JobOptions,
    data: DataIdentity,
    caps: MemoryCaps,
    environment: Environment,
    bus: BusSettings | None,
) -> Rendezvous:
    """Exchange identities, places and options with all other ranks; a collective call.

    Raises:
        ValueError: on all ranks alike, when they attached with different options.
    """
    launch = environment.launch
    job = propose_job(name, environment.shared.job, launch)
    collectives = Collectives()
    sockets = PeerSockets(_foreign_ports(bus))
    peers = collectives.gather_objects(
        Peer(
            node=node_name(environment.shared),
            process=this_process(),
            job=job,
            launch=launch.id,
            restart_count=launch.restart_count,
            max_restarts=launch.max_restarts,
            last_generation=_last_generation(job, environment, bus) if collectives.rank == 0 else None,
            connections=sockets.candidates(),
            memory_caps=caps.read(),
            options=(*options.fingerprint, data),
        )
    )
    check_alike(peers)
    place = place_of(peers, collectives.rank)
    sockets.match([peer.connections for peer in peers], place.rank, place.node_ranks)
    identity = JobIdentity(
        job=peers[0].job,
        generation=generation_of(peers),
        attempt=attempt_of(peers),
        nodes=nodes_of(peers),
        max_local_batch_sizes=merge_caps(
            (peer.memory_caps for peer in peers),
            collectives.world_size,
            options.max_local_batch_size,
            options.min_local_batch_size,
        ),
    )
    if collectives.rank == 0 and not environment.shared.job:
        _warn_of_several_nodes(identity)
    return Rendezvous(collectives, sockets, identity, place)


def _last_generation(job: str, environment: Environment, bus: BusSettings | None) -> int | None:
    """Rank 0's question to the bus; an id that cannot have been used before needs none."""
    if bus is None or is_fresh(environment.shared.job, environment.launch):
        return None
    return last_generation(bus, job, name=f"{SERVICE}-{node_name(environment.shared)}")


def _warn_of_several_nodes(identity: JobIdentity) -> None:
    if len(identity.nodes) > 1:
        _log.warning(
            "%d nodes attach without DYNAMIX_JOB: set it alike on all of them, or the job may come back under another "
            "id than %s when a restart makes a process of another node rank 0",
            len(identity.nodes),
            identity.job,
        )


def _foreign_ports(bus: BusSettings | None) -> set[int]:
    """Ports of connections that carry no gradients: the store of torch.distributed, and the broker."""
    ports = set() if bus is None else {urlsplit(url.strip()).port or NATS_PORT for url in bus.url.split(",")}
    store = distributed_c10d._get_default_store()  # noqa: SLF001 - torch has no public name for it
    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]  # public, missing in torch's stubs
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):  # type: ignore[attr-defined]
        ports.add(store.port)
    return ports
