import re
from typing import Any

import pytest
import torch
from tests.support.job_options import job_options

from dynamix.trainer import Exchange
from dynamix.trainer.arguments import policy_options_of, sizes_of
from dynamix.trainer.job.options import bounds_of, fewest_samples, job_family


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"local_batch_sizes": (128, 16)}, r"local_batch_size=16 of rank 1 is outside \[32, 1024\]: pass min_local"),
        ({"local_batch_sizes": (2000, 128)}, r"local_batch_size=2000 of rank 0 is outside"),
        ({"window_steps": 0}, "window_steps=0"),
        ({"min_local_batch_size": 64, "max_local_batch_size": 32}, r"bounds \[64, 32\] hold no batch size"),
        ({"min_local_batch_size": 0, "local_batch_sizes": (0, 0)}, "at least one sample"),
        ({"learning_rate_rule": "cubic"}, "use one of none, linear, sqrt"),
        ({"reduction": "none"}, "reduction='none'"),
        ({"policy": "Not a token"}, "policy='Not a token': a policy's name has 1 to 63 of the characters"),
        ({"noise_decay": 1.0}, "noise_decay=1.0: use at least 0, below 1"),
        ({"noise_every": 0}, "noise_every=0"),
        ({"seed": -1}, "seed=-1"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0: use at least 1"),
        ({"gradient_accumulation_steps": 2, "micro_batch_size": 8}, "exclude each other: drop"),
        ({"policy": "static:every=4"}, "pass its options as policy_options"),
        ({"policy_options": {"evry": 4.0}}, "policy 'static' has no option 'evry': did you mean every"),
        ({"policy_options": {"every": 0.0}}, "option every=0 of policy 'static' must be from 1 to 1024"),
        ({"policy_options": {"every": 2.5}}, "option every=2.5 of policy 'static' must be a whole number"),
        (
            {"policy_options": {"route": "ring"}},
            "option route=ring of policy 'static' must be one of all-reduce, shares",
        ),
        (
            {"policy": "split", "policy_options": {"codec": "int8"}},
            "'split' has no option 'codec'",
        ),
        ({"policy_options": {"outer_rate": 0.7}}, "of rounds of local steps: add every=2 or more"),
        (
            {
                "policy_options": {"codec": "rows"},
                "fixed_exchange": Exchange(route="servers"),
                "gradient_servers": ("a:1",),
            },
            "asks for gradients rows over all-reduce, but they travel none over servers in the whole run",
        ),
        ({"fixed_exchange": Exchange(shares=(1.0, 2.0))}, "are of the route 'shares': add route='shares'"),
        ({"window_steps": 5, "margin_steps": 16}, "draws 14 batches ahead: an action would be 5 windows old"),
    ],
)
def test_what_cannot_work_is_refused_by_name(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        job_options(**changes)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("64", "local_batch_size='64' is text: pass a whole number, or a list with one per rank"),
        (64.0, r"local_batch_size=64.0 is of type float: pass a whole number"),
        (True, "local_batch_size=True is of type bool"),
        ([64, 64.9], r"local_batch_size\[1\]=64.9 is of type float: pass a whole number"),
        ([64, "6"], r"local_batch_size\[1\]='6' is text"),
        (None, "local_batch_size=None is of type NoneType"),
    ],
)
def test_a_size_that_is_no_whole_number_is_refused(given: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        sizes_of(given, 2)


@pytest.mark.parametrize("given", [0, -8, [0, 0], [8, -1]])
def test_sizes_without_a_sample_are_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="pass at least 1; in a list a rank may have 0 beside others"):
        sizes_of(given, 2)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"seed": "a"}, "seed='a' is text: pass a whole number"),
        ({"shuffle": "no"}, "shuffle='no' is text: pass True or False"),
        ({"drop_last": 1}, "drop_last=1 is of type int: pass True or False"),
        ({"window_steps": 2.5}, "window_steps=2.5 is of type float: pass a whole number"),
        ({"max_local_batch_size": "1024"}, "max_local_batch_size='1024' is text"),
        ({"noise_decay": "high"}, "noise_decay='high' is text: pass one number"),
    ],
)
def test_an_option_of_another_type_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        job_options(**changes)


def test_options_of_a_policy_are_names_with_numbers() -> None:
    assert policy_options_of({"noise_multiplier": 2, "codec": "int8", "track": "1"})["noise_multiplier"] == 2.0
    assert policy_options_of(None) == {}
    with pytest.raises(ValueError, match="pass a finite number, or a name"):
        policy_options_of({"noise_multiplier": "No Name"})
    with pytest.raises(
        TypeError, match=r"policy_options\['noise_multiplier'\]=None is of type NoneType: pass one number"
    ):
        policy_options_of({"noise_multiplier": None})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="the name 3 is of type int: pass text"):
        policy_options_of({3: 1.0})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="pass a dict of names and numbers"):
        policy_options_of("track=1")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="pass a finite number"):
        policy_options_of({"noise_multiplier": float("nan")})


def test_bounds_are_what_the_model_needs_and_what_suits_the_initial_sizes() -> None:
    assert bounds_of((128, 64), "fixed", (None, None), 2) == (2, 256)
    assert bounds_of((4, 1), "fixed", (None, None), 2) == (1, 8)
    assert bounds_of((64, 16), "adaptive", (None, None), 1) == (1, 1024)
    assert bounds_of((64, 16), "adaptive", (None, None), 8) == (8, 1024)
    assert bounds_of((8, 8), "fixed", (1, 9), 2) == (1, 9)


def test_batch_norm_needs_two_samples_in_each_batch() -> None:
    plain, normed = torch.nn.Linear(1, 1), torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(1))
    assert fewest_samples([plain], 1) == 1
    assert fewest_samples([plain, normed], 4) == 8


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
    assert job_family(None, [model], [], []) == job_family("", [model], [], []) == ""
    assert job_family("mnist", [model], [], []) == "mnist"
    with pytest.raises(ValueError, match="family='My model': use 'auto', or 1 to 63"):
        job_family("My model", [model], [], [])
    with pytest.raises(ValueError, match="family=0: use 'auto'"):
        job_family(0, [model], [], [])  # type: ignore[arg-type]


def test_only_a_family_can_explore() -> None:
    assert job_options(family="mnist", explores=("learning_rate",)).explores == ("learning_rate",)
    with pytest.raises(ValueError, match="between the runs of a family: add family='auto'"):
        job_options(explores=("learning_rate",))
    with pytest.raises(ValueError, match="explores='rate'"):
        job_options(family="mnist", explores=("rate",))
    with pytest.raises(ValueError, match="explores='exchange' has nothing to explore: use it with exchange='lossy'"):
        job_options(family="mnist", explores=("exchange",))
    assert job_options(family="mnist", explores=("learning_rate",), objective="energy").objective == "energy"
    with pytest.raises(ValueError, match="objective='energy' is what runs that try something out are compared by: add"):
        job_options(family="mnist", objective="energy")
    with pytest.raises(ValueError, match="objective='power'"):
        job_options(family="mnist", explores=("learning_rate",), objective="power")
