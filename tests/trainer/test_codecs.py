"""Gradient codecs: found by name, applied to every bucket, and the same on all ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.ranks import run_ranks
from tests.support.training import Numbered, distribute, flat_parameters, make_model
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from dynamix import trainer as dynamix
from dynamix.runtime.extensions import ExtensionError
from dynamix.trainer.gradient.codecs import find_codec

OPTIONS: dict[str, Any] = {
    "local_batch_size": [5, 11],
    "min_local_batch_size": 1,
    "window_steps": 5,
    "policy": "static",
    "global_batch": "adaptive",
    "connect": False,
}


def _trained(_rank: int, installed: Path, codec: str) -> tuple[torch.Tensor, str]:
    """The parameters after an epoch with unequal batches, and the codec that ruled."""
    import sys  # noqa: PLC0415 - in the rank's process

    sys.path.insert(0, str(installed))
    model = distribute(make_model(torch.float32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dynamix.attach(model, optimizer, Numbered(320, torch.float32), codec=codec, **OPTIONS) as session:
        for _ in session.epochs(1):
            for inputs, targets, _ in session.loader:
                loss = nn.functional.cross_entropy(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                session.step(loss)
        return flat_parameters(model), session.allocation.exchange.codec


def test_a_registered_codec_encodes_what_the_ranks_sum(example_extension: Path) -> None:
    plain, _ = run_ranks(_trained, 2, example_extension, "none")
    coded, other = run_ranks(_trained, 2, example_extension, "example")
    assert (plain[1], coded[1]) == ("none", "example")
    assert torch.equal(coded[0], other[0]), "all ranks decode the same sum"
    difference = (coded[0] - plain[0]).abs().max().item()
    assert 0 < difference < 2e-3, "bfloat16 with error feedback is near, and is not the same"


@pytest.mark.usefixtures("example_extension")
def test_what_is_no_codec_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_codec("none") is None
    with pytest.raises(ValueError, match=r"no installed package registers a gradient codec 'exampl' .*did you mean"):
        find_codec("exampl")
    monkeypatch.delattr("example_extension.codec.ExampleCodec.decode")
    with pytest.raises(ExtensionError, match=r"ExampleCodec is no gradient codec: it needs encode"):
        find_codec("example")


def _refusals(_rank: int, installed: Path) -> list[str]:
    import sys  # noqa: PLC0415 - in the rank's process

    sys.path.insert(0, str(installed))
    found = []
    for more in ({"base_hook": allreduce_hook}, {"weighting": "loss"}):
        model = distribute(make_model(torch.float32))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            dynamix.attach(model, optimizer, Numbered(320, torch.float32), codec="example", **OPTIONS, **more)
        except ValueError as error:
            found.append(str(error))
    return found


def test_a_codec_needs_our_own_hook(example_extension: Path) -> None:
    expected = [
        "codec='example' and a base_hook exclude each other: encode in the base hook",
        "codec='example' needs weighting=\"hook\" on a DistributedDataParallel model",
    ]
    assert run_ranks(_refusals, 2, example_extension) == [expected] * 2
