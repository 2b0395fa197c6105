"""Models as scripts have them: several, compiled, copied, attached again, or without anything that averages."""

import copy
import io
from typing import Any

import pytest
import torch
from tests.support.loops import OPTIONS, SIZES, gathered, gradient_of, loss_of, relative_error, whole_gradient
from tests.support.ranks import run_ranks
from tests.support.training import Numbered, begin_job, distribute, make_model, offer
from torch import nn
from torch.distributed.fsdp import fully_shard

from dynamix import trainer as dynamix
from dynamix.trainer.frameworks.loaders import require_ddp


def _two_models(_rank: int, how: str) -> dict[str, Any]:
    data = Numbered(300)
    first, second = distribute(make_model(seed=0)), distribute(make_model(seed=1))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.0) for model in (first, second)]
    models, optimizer = ([first, second], optimizers) if how == "lists" else (first, optimizers[0])
    session = dynamix.attach(models, optimizer, data, global_batch="adaptive", **OPTIONS)
    if how == "cover":
        session.cover(second, optimizers[1])
    errors = []
    for batch in session.loader:
        used = gathered(batch[2][: session.num_samples].tolist())
        for model, optimizer, seed in ((first, optimizers[0], 0), (second, optimizers[1], 1)):
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            errors.append(relative_error(gradient_of(model), whole_gradient(data, used, seed)))
            optimizer.step()
        offer(session, SIZES[(session.step_index + 1) % len(SIZES)])
        session.step(loss)
    times = session.times
    session.close()
    return {"error": max(errors), "positive": times is not None and times.compute_s > 0}


@pytest.mark.parametrize("how", ["lists", "cover"])
def test_two_models_both_get_the_gradient_of_one_big_batch(how: str) -> None:
    for result in run_ranks(_two_models, 2, how):
        assert result["error"] < 1e-12
        assert result["positive"]


def _scaled_rates(_rank: int) -> list[float]:
    """Learning rates that both optimizers step with, at half the base batch."""
    rates: list[float] = []
    models = [distribute(make_model(seed=seed)) for seed in (0, 1)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    session = dynamix.attach(
        models, optimizers, Numbered(64), local_batch_size=8, base_global_batch_size=64, global_batch="adaptive",
        learning_rate_rule="linear", connect=False,
    )  # fmt: skip
    for optimizer in optimizers:
        optimizer.register_step_pre_hook(lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"]))
    for batch in session.loader:
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
        session.step()
        break
    session.close()
    return [*rates, *(optimizer.param_groups[0]["lr"] for optimizer in optimizers)]


def test_the_learning_rates_of_all_optimizers_follow_the_batch() -> None:
    assert run_ranks(_scaled_rates, 2)[0] == [0.025, 0.025, 0.1, 0.1]


def _uncovered(_rank: int, made: str) -> None:
    data = Numbered(64)
    before = distribute(make_model(seed=1)) if made == "before" else None
    session, *_ = begin_job(data)
    second = before or distribute(make_model(seed=1))
    for batch in session.loader:
        with torch.no_grad():
            second(batch[0])  # a teacher is not trained
        second.eval()
        second(batch[0])
        second.train()
        with pytest.raises(RuntimeError, match=r"second DistributedDataParallel.*session.cover\(model, optimizer\)"):
            second(batch[0])
        session.ignore(second)
        second(batch[0])
        break
    session.close()
    second(data.inputs[:2])  # the session has ended


@pytest.mark.parametrize("made", ["before", "after"])
def test_training_a_second_model_that_is_not_covered_is_refused(made: str) -> None:
    run_ranks(_uncovered, 2, made)


def _forgotten(_rank: int) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"nothing averages .* Sequential over 2 ranks: .*\(model\), or, .*scale_loss"):
        dynamix.attach(model, optimizer, Numbered(64), local_batch_size=8, connect=False)
    for each in model.parameters():
        vars(each)["_in_backward_optimizers"] = [optimizer]  # as torch's _apply_optimizer_in_backward leaves it
    with pytest.raises(ValueError, match=r"updated inside of the backward pass .* call optimizer.step\(\) after it"):
        dynamix.attach(distribute(model), optimizer, Numbered(64), local_batch_size=8, connect=False)


class DeepSpeedEngine(nn.Module):
    """Known by its name only, as deepspeed need not be installed."""

    def __init__(self) -> None:
        super().__init__()
        self.module = make_model()


def _of_others(_rank: int) -> None:
    engine, sharded = DeepSpeedEngine(), make_model()
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
    for weighting in ("auto", "loss"):
        with pytest.raises(ValueError, match=r"DeepSpeedEngine: .* unequal batches .* or FSDP2"):
            dynamix.attach(engine, optimizer, Numbered(64), local_batch_size=8, connect=False, weighting=weighting)
    fully_shard(sharded)
    with pytest.raises(ValueError, match=r"Lightning trains a FSDPSequential here, .* use DDP, or, .*scale_loss"):
        require_ddp(sharded, "Lightning")
    require_ddp(distribute(make_model()), "Lightning")


def _copies(_rank: int) -> None:
    """A covered model and one beside it can be copied and pickled, and the copies train by themselves."""
    data, other = Numbered(64), distribute(make_model(seed=1))
    session, model, _ = begin_job(data)
    for each in (model, other):
        copied = copy.deepcopy(each)
        torch.save(each, io.BytesIO())
        torch.optim.swa_utils.AveragedModel(each)
        copied.module(data.inputs[:2]).sum().backward()
    session.close()


def _own_batches(rank: int) -> list[float]:
    """Errors of gradients on batches of the script's own, before, between and after the steps; and of the steps."""
    data = Numbered(200)
    session, model, optimizer = begin_job(data, rate=0.0, **OPTIONS)
    mine, both = list(range(10 * rank, 10 * rank + 10)), list(range(20))

    def error_of_own() -> float:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(data.inputs[mine]), data.targets[mine]).backward()
        return relative_error(gradient_of(model), whole_gradient(data, both))

    errors = [error_of_own()]
    for batch in session.loader:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        used = gathered(batch[2][: session.num_samples].tolist())
        errors.append(relative_error(gradient_of(model), whole_gradient(data, used)))
        optimizer.step()
        session.step()
        errors.append(error_of_own())
    session.close()
    return [*errors, error_of_own()]


def test_batches_of_the_scripts_own_are_averaged_as_under_plain_ddp_also_after_the_session() -> None:
    for errors in run_ranks(_own_batches, 2):
        assert max(errors) < 1e-12


@pytest.mark.parametrize("script", [_forgotten, _of_others])
def test_models_whose_gradients_cannot_be_weighed_are_refused_with_the_fix(script: Any) -> None:
    run_ranks(script, 2)


def test_a_covered_model_can_be_copied_and_saved_whole() -> None:
    run_ranks(_copies, 2)
