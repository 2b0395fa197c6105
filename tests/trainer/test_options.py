from typing import Any

import pytest
import torch
from tests.support.job_options import job_options

from dynamix.trainer.job.options import bounds_of, family_of, fewest_samples, sizes_of


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
        ({"policy": "Not a token"}, "cannot be part of a subject"),
        ({"noise_decay": 1.0}, r"noise_decay=1.0 is outside \[0, 1\)"),
        ({"noise_every": 0}, "noise_every=0"),
        ({"noise_metric": "rms"}, "noise_metric"),
        ({"seed": -1}, "seed=-1"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0: a step has at least 1"),
        ({"gradient_accumulation_steps": 2, "micro_batch_size": 8}, "exclude each other: drop"),
        ({"window_steps": 5, "margin_steps": 16}, "draws 14 batches ahead: an action would be 5 windows old"),
    ],
)
def test_what_cannot_work_is_refused_by_name(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        job_options(**changes)


def test_a_loader_may_draw_three_windows_ahead_by_default() -> None:
    assert job_options(window_steps=5, margin_steps=15).margin_steps == 15


def test_one_size_is_every_ranks() -> None:
    assert sizes_of(64, 3) == (64, 64, 64)
    assert sizes_of([1, 2, 3], 3) == (1, 2, 3)
    with pytest.raises(ValueError, match="holds 2 sizes for 3 ranks"):
        sizes_of([1, 2], 3)


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


def test_the_optimizer_family_follows_the_class() -> None:
    class MyAdam(torch.optim.AdamW):
        pass

    parameters = [torch.nn.Parameter(torch.zeros(1))]
    assert family_of(torch.optim.SGD(parameters, lr=0.1)) == "sgd"
    assert family_of(torch.optim.RMSprop(parameters)) == "adam"
    assert family_of(MyAdam(parameters)) == "adam"
