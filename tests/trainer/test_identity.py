import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from dynamix.schemas.messages import NodeRanks
from dynamix.trainer.identity import (
    Launch,
    Peer,
    check_alike,
    generation_of,
    nodes_of,
    place_of,
    propose_job,
)
from dynamix.trainer.process import ProcessIdentity, start_ticks, this_process
from dynamix.trainer.settings import read_environment


def _peer(node: str = "node-a", restart_count: int = 0, **changes: Any) -> Peer:
    peer = Peer(
        node=node,
        process=ProcessIdentity(1, 2, 3, 4),
        job="mnist-0a1b2c3d",
        restart_count=restart_count,
        endpoints=(),
        memory_caps={},
        options=((32, 32), 20),
    )
    return peer._replace(**changes)


def test_a_configured_job_is_taken_as_it_is() -> None:
    assert propose_job("mnist", "run-17", Launch()) == "run-17"
    with pytest.raises(ValueError, match="cannot be part of a subject"):
        propose_job("mnist", "Run 17", Launch())


def test_without_a_launcher_every_run_has_its_own_id() -> None:
    ids = {propose_job("mnist", "", Launch()) for _ in range(20)}
    assert len(ids) == 20
    assert all(job.startswith("mnist-") and len(job) == len("mnist-") + 8 for job in ids)


def _workers_of_an_agent(answers: Connection) -> None:
    """Like torchrun: one process that starts its workers, and starts them again."""
    context = multiprocessing.get_context("fork")
    for restart_count in (0, 1):
        worker = context.Process(target=_worker, args=(answers, restart_count))
        worker.start()
        worker.join()


def _worker(answers: Connection, restart_count: int) -> None:
    answers.send(propose_job("mnist", "", Launch("my-run", restart_count, 3, elastic=True)))


def test_the_id_survives_restarts_by_one_agent_and_never_returns_under_another() -> None:
    context = multiprocessing.get_context("forkserver")
    ids = []
    for _ in range(2):
        ours, theirs = context.Pipe(duplex=False)
        agent = context.Process(target=_workers_of_an_agent, args=(theirs,))
        agent.start()
        theirs.close()
        ids.append((ours.recv(), ours.recv()))
        agent.join()
        ours.close()
    assert ids[0][0] == ids[0][1]
    assert ids[1][0] == ids[1][1]
    assert ids[0][0] != ids[1][0]


def test_a_name_leaves_room_for_the_run_id() -> None:
    assert len(propose_job("n" * 54, "", Launch())) == 63
    with pytest.raises(ValueError, match="has 55 characters: use at most 54"):
        propose_job("n" * 55, "", Launch())


def test_the_generation_counts_the_failures_of_every_node() -> None:
    peers = [_peer("node-a", 1), _peer("node-a", 1), _peer("node-b", 2), _peer("node-b", 2)]
    assert generation_of(peers) == 3
    assert generation_of(peers[:2]) == 1


def test_ranks_find_their_node_whatever_the_order() -> None:
    peers = [_peer("node-b"), _peer("node-a"), _peer("node-b"), _peer("node-a")]
    assert nodes_of(peers) == (NodeRanks(node="node-b", ranks=(0, 2)), NodeRanks(node="node-a", ranks=(1, 3)))
    assert place_of(peers, 3) == (3, 1, "node-a", (1, 3))
    assert place_of(peers, 0) == (0, 0, "node-b", (0, 2))


def test_options_that_differ_are_named() -> None:
    check_alike([_peer(), _peer()])
    with pytest.raises(ValueError, match=r"rank 1 .*\(32, 64\) and not \(32, 32\)"):
        check_alike([_peer(), _peer(options=((32, 64), 20))])


def test_this_process_is_found_in_proc() -> None:
    process = this_process()
    assert process.pid == os.getpid()
    assert process.namespace == Path("/proc/self/ns/pid").stat().st_ino
    assert process.start_ticks == start_ticks(os.getpid()) > start_ticks(1)


def test_the_launcher_is_read_from_the_environment() -> None:
    environ = {
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "DYNAMIX_JOB": "run-17",
        "DYNAMIX_TRAINER_POLICY": "random",
    }
    found = read_environment(environ)
    assert found.launch == Launch(run_id="", restart_count=2, max_restarts=3, elastic=True)
    assert (found.shared.job, found.trainer.policy) == ("run-17", "random")
    assert read_environment({}).launch == Launch()
    with pytest.raises(ValueError, match="DYNAMIX_TRAINER_POLICE"):
        read_environment({"DYNAMIX_TRAINER_POLICE": "random"})
