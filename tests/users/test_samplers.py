"""Samplers of a script's own: exactly what they yield is trained on, and a resumed run goes on at the very sample."""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.loops import MOVES, MOVING, gathered
from tests.support.ranks import RankError, run_ranks
from tests.support.training import Numbered, begin_job, distribute, make_model, offer, train_step
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from dynamix import trainer as dynamix
from dynamix.trainer import Session


class Balanced(Sampler[int]):
    """Equally many samples of each class, in an order of Python's own random numbers."""

    def __init__(self, targets: torch.Tensor) -> None:
        self.by_class = [torch.nonzero(targets == label).flatten().tolist() for label in targets.unique()]
        self.epoch = -1

    def __len__(self) -> int:
        return 20 * len(self.by_class)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        drawn = [index for each in self.by_class for index in random.choices(each, k=20)]
        random.shuffle(drawn)
        return iter(drawn)


def _sampler(kind: str, data: Numbered) -> Any:
    weights = torch.arange(1.0, 1 + len(data))
    made: dict[str, Callable[[], Any]] = {
        "weighted": lambda: WeightedRandomSampler(weights.tolist(), 90),
        "own generator": lambda: WeightedRandomSampler(weights.tolist(), 90, generator=torch.Generator()),
        "balanced": lambda: Balanced(data.targets),
        "subset": lambda: SubsetRandomSampler(range(7, 82)),
        "torch function": lambda: lambda _epoch: torch.multinomial(weights, 90, replacement=True),
        "numpy function": lambda: lambda epoch: np.random.default_rng(epoch).permutation(120)[:90],
    }
    return made[kind]()


def _train_step(session: Session, model: nn.Module, optimizer: Any, batch: Any) -> list[int]:
    """One step; the indices of all ranks that counted, in the order of the step."""
    offer(session, MOVES[(session.step_index + 1) % len(MOVES)])
    return gathered(train_step(session, model, optimizer, batch))


def _train(_rank: int, kind: str, num_workers: int) -> dict[str, Any]:
    """Two epochs, and the same from a state saved in the middle of the second one, with other random numbers."""
    data, model = Numbered(120), distribute(make_model())
    torch.manual_seed(torch.distributed.get_rank())  # a sampler must not need equal random numbers
    options = {"num_workers": num_workers, **MOVING}
    session, model, optimizer = begin_job(data, model, sampler=_sampler(kind, data), **options)
    epochs: list[list[int]] = []
    state: dict[str, Any] = {}
    for epoch in session.epochs(2):
        epochs.append([])
        for number, batch in enumerate(session.loader):
            epochs[-1] += _train_step(session, model, optimizer, batch)
            if (epoch, number) == (1, 1):
                state, at = session.state_dict(), len(epochs[1])
    steps = session.num_reference_steps
    session.close()

    random.seed(torch.distributed.get_rank())
    resumed, model, optimizer = begin_job(data, sampler=_sampler(kind, data), **options)
    resumed.load_state_dict(state)
    again = [i for _ in resumed.epochs(2) for b in resumed.loader for i in _train_step(resumed, model, optimizer, b)]
    resumed.close()
    return {"epochs": epochs, "rest": epochs[1][at:], "again": again, "steps": steps}


@pytest.mark.parametrize(
    ("kind", "num_workers"),
    [("weighted", 2), ("own generator", 0), ("balanced", 0), ("subset", 0), ("torch function", 0),
     ("numpy function", 0)],
)  # fmt: skip
def test_what_a_sampler_yields_is_used_in_its_order_and_resumed_at_the_sample(kind: str, num_workers: int) -> None:
    data = Numbered(120)
    results = run_ranks(_train, 2, kind, num_workers)
    assert results[0]["epochs"] == results[1]["epochs"]
    lengths = {"balanced": 80, "subset": 75}
    for result in results:
        assert [len(epoch) for epoch in result["epochs"]] == [lengths.get(kind, 90)] * 2
        assert result["epochs"][0] != result["epochs"][1]
        assert result["again"] == result["rest"]
        assert result["steps"] == -(-lengths.get(kind, 90) // 13)
    for number, epoch in enumerate(results[0]["epochs"]):
        if kind == "balanced":
            assert set(Counter(data.targets[epoch].tolist()).values()) == {20}
        elif kind == "subset":
            assert sorted(epoch) == list(range(7, 82))
        elif kind == "numpy function":
            assert epoch == np.random.default_rng(number).permutation(120)[:90].tolist()
        else:
            assert np.mean(epoch) > 65  # 79 if drawn by the weights 1 ... 120, 59.5 if all are alike


# --- what is refused -------------------------------------------------------------------------------------------


def _refusals(_rank: int) -> None:
    data, model = Numbered(50), distribute(make_model())

    def refused(sampler: Any, text: str) -> None:
        with pytest.raises(ValueError, match=text):
            begin_job(data, model, sampler=sampler, **MOVING)

    refused(DistributedSampler(data), "DistributedSampler gives each rank a part .* session.loader does itself")
    refused(lambda _: [[1, 2], [3]], "<lambda> must yield indices, .* of a batch sampler pass the sampler inside it")
    refused(lambda _: [0.5, 1.5], "must yield indices")
    refused(lambda _: [], "<lambda> draws no sample")


def test_samplers_that_cannot_work_are_refused_with_the_fix() -> None:
    run_ranks(_refusals, 2)


def _first_batch(_rank: int, sampler: Callable[[Numbered], Any], epoch: int) -> None:
    data = Numbered(50)
    session, *_ = begin_job(data, sampler=sampler(data), **MOVING)
    with session:
        session.loader.begin_epoch(epoch)
        next(iter(session.loader))


def _batches(data: Numbered) -> Any:
    return BatchSampler(SequentialSampler(data), 4, drop_last=False)


def _growing(_data: Numbered) -> Callable[[int], Sequence[int]]:
    return lambda epoch: range(40 + epoch)


@pytest.mark.parametrize(
    ("sampler", "epoch", "text"),
    [(_batches, 0, "BatchSampler must yield indices"), (_growing, 2, "draws 42 samples in epoch 2, but 40 at first")],
)
def test_a_sampler_that_fails_in_rank_0_fails_in_all_ranks(sampler: Any, epoch: int, text: str) -> None:
    with pytest.raises(RankError) as error:
        run_ranks(_first_batch, 2, sampler, epoch)
    assert text in str(error.value)
    assert f"rank 0 could not draw the order of epoch {epoch}: its error says why" in str(error.value)


def _unseeded(_rank: int) -> str:
    """Resume with a sampler that draws by random numbers that the epoch does not seed."""
    data, generator = Numbered(50), np.random.default_rng(1)
    session, model, optimizer = begin_job(data, sampler=lambda _: generator.permutation(50), **MOVING)
    for batch in session.loader:
        _train_step(session, model, optimizer, batch)
        state = session.state_dict()
        break
    session.close()
    resumed, *_ = begin_job(data, sampler=lambda _: generator.permutation(50), **MOVING)
    resumed.load_state_dict(state)
    with pytest.raises(ValueError, match="draws another order for epoch 0 than in the saved run") as error:
        next(iter(resumed.loader))
    resumed.close()
    return str(error.value)


def test_resuming_in_another_order_is_refused() -> None:
    assert len(set(run_ranks(_unseeded, 2))) == 1


def test_shuffle_false_copied_from_beside_a_distributed_sampler_is_warned_about(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """This module knows a `DistributedSampler`, as such a script does."""
    for shuffle in (True, False):
        assert "leave shuffle=False out of attach" not in caplog.text
        model, data = make_model(), Numbered(64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        dynamix.attach(model, optimizer, data, local_batch_size=8, shuffle=shuffle, connect=False).close()
    assert "leave shuffle=False out of attach" in caplog.text
