"""Going on from a snapshot, with the same ranks or fewer."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.ranks import run_ranks
from tests.support.training import Numbered, begin_job, make_model, train_step
from torch import nn

from dynamix import trainer as dynamix
from dynamix.trainer import Session


def _start(optimizer_class: Callable[..., torch.optim.Optimizer]) -> tuple[nn.Module, torch.optim.Optimizer, Session]:
    model = make_model()
    optimizer = optimizer_class(model.parameters(), lr=0.1)
    return model, optimizer, dynamix.attach(model, optimizer, Numbered(64), local_batch_size=8, connect=False)


def _two_steps(model: nn.Module, optimizer: torch.optim.Optimizer, session: Session) -> None:
    for batch in session.loader:
        train_step(session, model, optimizer, batch)
        if session.step_index % 2 == 0:
            break


@pytest.mark.parametrize("optimizer_class", [torch.optim.Adam, torch.optim.Adagrad])
@pytest.mark.parametrize("loads_session", [False, True])
def test_a_snapshot_without_the_sessions_state_is_warned_about(
    optimizer_class: Callable[..., torch.optim.Optimizer], loads_session: bool, caplog: pytest.LogCaptureFixture
) -> None:
    first = _start(optimizer_class)
    _two_steps(*first)
    model_state, optimizer_state, session_state = (each.state_dict() for each in first)
    model, optimizer, session = _start(optimizer_class)
    model.load_state_dict(model_state)
    optimizer.load_state_dict(optimizer_state)
    if loads_session:
        session.load_state_dict(session_state)
    _two_steps(model, optimizer, session)
    assert session.step_index == (4 if loads_session else 2)
    if loads_session:
        assert caplog.messages == []
    else:
        said = "the optimizer has made steps already, but this session begins at epoch 0 with sample 0"
        assert [message.startswith(said) for message in caplog.messages] == [True]
        assert "call session.load_state_dict(...) on all ranks" in caplog.text


def test_a_second_session_of_a_process_is_no_resume(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, session = _start(torch.optim.Adam)
    _two_steps(model, optimizer, session)
    session.close()
    again = dynamix.attach(model, optimizer, Numbered(64), local_batch_size=8, connect=False)
    _two_steps(model, optimizer, again)
    assert again.step_index == 2
    assert caplog.messages == []


SHRINKING: dict[str, Any] = {"local_batch_size": 20, "global_batch": "fixed"}


def _save(_rank: int) -> dict[str, Any]:
    session, model, optimizer = begin_job(Numbered(300), **SHRINKING)
    for batch in session.loader:
        train_step(session, model, optimizer, batch)
        if session.step_index == 3:
            break
    state = session.state_dict()
    session.close()
    return state


def _resume_smaller(_rank: int, state: dict[str, Any]) -> dict[str, Any]:
    session, model, optimizer = begin_job(Numbered(300), **SHRINKING)
    session.load_state_dict(state)
    used: list[int] = []
    first: tuple[int, ...] = ()
    for batch in session.loader:
        first = first or session.local_batch_sizes
        used += train_step(session, model, optimizer, batch)
    again = session.state_dict()
    session.close()
    return {"used": used, "first": first, "steps": session.num_reference_steps, "state": again}


def test_a_job_that_loses_a_rank_keeps_its_global_batch_and_its_place_in_the_data(
    caplog: pytest.LogCaptureFixture,
) -> None:
    state = run_ranks(_save, 3)[0]
    results = run_ranks(_resume_smaller, 2, state)
    assert all(result["first"] == (30, 30) for result in results)
    assert len(results[0]["used"]) + len(results[1]["used"]) == 300 - 3 * 60
    assert len(set(results[0]["used"]) | set(results[1]["used"])) == 120
    assert results[0]["steps"] == 5  # counted in the batch that the script was written for
    assert all(sum(result["first"]) == 60 for result in run_ranks(_resume_smaller, 2, results[0]["state"]))
    session = begin_job(Numbered(300), make_model(), **SHRINKING)[0]  # one rank has at most twice its size
    session.load_state_dict(state)
    assert session.global_batch_size == 40
    assert "has 40 samples instead of 60" in caplog.text


def test_a_resumed_run_that_is_asked_for_the_epochs_that_are_left_is_warned(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, session = _start(torch.optim.SGD)
    for epoch in session.epochs(6):
        _two_steps(model, optimizer, session)
        if epoch == 1:
            break
    state = session.state_dict()
    session.close()
    left = {}
    for asked in (6, 4, 1):
        again = _start(torch.optim.SGD)[2]
        again.load_state_dict(state)
        left[asked] = [len(list(again.epochs(asked))), len(caplog.messages)]
        again.close()
    assert left == {6: [5, 0], 4: [3, 1], 1: [0, 2]}
    assert "session.epochs(4) after a resume trains 3 more epochs" in caplog.text
    assert "pass session.epochs(6)" in caplog.text
