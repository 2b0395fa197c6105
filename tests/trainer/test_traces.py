"""Real ranks under the policy `stigmergy`, with a broker, a collector and no arbitrator."""

import asyncio
import time
from typing import Any

import torch
from tests.support.control_plane import NODE, control_plane
from tests.support.ranks import run_ranks
from tests.support.training import Numbered, distribute, flat_parameters, make_model
from torch import nn

from dynamix import trainer as dynamix
from dynamix.schemas import subjects
from dynamix.schemas.messages import Trace
from dynamix.schemas.streams import FEED
from dynamix.trainer import Session

WINDOW_STEPS = 4
SECONDS_PER_SAMPLE = (0.001, 0.004)
NUM_WINDOWS = 12


def _attach() -> tuple[Session, nn.Module, torch.optim.Optimizer]:
    model = distribute(make_model(torch.float32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session = dynamix.attach(
        model,
        optimizer,
        Numbered(4000, torch.float32),
        local_batch_size=16,
        window_steps=WINDOW_STEPS,
        policy="stigmergy",
        name="traced",
        seed=11,
    )
    return session, model, optimizer


def _train(rank: int) -> dict[str, Any]:
    """Train some windows, rank 1 four times slower per sample; the sizes of each step and the parameters."""
    session, model, optimizer = _attach()
    sizes: list[tuple[int, ...]] = []
    with session:
        for _ in session.epochs(1000):
            for inputs, targets, _ in session.loader:
                sizes.append(session.local_batch_sizes)
                loss = nn.functional.cross_entropy(model(inputs), targets)
                time.sleep(len(inputs) * SECONDS_PER_SAMPLE[rank])
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                session.step(loss)
                if session.window == NUM_WINDOWS:
                    return {"sizes": sizes, "job": session.job, "parameters": flat_parameters(model).tolist()}
    raise AssertionError("the epochs ended first")


async def test_ranks_divide_a_fixed_global_batch_by_traces_on_one_step_without_an_arbitrator() -> None:
    async with control_plane("collector") as plane:
        environ = {**plane.environ, "DYNAMIX_NODE": NODE}
        first, second = await asyncio.to_thread(run_ranks, _train, 2, environ=environ)
        traces = await plane.wait_for(FEED.name, subjects.of("trace", first["job"], NODE), NUM_WINDOWS - 3)
    assert first == second
    sizes = first["sizes"]
    changes = [step for step in range(1, len(sizes)) if sizes[step] != sizes[step - 1]]
    assert sizes[0] == (16, 16)
    assert {sum(each) for each in sizes} == {32}
    assert all(step % WINDOW_STEPS == 0 for step in changes)
    assert changes[0] >= 2 * WINDOW_STEPS  # the trace of window 0 rules window 2 at the earliest
    assert sizes[-1][0] > 20  # 26 and 6 are equal times
    newest = traces[-1]
    assert isinstance(newest, Trace)
    assert newest.activity[0] > 2 * newest.activity[1]
    assert newest.appetite == 32
