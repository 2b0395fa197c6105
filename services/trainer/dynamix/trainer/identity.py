"""Who we are: the job's name on the bus, its generation, and which ranks share a node.

The job id is made once per run, survives the restarts of `torchrun`, and is never used for a second run: the agent of
`torchrun` outlives its workers, and no other process ever has its boot id, pid and start time.
"""

import hashlib
import secrets
from collections.abc import Sequence
from typing import NamedTuple

from dynamix.schemas.messages import NodeRanks
from dynamix.schemas.subjects import check_token

from .process import ProcessIdentity, agent_fingerprint
from .sockets import Endpoint

MAX_NAME = 54
"""Characters: a token's 63 less a dash and the run id's 8."""


class Launch(NamedTuple):
    """What the launcher says of this start; all empty without `torchrun`."""

    run_id: str = ""
    restart_count: int = 0
    max_restarts: int = 0
    elastic: bool = False
    """Whether an elastic agent started this process."""


class Peer(NamedTuple):
    """What one rank tells the others when it attaches."""

    node: str
    process: ProcessIdentity
    job: str
    """This rank's proposal; rank 0's is taken."""
    restart_count: int
    endpoints: tuple[tuple[Endpoint, Endpoint], ...]
    """Local and remote end of each of its TCP connections."""
    memory_caps: dict[int, int]
    """Upper bounds of local batch sizes by rank, as far as this rank can read them."""
    options: tuple[object, ...]
    """What all ranks must have been given alike."""


class Place(NamedTuple):
    """Where a rank runs."""

    rank: int
    local_rank: int
    node: str
    node_ranks: tuple[int, ...]
    """All ranks of its node."""


def propose_job(name: str, configured: str, launch: Launch) -> str:
    """The job id this rank would choose: the configured one, else the name and 8 hexadecimal digits.

    Raises:
        ValueError: when the name or the configured id cannot be part of a subject.
    """
    if configured:
        return check_token(configured)
    if len(check_token(name)) > MAX_NAME:
        raise ValueError(f"name {name!r} has {len(name)} characters: use at most {MAX_NAME}")
    if not launch.elastic:
        return f"{name}-{secrets.token_hex(4)}"
    digest = hashlib.sha256(f"{launch.run_id}/{agent_fingerprint()}".encode()).hexdigest()
    return f"{name}-{digest[:8]}"


def generation_of(peers: Sequence[Peer]) -> int:
    """Restarts of the job so far: those that each node's agent counted, together.

    An agent counts only the failures of its own workers; with one node this is its restart count.
    """
    by_node: dict[str, int] = {}
    for peer in peers:
        by_node[peer.node] = max(by_node.get(peer.node, 0), peer.restart_count)
    return sum(by_node.values())


def place_of(peers: Sequence[Peer], rank: int) -> Place:
    """Where a rank runs, from the nodes that all ranks named; the lowest rank of a node is its local rank 0."""
    ranks = tuple(other for other, peer in enumerate(peers) if peer.node == peers[rank].node)
    return Place(rank, ranks.index(rank), peers[rank].node, ranks)


def nodes_of(peers: Sequence[Peer]) -> tuple[NodeRanks, ...]:
    """The nodes of the job with their ranks, in the order of their first rank."""
    ranks: dict[str, list[int]] = {}
    for rank, peer in enumerate(peers):
        ranks.setdefault(peer.node, []).append(rank)
    return tuple(NodeRanks(node=node, ranks=tuple(members)) for node, members in ranks.items())


def check_alike(peers: Sequence[Peer]) -> None:
    """Make sure that all ranks were given the same options.

    Raises:
        ValueError: naming the first rank that differs from rank 0, on all ranks alike.
    """
    for rank, peer in enumerate(peers):
        if peer.options != peers[0].options:
            differing = [
                f"{ours!r} and not {theirs!r}"
                for theirs, ours in zip(peers[0].options, peer.options, strict=False)
                if ours != theirs
            ]
            raise ValueError(
                f"rank {rank} attached with other options than rank 0 ({', '.join(differing[:3])}): "
                "all ranks must call attach alike, on data of the same length"
            )
