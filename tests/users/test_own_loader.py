"""A script's own DataLoader under two lines: it trains as without them, or one sentence says why not."""

import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.loops import gathered, loss_of
from tests.support.ranks import run_ranks
from tests.support.training import Numbered, distribute, flat_parameters, kept_messages, make_model, offer
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from dynamix import trainer as dynamix

DATA = Numbered(150)
UNEQUAL: dict[str, Any] = {"local_batch_size": (13, 3), "min_local_batch_size": 0, "policy": "static", "connect": False}


def _attached(loader: Any, **options: Any) -> tuple[Any, Any, Any, Any]:
    model = distribute(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    session, loader = dynamix.attach(model, optimizer, loader, **UNEQUAL | options)
    return session, loader, model, optimizer


class Strided(Sampler[int]):
    """Divides by rank in blocks, as a script's own sampler may; shuffled by the epoch that the script sets."""

    epoch = 0

    def __len__(self) -> int:
        return 70

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(140, generator=torch.Generator().manual_seed(self.epoch))
        yield from order[dist.get_rank() * 70 :][:70].tolist()

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "distributed": lambda: DataLoader(DATA, 8, sampler=DistributedSampler(DATA, seed=3), num_workers=1),
    "drop last": lambda: DataLoader(DATA, 8, sampler=DistributedSampler(DATA, shuffle=False), drop_last=True),
    "own": lambda: DataLoader(DATA, 8, sampler=Strided()),
}


def _script(kind: str, *, attaches: bool, **options: Any) -> dict[str, Any]:
    """A plain script, to which attaching adds one line."""
    loader: Any = LOADERS[kind]()
    model = distribute(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    session: Any = None
    if attaches:
        session, loader = dynamix.attach(model, optimizer, loader, **UNEQUAL | options)
    lengths, steps, mine = [len(loader)], [], []
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        number = 0
        for number, batch in enumerate(loader):
            if session is not None and len(set(session.local_batch_sizes)) > 1:
                offer(session, (4, 12) if number % 2 else (13, 3))
            loss = loss_of(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            lengths.append(len(loader))
            mine.append(batch[2].tolist())
            steps.append(sorted(gathered(mine[-1])))
            if number == 2:
                next(iter(loader))  # a look at some batch, within the loop
        lengths.append(number + 1)
        model.eval()
        with torch.no_grad():  # looks at its training data, as scripts do
            for batch in loader:
                loss_of(model, batch)
        model.train()
    if session is not None:
        session.close()
    return {"parameters": flat_parameters(model), "steps": steps, "mine": mine, "lengths": lengths}


@pytest.mark.parametrize("kind", LOADERS)
def test_a_script_trains_on_the_same_samples_to_the_same_parameters_as_without(kind: str) -> None:
    plain = run_ranks(_plain, 2, kind)
    steered = run_ranks(_steered, 2, kind)
    assert steered[0]["steps"] == plain[0]["steps"]
    for ours, theirs in zip(steered, plain, strict=True):
        assert ours["lengths"] == theirs["lengths"]
        assert len(set(theirs["lengths"])) == 1
        assert torch.allclose(ours["parameters"], theirs["parameters"], rtol=0, atol=1e-12)


def test_of_equal_batches_each_rank_has_the_samples_of_plain_training() -> None:
    for ours, theirs in zip(run_ranks(_equal, 2, "distributed"), run_ranks(_plain, 2, "distributed"), strict=True):
        assert ours["mine"] == theirs["mine"]


def _equal(_rank: int, kind: str) -> dict[str, Any]:
    return _script(kind, attaches=True, local_batch_size=8)


def _plain(_rank: int, kind: str) -> dict[str, Any]:
    return _script(kind, attaches=False)


def _steered(_rank: int, kind: str) -> dict[str, Any]:
    return _script(kind, attaches=True, window_steps=2)


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        (RandomSampler(DATA), list(range(150))),
        (SubsetRandomSampler(range(7, 47)), list(range(7, 47))),
        (WeightedRandomSampler([1.0] * 50 + [0.0] * 100, 60), None),
    ],
)
def test_a_single_process_keeps_its_sampler_and_resumes_within_an_epoch(
    sampler: Sampler[int], expected: Sequence[int] | None
) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def train(session: Any, loader: Any, until: int) -> list[list[int]]:
        found = []
        for batch in loader:
            loss_of(model, batch).backward()
            optimizer.step()
            found.append(batch[2].tolist())
            if session.step_index == until:
                torch.save(session.state_dict(), state)
                state.seek(0)
        session.close()
        return found

    state = io.BytesIO()
    straight = train(*dynamix.attach(model, optimizer, DataLoader(DATA, 16, sampler=sampler), connect=False), until=2)
    session, loader = dynamix.attach(model, optimizer, DataLoader(DATA, 16, sampler=sampler), connect=False)
    session.load_state_dict(torch.load(state, weights_only=True))
    assert train(session, loader, 0) == straight[2:]
    used = [index for batch in straight for index in batch]
    assert sorted(used) == expected if expected else (max(used) < 50 and len(used) == 60)


def _ends(_rank: int) -> dict[str, Any]:
    """A step that a scaler skips, a loss reported anywhere, a loop that is left, and a checkpoint before the next."""
    session, loader, model, optimizer = _attached(LOADERS["distributed"](), window_steps=2)
    steps = []
    for number, batch in enumerate(loader):
        loss = loss_of(model, batch)
        session.step(loss)
        optimizer.zero_grad()
        loss.backward()
        if number != 1:
            optimizer.step()
        if number == 1:
            continue
        steps.append((session.step_index, session.state_dict()["position"]["step"]))
        if number == 3:
            break
    next(iter(loader))
    rows = session.metrics()
    session.close()
    return {"steps": steps, "epoch": loader.next_start().epoch, "losses": [row.get("loss") for row in rows]}


def test_a_step_ends_when_the_optimizer_has_stepped_wherever_its_loss_is_reported() -> None:
    found = run_ranks(_ends, 2)[0]
    assert found["steps"] == [(1, 1), (3, 3), (4, 4)]
    assert found["epoch"] == 1
    assert found["losses"]
    assert None not in found["losses"]


def _refusals(rank: int) -> None:
    def refused(loader: Any, text: str, **options: Any) -> None:
        with pytest.raises((ValueError, TypeError), match=text):
            _attached(loader, **options)

    batches = BatchSampler(SequentialSampler(DATA), 4, drop_last=False)
    refused(DataLoader(DATA, batch_sampler=_Own(DATA, 4)), "draws batches by _Own, dynamix makes the batches itself")
    refused(DataLoader(DATA, batch_size=None), "has batch_size=None")
    refused(_Backwards(DATA, batch_sampler=batches), "a _Backwards, whose own __iter__ dynamix cannot repeat")
    refused(
        DataLoader(DATA, 4), "shuffle, seed, num_workers: the loader has its own", shuffle=True, seed=1, num_workers=1
    )
    refused(DataLoader(DATA, 4, sampler=DistributedSampler(DATA, 3, 0)), "divides by 3 ranks, but 2 train")
    refused(DataLoader(DATA, 4, sampler=RandomSampler(DATA, True, 10**10)), "draws 10000000000 samples in an epoch")
    refused(DataLoader(DATA, 200, drop_last=True), "the loader has no batch")
    refused(DATA, "attach needs local_batch_size", local_batch_size=None)

    session, loader, model, optimizer = _attached(LOADERS["distributed"]())
    batches = iter(loader)
    first = next(batches)
    next(batches)
    loss_of(model, first).backward()
    with pytest.raises(RuntimeError, match=r"attach\(look_ahead=1\) if the script fetches batches ahead"):
        optimizer.step()
    session.close()

    session, loader, model, optimizer = _attached(LOADERS["distributed"]())
    kept = list(loader)
    loss_of(model, kept[0]).backward()
    with pytest.raises(RuntimeError, match="which the script has kept"):
        optimizer.step()
    session.close()

    warned = kept_messages()
    session, *_ = _attached(DataLoader(DATA, 8, shuffle=True))
    session.close()
    assert any("uses each sample 2 times, with dynamix and without" in text for text in warned) == (rank == 0)


class _Own(BatchSampler):
    def __init__(self, data: Any, size: int) -> None:
        super().__init__(SequentialSampler(data), size, drop_last=False)


class _Backwards(DataLoader[Any]):
    def __iter__(self) -> Any:
        return reversed(list(super().__iter__()))


def test_a_loader_that_cannot_be_taken_over_is_refused_with_the_fix() -> None:
    run_ranks(_refusals, 2)
