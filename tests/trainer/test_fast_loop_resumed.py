"""The fast loop of a job that was saved and resumed, with the same policy or another."""

from collections import Counter
from typing import Any

import pytest
import torch
from tests.support.ranks import run_ranks
from tests.support.training import Numbered, attach_tracked, flat_parameters, hold_times, offer, train_step
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from dynamix.trainer import Session

CUT = 43


def _resume(rank: int, num_workers: int, sample_s: float = 0.01) -> dict[str, Any]:
    """A tracking job straight through, and in two halves; one rank alone takes a state now and then."""

    def begin() -> tuple[Session, nn.Module, Any]:
        loader = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
        session, model, optimizer, _ = attach_tracked(
            Numbered(601, torch.float32), window_steps=8, policy="rule", **loader
        )
        hold_times(session, rank, sample_s)
        return session, model, optimizer

    def train(session: Session, model: nn.Module, optimizer: Any, *, until: int) -> list[Any]:
        trace = []
        for _ in session.epochs(4):
            for batch in session.loader:
                sizes = session.local_batch_sizes
                if session.generation == 0 and session.step_index < CUT - 8:
                    total = 24 if session.step_index < 20 else 20
                    offer(session, (total // 2,) * 2, split="tracking")
                trace.append((sizes, train_step(session, model, optimizer, batch)))
                if rank == 1 and session.step_index % 3 == 0:
                    session.state_dict()
                if session.step_index == until:
                    return trace
        return trace

    session, model, optimizer = begin()
    straight = train(session, model, optimizer, until=10**9)
    whole = flat_parameters(model)
    session, model, optimizer = begin()
    first = train(session, model, optimizer, until=CUT)
    states = model.state_dict(), optimizer.state_dict(), session.state_dict()
    session.close()
    session, model, optimizer = begin()
    for part, state in zip((model, optimizer, session), states, strict=True):
        part.load_state_dict(state)
    second = train(session, model, optimizer, until=10**9)
    session.close()
    return {
        "straight": straight,
        "halves": first + second,
        "same_parameters": torch.equal(flat_parameters(model), whole),
        "generation": session.generation,
    }


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_resumed_run_tracks_on_and_workers_only_delay_the_split(num_workers: int) -> None:
    results = run_ranks(_resume, 2, num_workers, environ={"DYNAMIX_JOB": "resumed"})
    sizes = [split for split, _ in results[0]["straight"]]
    assert [split for split, _ in results[1]["straight"]] == sizes
    for result in results:
        assert result["halves"] == result["straight"]
        assert result["same_parameters"]
        assert result["generation"] == 1
    used = Counter(sample for result in results for _, samples in result["straight"] for sample in samples)
    assert used == Counter(dict.fromkeys(range(601), 4))  # once in each of four epochs
    assert {sum(split) for split in sizes} == {24, 20}
    changes = [step for step in range(60, len(sizes)) if sizes[step] != sizes[step - 1]]
    assert [step % 20 for step in changes] == [2 + 2 * num_workers] * len(changes)  # two steps to be sure, then at once
    assert {sizes[step] for step in changes} == {(5, 15), (15, 5)}


def _resume_under_another_policy(rank: int, options: dict[str, Any]) -> set[tuple[int, ...]]:
    session, model, optimizer, _ = attach_tracked(Numbered(240, torch.float32), window_steps=4, policy="rule")
    hold_times(session, rank)
    for batch in session.loader:
        train_step(session, model, optimizer, batch)
        if session.step_index == 6:
            break
    state = session.state_dict()
    session.close()
    session, model, optimizer, _ = attach_tracked(Numbered(240, torch.float32), window_steps=4, **options)
    session.load_state_dict(state)
    hold_times(session, rank)
    sizes = set()
    for batch in session.loader:
        sizes.add(session.local_batch_sizes)
        train_step(session, model, optimizer, batch)
    session.close()
    return sizes


@pytest.mark.parametrize("options", [{"policy": "static"}, {"policy": "rule", "base_hook": allreduce_hook}])
def test_a_resumed_job_is_divided_as_it_says_now_not_as_it_was_when_it_was_saved(options: dict[str, Any]) -> None:
    results = run_ranks(_resume_under_another_policy, 2, options)
    assert results == [{(6, 18)}, {(6, 18)}]
