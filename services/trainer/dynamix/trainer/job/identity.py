"""Identity of a job on the bus: its name, its generation, which ranks share a node, and bounds kept over restarts.

The job id is made once per run and survives the restarts of `torchrun`. It ends in the run id that `dynamix train`
made; else it comes from torchrun's, which `--standalone` makes for each run and `--rdzv-id` sets for all nodes alike;
without one from the launch: the directory that `torchrun` makes for its logs, or the agent itself, whose boot id, pid
and start time no other process ever has.

A run id or a `DYNAMIX_JOB` that is used again goes on with the same job. Its generations never repeat: each start asks
the bus for the last one (`attach`), and a checkpoint knows which ones its launch used (`generation_after`).
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dynamix.runtime import output_files
from dynamix.schemas.messages import NodeRanks
from dynamix.schemas.subjects import MAX_NAME, check_token, is_token, new_run_id
from dynamix.trainer.measurement.sockets import Connection, ProcessIdentity, boot_id, fingerprint


class Attempt(NamedTuple):
    """One start of one launch; restarts are counted over all nodes."""

    launch: str
    restarts: int
    max_restarts: int


class Launch(NamedTuple):
    """The launcher's description of this start; all empty without `torchrun`."""

    run_id: str = ""
    restart_count: int = 0
    max_restarts: int = 0
    world_size: int = 1
    elastic: bool = False
    """Whether an elastic agent started this process."""

    connects_late: bool = False
    """Whether gloo connects two ranks only at their first exchange (TORCH_GLOO_LAZY_INIT)."""

    group: str = ""
    """Number of the agent that started this process."""

    log_directory: str = ""
    """Created by the agent for its launch; known to its workers also when a wrapper script stands between."""

    @property
    def id(self) -> str:
        """Name of this launch; a start that cannot be recognised as a restart is a new launch."""
        return _digest(f"{boot_id()}/{self.log_directory}" if self.log_directory else fingerprint(os.getpid()))


class Peer(NamedTuple):
    """The facts that one rank sends to the others when it attaches."""

    node: str
    process: ProcessIdentity
    job: str
    """This rank's proposal; rank 0's is taken."""
    attempt: Attempt
    """As its own launcher counts."""
    last_generation: int | None
    """Generation of the job's last start, if rank 0 could learn of one."""
    connections: tuple[Connection, ...]
    """Its TCP connections that may lead to another rank."""
    memory_caps: dict[int, int]
    """Upper bounds of local batch sizes by rank, as far as this rank can read them."""
    options: dict[str, object]
    """Options that must be equal on all ranks."""
    group: str | None = ""
    """Number of its launcher: with the node it tells which ranks sum gradients first; `None` where they shall not."""
    held: tuple[dict[str, Any], list[Any]] | None = None
    """The state of its session and the members of that world, where groups come and go and it was there before."""


class Place(NamedTuple):
    """The rank's place: its node and its number there."""

    rank: int
    local_rank: int
    node: str
    node_ranks: tuple[int, ...]
    """All ranks of its node."""


class JobIdentity(NamedTuple):
    """The job, as all ranks agreed on it when they attached."""

    job: str
    generation: int
    attempt: Attempt
    nodes: tuple[NodeRanks, ...]
    max_local_batch_sizes: tuple[int, ...]
    hosts: tuple[tuple[int, ...], ...] = ()
    """The ranks that one launcher started on one node, for each."""
    num_replicas: int = 0
    """Number that exchange gradients where those of a host sum them first; 0 where all ranks do."""


def propose_job(name: str, configured: str, launch: Launch, run_id: str = "") -> str:
    """The job id this rank would choose: the configured one, else the name and the run id, or 8 hexadecimal digits.

    Raises:
        ValueError: when the name or the configured id cannot be part of a subject.
    """
    if configured:
        return check_token(configured)
    if not is_token(name):
        raise ValueError(f"name={name!r}: a job's name has 1 to {MAX_NAME} of the characters a-z, 0-9 and '-'")
    if len(name) > MAX_NAME:
        raise ValueError(f"name {name!r} has {len(name)} characters: use at most {MAX_NAME}")
    if run_id:
        return check_token(f"{name}-{run_id}")
    if not launch.elastic:
        return f"{name}-{new_run_id()}"
    named = launch.id if launch.log_directory else fingerprint(os.getppid())
    return f"{name}-{_digest(launch.run_id or named)[:8]}"


def attempt_of(peers: Sequence[Peer]) -> Attempt:
    """The start that all ranks have in common.

    An agent counts only the failures of its own workers: those of all nodes are added. With one node the sum is its
    restart count.
    """
    by_node: dict[str, tuple[int, int]] = {}
    for peer in peers:
        restarts, most = by_node.get(peer.node, (0, 0))
        by_node[peer.node] = (max(restarts, peer.attempt.restarts), max(most, peer.attempt.max_restarts))
    restarts, most = (sum(counts) for counts in zip(*by_node.values(), strict=True))
    return Attempt(peers[0].attempt.launch, restarts, most)


def generation_after(saved_generation: int, saved: Attempt, now: Attempt) -> int:
    """The generation of a start from a checkpoint, above every earlier one, without asking the bus.

    A launch has as many generations in a row as it may make starts; the first is that of any of its checkpoints less
    the restarts until then. So a restart counts on by one, whether or not the start before it came to save, and another
    launch begins where the generations of the saving one end.
    """
    first = saved_generation - saved.restarts
    if now.launch != saved.launch or now.restarts < saved.restarts:
        first += saved.max_restarts + 1
    return max(saved_generation + 1, first + now.restarts)


def nodes_of(peers: Sequence[Peer]) -> tuple[NodeRanks, ...]:
    """The nodes of the job with their ranks, in the order of their first rank."""
    ranks: dict[str, list[int]] = {}
    for rank, peer in enumerate(peers):
        ranks.setdefault(peer.node, []).append(rank)
    return tuple(NodeRanks(node=node, ranks=tuple(members)) for node, members in ranks.items())


def hosts_of(peers: Sequence[Peer]) -> tuple[tuple[int, ...], ...]:
    """The ranks of each node and launcher; none where a rank shall not sum gradients with those of its node first."""
    if any(peer.group is None for peer in peers):
        return ()
    named = [peer._replace(node=f"{peer.node}/{peer.group}") for peer in peers]
    return tuple(tuple(each.ranks) for each in nodes_of(named))


def check_alike(peers: Sequence[Peer]) -> None:
    """Make sure that all ranks were given the same options.

    Raises:
        ValueError: naming the first rank that differs from rank 0, on all ranks alike.
    """
    for rank, peer in enumerate(peers):
        differing = {name: value for name, value in peer.options.items() if value != peers[0].options[name]}
        if "num_samples" in differing and "sampler" not in differing:
            what = f"sampler, {peer.options['sampler']}, draws" if peer.options["sampler"] else "data set has"
            raise ValueError(
                f"rank {rank}'s {what} {differing['num_samples']} samples, rank 0's {peers[0].options['num_samples']}: "
                "every rank needs the whole data set, session.loader gives each its part; pass the data set before it "
                "was divided by rank"
            )
        if differing:
            listed = [f"{name}={value!r} and not {peers[0].options[name]!r}" for name, value in differing.items()]
            raise ValueError(
                f"rank {rank} attached with other options than rank 0 ({', '.join(listed[:3])}): "
                "all ranks must call attach alike"
            )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


CAP_FACTOR = 0.8
"""A rank that ran out of memory gets at most this share of the size it failed at."""

_log = logging.getLogger("dynamix.trainer")


def read_caps(path: Path) -> dict[int, int]:
    """Upper bounds by rank, from one small file per rank, `<path>.rank<r>.json`, as far as they are seen from here.

    A rank writes only its own, when it dies of a lack of memory; all ranks read what they can see, and the lowest
    bound holds for all when they attach again.
    """
    caps: dict[int, int] = {}
    for file in path.parent.glob(f"{path.name}.rank*.json"):
        try:
            content = json.loads(file.read_text())
            caps[int(content["rank"])] = int(content["max_local_batch_size"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.warning("%s holds no memory cap (%s): delete it", file, error)
    return caps


def lower_cap(path: Path, rank: int, failed_size: int, minimum: int) -> int:
    """Write a rank's new bound after it ran out of memory at `failed_size`; returns it."""
    cap = max(minimum, int(failed_size * CAP_FACTOR), 1)
    content = json.dumps({"rank": rank, "max_local_batch_size": cap, "failed_at": failed_size}) + "\n"
    output_files.write(path.with_name(f"{path.name}.rank{rank}.json"), content.encode(), make_parents=True)
    return cap


def merge_caps(per_rank: Iterable[Mapping[int, int]], world_size: int, maximum: int, minimum: int) -> tuple[int, ...]:
    """Upper bound of every rank: the lowest that any rank knows, between the job's bounds."""
    caps = [maximum] * world_size
    for known in per_rank:
        for rank, cap in known.items():
            if rank < world_size:
                caps[rank] = max(min(caps[rank], cap), minimum)
    return tuple(caps)
