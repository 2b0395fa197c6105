import inspect
import re
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.job_options import job_options
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from dynamix.trainer import Exchange, attach
from dynamix.trainer.job.options import JobOptions, job_family, options_of, warn_of_missing_bus

DEFAULTS = {name: each.default for name, each in inspect.signature(attach).parameters.items()}
SERVED = {"fixed_exchange": Exchange(route="servers"), "gradient_servers": ("a:1",)}
LINEAR = torch.nn.Linear(1, 1)


def attached(local_batch_size: Any, model: torch.nn.Module = LINEAR, **given: Any) -> JobOptions:
    """The options of `attach` on two ranks."""
    arguments = {
        **DEFAULTS,
        "dataset": [],
        "shuffle": True,
        "drop_last": False,
        "seed": 0,
        "local_batch_size": local_batch_size,
        **given,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return options_of(
        *(arguments, [model], [optimizer]),
        averaging="hook",
        world_size=2,
        margin_steps=2,
        policy="",
        gradient_servers="",
    )


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"local_batch_sizes": (128, 16)}, r"local_batch_size=16 of rank 1 is outside \[32, 1024\]: pass min_local"),
        ({"window_steps": 0}, "window_steps=0: Expected `int` >= 1"),
        ({"min_local_batch_size": 64, "max_local_batch_size": 32}, r"bounds \[64, 32\] hold no batch size"),
        ({"learning_rate_rule": "cubic"}, "use one of none, linear, sqrt"),
        ({"policy": "Not a token"}, "policy='Not a token': a policy's name has 1 to 63 of the characters"),
        ({"shuffle": "no"}, "shuffle='no'"),
        ({"gradient_accumulation_steps": 2, "micro_batch_size": 8}, "exclude each other: drop"),
        ({"policy_options": {"evry": 4.0}}, "policy 'static' has no option 'evry': did you mean every"),
        ({"policy_options": {"every": 2.5}}, "option every=2.5 of policy 'static' must be a whole number"),
        ({"policy_options": {"route": "ring"}}, "option route=ring of policy 'static' must be one of all-reduce"),
        ({"policy_options": {"codec": "No Name"}}, "pass a finite number, or a name"),
        ({"policy_options": {"every": float("nan")}}, "pass a finite number, or a name"),
        ({"policy": "split", "policy_options": {"codec": "int8"}}, "has no option 'codec'"),
        ({"policy_options": {"outer_rate": 0.7}}, "of rounds of local steps: add every=2 or more"),
        (
            {"policy_options": {"codec": "rows"}, **SERVED},
            "rows over all-reduce, but the whole run exchanges them",
        ),
        ({"fixed_exchange": Exchange(shares=(1.0, 2.0))}, "are of the route 'shares': add route='shares'"),
        ({"window_steps": 5, "margin_steps": 16}, "draws 14 batches ahead: an action would be 5 windows old"),
        ({"explores": ("learning_rate",)}, "between the runs of a family: add family='auto'"),
        ({"family": "mnist", "explores": ("rate",)}, "explores="),
        ({"policy": "stigmergy"}, "policy 'stigmergy' needs the compute time of each rank"),
    ],
)
def test_what_cannot_work_is_refused_by_name(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        job_options(**changes)


@pytest.mark.parametrize("given", ["64", 64.0, True, [64, 64.9], None, 0, -8, [0, 0], [8, -1], [8]])
def test_sizes_are_whole_numbers_of_which_one_is_positive(given: Any) -> None:
    with pytest.raises(ValueError, match="local_batch_size"):
        attached(given)


@pytest.mark.parametrize(
    ("given", "warnings"),
    [({}, 0), ({"policy": "static"}, 0), ({"base_hook": allreduce_hook}, 1), ({"global_batch": "adaptive"}, 1)],
)
def test_a_job_whose_policy_needs_a_bus_and_has_none_warns(
    given: dict[str, Any], warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_missing_bus(attached(8, **given))
    assert len(caplog.records) == warnings


def test_ranks_divide_the_batch_themselves_only_with_our_own_hook() -> None:
    assert attached(8).supports_tracking
    assert not attached(8, base_hook=allreduce_hook).supports_tracking
    assert attached(8).initial_allocation.split == "tracking"
    assert attached(8, base_hook=allreduce_hook).initial_allocation.split == "fixed"


def test_numbers_of_numpy_and_torch_are_numbers() -> None:
    assert attached(np.int64(8)).local_batch_sizes == attached(torch.tensor([8, 8])).local_batch_sizes == (8, 8)


def test_bounds_are_what_the_model_needs_and_what_suits_the_initial_sizes() -> None:
    def bounds(*arguments: Any, **given: Any) -> tuple[int, int]:
        options = attached(*arguments, **given)
        return options.min_local_batch_size, options.max_local_batch_size

    normed = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(1))
    assert bounds([128, 64], normed) == (2, 256)
    assert bounds([128, 64], normed, gradient_accumulation_steps=4) == (8, 256)
    assert bounds([4, 1], normed) == (1, 8)
    assert bounds([64, 16], global_batch="adaptive") == (1, 1024)
    assert bounds([8, 8], normed, min_local_batch_size=1, max_local_batch_size=9) == (1, 9)
    assert bounds([8, 8], max_local_batch_size="auto") == (1, 512)
    with pytest.raises(ValueError, match="micro_batch_size without it"):
        bounds([8, 8], max_local_batch_size="auto", micro_batch_size=4)


def test_a_family_is_a_name_or_a_fingerprint_of_what_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/somewhere/Train_MNIST.py", "--epochs", "3"])
    model = torch.nn.Linear(4, 2)

    def auto(model: torch.nn.Module = model, rate: float = 0.1, length: int = 10) -> str:
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        return job_family("auto", [model], [optimizer], list(range(length)), "sqrt")

    found = auto()
    assert re.fullmatch("train-mnist-[0-9a-f]{8}", found)
    assert auto() == found
    assert len({found, auto(torch.nn.Linear(4, 3)), auto(rate=0.2), auto(length=11)}) == 4
    assert job_family(None, [model], [], []) == ""
    assert job_family("mnist", [model], [], []) == "mnist"
    with pytest.raises(ValueError, match="family='My model': use 'auto', or 1 to 63"):
        job_family("My model", [model], [], [])
