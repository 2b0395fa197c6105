from typing import Any

import pytest
import torch

from dynamix.trainer.job.options import JobOptions, family_of, sizes_of


def _options(**changes: Any) -> JobOptions:
    fields: dict[str, Any] = {
        "local_batch_sizes": (128, 128),
        "base_global_batch_size": 256,
        "window_steps": 20,
        "min_local_batch_size": 32,
        "max_local_batch_size": 1024,
        "max_lag_windows": 4,
        "margin_steps": 2,
        "policy": "static",
        "policy_options": {},
        "optimizer_family": "sgd",
        "learning_rate_rule": "sqrt",
        "reduction": "mean",
        "seed": 0,
        "shuffle": True,
        "drop_last": False,
        "noise_every": 2,
        "noise_decay": 0.9,
    }
    return JobOptions(**(fields | changes))


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
        ({"seed": -1}, "seed=-1"),
        ({"window_steps": 5, "margin_steps": 16}, "draws 14 batches ahead: an action would be 5 windows old"),
    ],
)
def test_what_cannot_work_is_refused_by_name(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        _options(**changes)


def test_a_loader_may_draw_three_windows_ahead_by_default() -> None:
    assert _options(window_steps=5, margin_steps=15).margin_steps == 15


def test_one_size_is_every_ranks() -> None:
    assert sizes_of(64, 3) == (64, 64, 64)
    assert sizes_of([1, 2, 3], 3) == (1, 2, 3)
    with pytest.raises(ValueError, match="holds 2 sizes for 3 ranks"):
        sizes_of([1, 2], 3)


def test_the_optimizer_family_follows_the_class() -> None:
    class MyAdam(torch.optim.AdamW):
        pass

    parameters = [torch.nn.Parameter(torch.zeros(1))]
    assert family_of(torch.optim.SGD(parameters, lr=0.1)) == "sgd"
    assert family_of(torch.optim.RMSprop(parameters)) == "adam"
    assert family_of(MyAdam(parameters)) == "adam"
