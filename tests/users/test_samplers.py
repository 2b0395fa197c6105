"""Samplers and streams of a script: what they yield is trained on, and a resumed run goes on at the very sample."""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.support.loops import MOVES, MOVING, gathered, gradient_of, relative_error, whole_gradient
from tests.support.ranks import RankError, run_ranks
from tests.support.training import (
    Numbered,
    begin_job,
    distribute,
    kept_messages,
    make_model,
    offer,
    train_step,
)
from torch import nn
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from dynamix import trainer as dynamix
from dynamix.trainer import Session
from dynamix.trainer.data import stream
from dynamix.trainer.data.orders import RandomNumbers


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


# --- streams: every rank reads the same one ---


class Stream(IterableDataset[Any]):
    """Samples in an order of torch's random numbers; in a worker, as usual, only its part of them."""

    def __init__(self, num_samples: int, *, parts: bool = False) -> None:
        self.data = Numbered(num_samples)
        self.parts = parts

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        start, stride = (0, 1) if info is None else (info.id, info.num_workers)
        if self.parts:
            start, stride = dist.get_rank(), dist.get_world_size()
        order = torch.randperm(len(self.data)).tolist()
        for index in order[start::stride]:
            yield self.data[index]


def _attach(dataset: Any, **options: Any) -> tuple[Session, nn.Module, torch.optim.Optimizer]:
    return begin_job(dataset, **MOVING | options)


def _train_batch(session: Session, model: nn.Module, optimizer: Any, batch: Any) -> list[int]:
    nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
    used: list[int] = batch[2][: session.num_samples].tolist()
    if session.sync_gradients:
        optimizer.step()
        optimizer.zero_grad()
        offer(session, MOVES[session.step_index % len(MOVES)])
    session.step()
    return used


def _read(rank: int, num_workers: int, options: dict[str, Any]) -> dict[str, Any]:
    """Two epochs of a stream without a length, and the rest again from a state in the middle of the second one."""
    torch.manual_seed(rank)
    random.seed(rank)
    session, model, optimizer = _attach(Stream(150), num_workers=num_workers, **options)
    epochs, state, tail = [], {}, []
    for epoch in session.epochs(2):
        mine: list[int] = []
        first = session.step_index
        for batch in session.loader:
            ends_step = session.sync_gradients
            used = _train_batch(session, model, optimizer, batch)
            mine += used
            if state:
                tail += used
            if epoch == 1 and session.step_index == first + 3 and not state and ends_step:
                state = session.state_dict()
        epochs.append(gathered(mine))
    progress = session.progress
    session.close()

    resumed, model, optimizer = _attach(Stream(150), num_workers=num_workers, **options)
    resumed.load_state_dict(state)
    again = [i for _ in resumed.epochs(2) for b in resumed.loader for i in _train_batch(resumed, model, optimizer, b)]
    resumed.close()
    return {"epochs": epochs, "tail": tail, "again": again, "progress": progress}


@pytest.mark.parametrize(
    ("num_workers", "options"),
    [(0, {}), (2, {}), (0, {"micro_batch_size": 4}), (0, {"gradient_accumulation_steps": 2})],
)
def test_a_stream_is_used_exactly_once_and_resumed_at_the_sample(num_workers: int, options: dict[str, Any]) -> None:
    results = run_ranks(_read, 2, num_workers, options)
    for result in results:
        assert [sorted(epoch) for epoch in result["epochs"]] == [list(range(150))] * 2
        assert result["epochs"][0] != result["epochs"][1]
        assert result["tail"] == result["again"]
        assert result["progress"] == pytest.approx(300 / 13)
    assert sum(len(result["tail"]) for result in results) > 40


def _gradient_of_the_end(_rank: int) -> float:
    """The error of the last step's gradient, whose samples are fewer than any rank's plan said."""
    data = Numbered(30)
    session, model, optimizer = _attach(Stream(30), local_batch_size=(18, 8), global_batch="fixed")
    error = 1.0
    for batch in session.loader:
        optimizer.zero_grad()
        used = gathered(batch[2][: session.num_samples].tolist())
        nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
        error = relative_error(gradient_of(model), whole_gradient(data, used))
        assert len(used) == (4 if session.step_index else 26)
    session.close()
    return error


def test_the_last_step_of_a_stream_has_the_gradient_of_what_is_left() -> None:
    assert max(run_ranks(_gradient_of_the_end, 2)) < 1e-12


def _refused_streams(_rank: int) -> None:
    with pytest.raises(ValueError, match="sampler needs a data set with __getitem__"):
        _attach(Stream(10), sampler=lambda _: [1])
    with pytest.raises(ValueError, match="token_counts needs a data set with __getitem__: with a stream use count_tok"):
        _attach(Stream(10), token_counts=[1] * 10)
    with pytest.raises(ValueError, match="a Stream, yields nothing"):
        _attach(Stream(0))
    with pytest.raises(ValueError, match=r"map-style .* or an IterableDataset"):
        _attach(iter(range(10)))


def test_streams_that_cannot_work_are_refused_with_the_fix() -> None:
    run_ranks(_refused_streams, 2)


class Part(Dataset[Any]):
    """What a script's own class makes of its files: `files[rank::2]`, or a random change of each sample."""

    def __init__(self, indices: Sequence[int], change: Callable[[torch.Tensor], Any] = torch.clone) -> None:
        self.data = Numbered(40)
        self.indices = indices
        self.change = change

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        inputs, _, number = self.data[self.indices[index]]
        return self.change(inputs), number


def _divided(rank: int) -> None:
    data, indices = Numbered(40), range(rank, 40, 2)
    augmented = Part(indices, lambda inputs: inputs + np.random.default_rng().normal(size=inputs.shape))
    for parts, num_workers in (
        (Stream(40, parts=True), 0),
        (TensorDataset(data.inputs[rank::2], data.targets[rank::2]), 0),
        (Subset(data, indices), 0),
        ([data[i] for i in indices], 0),
        (Part(indices), 0),
        (Part(indices), 2),
        (augmented, 0),
    ):
        with pytest.raises(ValueError, match=r"differs between ranks.*must be the same on all ranks.*its division by"):
            _attach(parts, num_workers=num_workers)
    with pytest.raises(ValueError, match=r"rank 1's data set has 20 samples, rank 0's 40: every rank needs the whole"):
        _attach(Part(range(40) if rank == 0 else indices))


def test_data_that_were_divided_by_rank_are_refused_on_all_ranks() -> None:
    run_ranks(_divided, 2)


def _changed(rank: int, num_workers: int) -> list[str]:
    """What is said of data that are the same on all ranks, however random: and training sees the same numbers."""

    def own(inputs: torch.Tensor) -> torch.Tensor:
        return inputs + np.random.default_rng().normal(size=inputs.shape)

    def rounded(inputs: torch.Tensor) -> torch.Tensor:
        return inputs * (1 + 1e-6 * rank)

    def failing(_: torch.Tensor) -> torch.Tensor:
        raise OSError("not mounted yet")

    said = kept_messages()
    for change in (lambda inputs: inputs + torch.randn(6) + random.random(), rounded, failing, own):
        assert not said
        model = distribute(make_model())
        before = RandomNumbers.capture()
        begin_job(Part(range(40), change), model, local_batch_size=4, num_workers=num_workers)[0].close()
        after = RandomNumbers.capture()
        assert torch.equal(before.of_torch, after.of_torch)
        assert before.of_python == after.of_python
        assert str(before.of_numpy) == str(after.of_numpy)
    return said


@pytest.mark.parametrize("num_workers", [0, 1])
def test_random_data_that_are_the_same_on_all_ranks_are_taken(num_workers: int) -> None:
    said, nothing = run_ranks(_changed, 2, num_workers)
    assert [message.startswith("the samples of the Part are random by other numbers") for message in said] == [True]
    assert nothing == []


class InOrder(Stream):
    """Yields some of its samples, in their order."""

    def __init__(self, num_samples: int) -> None:
        super().__init__(100)
        self.num_samples = num_samples

    def __iter__(self) -> Iterator[Any]:
        return (self.data[index] for index in range(self.num_samples))


def _read_to_unequal_ends(rank: int, more: int) -> None:
    stream.WAIT_S = 2.0
    session, model, optimizer = _attach(InOrder(80 + more * rank), local_batch_size=4, global_batch="fixed")
    for batch in session.loader:
        _train_batch(session, model, optimizer, batch)


@pytest.mark.parametrize(
    ("more", "error"),
    [
        (3, "rank 1 has read 83 samples in epoch 0 of the stream, and rank 0 other ones"),
        (15, "the stream ends after 80 samples of epoch 0 on rank 0, and other ranks still read"),
    ],
    ids=["in the same step", "one waits for a gradient"],
)
def test_streams_that_end_after_different_numbers_of_samples_are_refused(more: int, error: str) -> None:
    with pytest.raises(RankError, match=error):
        run_ranks(_read_to_unequal_ends, 2, more)


class Counting(Stream):
    """Yields another order each time that it is read."""

    times_read = 0

    def __iter__(self) -> Iterator[Any]:
        self.times_read += 1
        for index in range(len(self.data)):
            yield self.data[(index + self.times_read) % len(self.data)]


def _counting(_rank: int) -> None:
    session, model, optimizer = _attach(Counting(60), local_batch_size=13)
    batches = iter(session.loader)
    _train_batch(session, model, optimizer, next(batches))
    state = session.state_dict()
    session.close()
    dataset = Counting(60)
    dataset.times_read = 1  # as if the script had looked at it
    session, model, optimizer = _attach(dataset, local_batch_size=13)
    session.load_state_dict(state)
    next(iter(session.loader))


def test_a_stream_that_yields_others_than_in_the_saved_run_is_refused() -> None:
    with pytest.raises(RankError, match="the first 13 samples of epoch 0 of the stream are others than before"):
        run_ranks(_counting, 1)
