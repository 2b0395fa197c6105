import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamix.trainer.job.identity import (
    Attempt,
    Launch,
    Peer,
    attempt_of,
    generation_after,
    lower_cap,
    merge_caps,
    propose_job,
    read_caps,
)
from dynamix.trainer.measurement.sockets import ProcessIdentity
from dynamix.trainer.settings import read_environment


def test_without_a_launcher_every_run_has_its_own_id() -> None:
    ids = {propose_job("mnist", "", Launch()) for _ in range(20)}
    assert len(ids) == 20
    assert all(job.startswith("mnist-") and len(job) == len("mnist-") + 8 for job in ids)


def test_the_id_survives_restarts_by_one_agent_and_never_returns_under_another(monkeypatch: pytest.MonkeyPatch) -> None:
    def proposed(agent: int, run_id: str = "") -> set[str]:
        """Ids in two starts under an agent."""
        monkeypatch.setattr("os.getppid", lambda: agent)
        return {propose_job("mnist", "", Launch(run_id, restarts, 3, elastic=True)) for restarts in (0, 1)}

    one, another = os.getpid(), os.getppid()
    assert len(proposed(one)) == len(proposed(another)) == 1
    assert proposed(one) != proposed(another)
    assert proposed(one, "my-run") == proposed(another, "my-run") != proposed(one, "another-run")


def test_a_name_leaves_room_for_the_run_id() -> None:
    assert len(propose_job("n" * 54, "", Launch())) == 63
    with pytest.raises(ValueError, match="has 55 characters: use at most 54"):
        propose_job("n" * 55, "", Launch())


def test_the_generation_counts_the_failures_of_every_node() -> None:
    def peer(node: str, restarts: int) -> Peer:
        attempt = Attempt("launch-a", restarts, max_restarts=3)
        return Peer(node, ProcessIdentity(1, 2, 3, 4), "mnist-0a1b2c3d", attempt, None, (), {}, {})

    peers = [peer("node-a", 1), peer("node-a", 1), peer("node-b", 2), peer("node-b", 2)]
    assert attempt_of(peers[:2]) == Attempt("launch-a", restarts=1, max_restarts=3)
    assert attempt_of(peers) == Attempt("launch-a", restarts=3, max_restarts=6)


@given(st.data())
def test_no_generation_is_used_twice_over_launches_that_resume_each_other(data: st.DataObject) -> None:
    """Each start may save or not; each launch saves at least once, and resumes what the one before it saved last."""
    used = [-1]
    saved: tuple[int, Attempt] | None = None
    for launch in range(data.draw(st.integers(1, 4))):
        most = data.draw(st.integers(0, 4))
        starts = data.draw(st.integers(0, most))
        saves = data.draw(st.integers(0, starts))
        for restarts in range(starts + 1):
            now = Attempt(str(launch), restarts, most)
            generation = restarts if saved is None else generation_after(*saved, now)
            assert generation > used[-1]
            used.append(generation)
            if restarts == saves or data.draw(st.booleans()):
                saved = (generation, now)


def test_the_launcher_is_read_from_the_environment() -> None:
    environ = {
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_ERROR_FILE": "/tmp/torchelastic_a/none_b/attempt_2/0/error.json",
        "DYNAMIX_JOB": "run-17",
        "DYNAMIX_TRAINER_POLICY": "random",
    }
    found = read_environment(environ)
    assert found.launch == Launch("", 2, 3, elastic=True, log_directory="/tmp/torchelastic_a/none_b")
    assert (found.shared.job, found.trainer.policy) == ("run-17", "random")
    assert read_environment({}).launch == Launch()
    assert read_environment({"TORCHELASTIC_ERROR_FILE": "/tmp/errors/0.json"}).launch == Launch()
    with pytest.raises(ValueError, match="DYNAMIX_TRAINER_POLICE"):
        read_environment({"DYNAMIX_TRAINER_POLICE": "random"})


def test_a_rank_that_ran_out_of_memory_keeps_four_fifths_of_the_size(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "checkpoints" / "caps"
    assert lower_cap(path, 3, failed_size=500, minimum=32) == 400
    assert lower_cap(path, 0, failed_size=33, minimum=32) == 32
    assert read_caps(path) == {3: 400, 0: 32}
    assert lower_cap(path, 3, failed_size=400, minimum=32) == 320
    assert read_caps(path) == {3: 320, 0: 32}
    assert sorted(file.name for file in path.parent.iterdir()) == ["caps.rank0.json", "caps.rank3.json"]
    (path.parent / "caps.rank1.json").write_text("{")
    assert read_caps(path) == {3: 320, 0: 32}, "a damaged file is no bound"
    assert "caps.rank1.json holds no memory cap" in caplog.text


def test_the_lowest_bound_that_any_rank_knows_holds_for_all() -> None:
    known = [{0: 400}, {0: 300, 2: 2000}, {1: 8, 7: 64}]
    assert merge_caps(known, world_size=3, maximum=1024, minimum=32) == (300, 32, 1024)
