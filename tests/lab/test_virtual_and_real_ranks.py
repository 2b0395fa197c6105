"""Virtual ranks against real ones: after the same decisions they have the same parameters, to the last digits.

Both run the same codecs on gradients that each computes in its own way, in float64, so that a last digit hardly ever
makes another number of 8 bits.
"""

from typing import Any

import pytest
import torch
from tests.support import virtual
from tests.support.ranks import run_ranks
from tests.support.training import flat_parameters, offer
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from dynamix.lab.simulator.scenario import Network, Workers
from dynamix.lab.workloads import make_optimizer, workload_named
from dynamix.schemas.messages.allocation import EXACT, Exchange
from dynamix.trainer import attach

SIZES = (40, 16, 24)
"""Steps of 80 samples, of 500: the end of an epoch falls into rounds of local steps."""
WINDOW_STEPS = 5
RATES = {"sgd": 0.05, "adam": 0.002}
PLANS: dict[str, list[Exchange]] = {
    "lossy": [Exchange(codec="int8"), Exchange(codec="int8", route="shares", shares=(3.0, 1.0, 1.0)), EXACT],
    "local": [Exchange(every=4, outer_rate=0.7, outer_momentum=0.9), Exchange(every=3, codec="int8"), EXACT],
}
"""What is decided in the windows 1, 3 and 5; it rules from the next one on."""


def decided(permission: str, window: int) -> Exchange | None:
    return PLANS[permission][window // 2] if window in (1, 3, 5) else None


def ruling(permission: str, num_windows: int) -> list[str]:
    """What rules each step, as it is to be."""
    windows = [EXACT, *PLANS[permission]]
    return [windows[min(window // 2, 3)].label for window in range(num_windows) for _ in range(WINDOW_STEPS)]


def _real(_rank: int, num_steps: int, permission: str, optimizer_name: str) -> tuple[torch.Tensor, list[str]]:
    """The parameters of real ranks after some steps, and what ruled each, on the data of `virtual.data`."""
    torch.manual_seed(3)
    ddp = DistributedDataParallel(workload_named("fashion-14-mlp").model().double())
    optimizer = make_optimizer(optimizer_name, ddp.parameters(), RATES[optimizer_name])
    data = TensorDataset(*virtual.data(500, dtype=torch.float64).train)
    options: dict[str, Any] = {"base_global_batch_size": 128, "learning_rate_rule": "sqrt", "exchange": permission}
    options |= {"policy": "static", "connect": False, "seed": 3, "global_batch": "adaptive"}
    ruled: list[str] = []
    with attach(ddp, optimizer, data, local_batch_size=SIZES, window_steps=WINDOW_STEPS, **options) as session:
        while len(ruled) < num_steps:
            for inputs, labels in session.loader:
                exchange = decided(permission, session.window) if session.step_index % WINDOW_STEPS == 0 else None
                if exchange is not None:
                    offer(session, SIZES, session.window - 1, exchange=exchange)
                ruled.append(session.allocation.exchange.label)
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(ddp(inputs), labels)
                loss.backward()
                optimizer.step()
                session.step(loss)
                if len(ruled) == num_steps:
                    break
    return flat_parameters(ddp), ruled


@pytest.mark.parametrize(
    ("permission", "num_windows", "optimizer"),
    [("lossy", 4, "sgd"), ("lossy", 8, "sgd"), ("local", 4, "sgd"), ("local", 8, "sgd"), ("local", 8, "adam")],
)
def test_virtual_ranks_have_the_parameters_of_real_ones(permission: str, num_windows: int, optimizer: str) -> None:
    real = run_ranks(_real, len(SIZES), num_windows * WINDOW_STEPS, permission, optimizer)
    scenario = virtual.scenario(
        workers=tuple(Workers(samples_per_s=1000.0, max_local_batch_size=size) for size in SIZES),
        network=Network(num_buckets=1),
        exchange=permission,
        optimizer=optimizer,
        learning_rate=RATES[optimizer],
        window_steps=WINDOW_STEPS,
        initial_local_batch_size=64,
        fixed_time_s=1e3,
        time_limit_s=1e6,
        evaluate_every_s=1e6,
    )
    run, exact = (virtual.cluster(scenario, data=virtual.data(500, dtype=torch.float64)) for _ in range(2))
    ruled = []
    for window in range(num_windows):
        ruled += [run._schedule.allocation_at(run.position.step).exchange.label] * WINDOW_STEPS
        exchange = decided(permission, window)
        if exchange is not None:
            run.offer(virtual.action(run.job, window - 1, SIZES, exchange=exchange))
        run.run_window()
        exact.run_window()
    expected = ruling(permission, num_windows)
    assert ruled == expected
    found, plain = (cluster._gradients.parameters.detach() for cluster in (run, exact))
    for of_rank, ruled_there in real:
        assert ruled_there == expected
        assert float((of_rank - found).abs().max()) < 1e-9
    assert float((plain - found).abs().max()) > 1e-7
