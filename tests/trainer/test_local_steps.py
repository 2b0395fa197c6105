"""Local steps on real gloo ranks, against the same steps computed in one process."""

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tests.support.ranks import each_case, run_ranks
from tests.support.training import flat_parameters, gather, kept_messages, offer
from tests.support.whole_numbers import (
    SIZES,
    Heads,
    Normalised,
    Whole,
    attach,
    distributed,
    mean_loss,
    train_step,
    train_until,
    whole_job,
)
from torch import nn
from torch.utils.data import IterableDataset

from dynamix import trainer
from dynamix.schemas.messages.allocation import EXACT, Exchange
from dynamix.trainer.data.orders import epoch_order
from dynamix.trainer.exchange.plan import CODECS
from dynamix.trainer.steering import beginning

STEPS = 22


class Curved(nn.Module):
    """A model whose gradient depends on its parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.Sequential(nn.Linear(40, 24), nn.Tanh(), nn.Linear(24, 3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(inputs)
        return result


def momentum_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """SGD with a state that ranks can differ in."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)


def _curved_job(
    data: Any = None, **options: Any
) -> AbstractContextManager[tuple[trainer.Session, torch.nn.Module, torch.optim.Optimizer]]:
    """A job of a model whose ranks come apart when they step alone."""
    options |= {"rate": 0.05, "momentum": 0.5, "reduction": "mean"}
    return whole_job(data or Whole(whole=False), distributed(Curved()), **options)


def _trained(_rank: int, exchange: Exchange | None, plan: dict[int, Exchange] | None = None) -> dict[str, Any]:
    """Parameters after each step with a mean loss; `plan` offers exchanges by step."""
    parameters, averaged = [], []
    with _curved_job(exchange=exchange or "local") as (session, model, optimizer):
        for batch in session.loader:
            if plan and session.step_index in plan:
                offer(session, SIZES, exchange=plan[session.step_index])
            train_step(session, model, optimizer, batch, mean_loss)
            parameters.append(flat_parameters(model))
            averaged.append(session.is_averaged)
            if len(parameters) == STEPS:
                break
        session.average()
        parameters.append(flat_parameters(model))
    momentum = [optimizer.state[each]["momentum_buffer"].flatten() for each in model.parameters()]
    return {"parameters": parameters, "averaged": averaged, "momentum": torch.cat(momentum)}


def _alone(rounds: list[int], outer: dict[str, float] | None = None) -> list[torch.Tensor]:
    """The same in one process: two models that are averaged after each round; where all are after each.

    With `outer` torch's SGD with Nesterov momentum makes a step from where the round began; with a rate of 0 the rate
    is that of the docstring of `local_steps`.
    """
    data = Whole(whole=False)
    order = epoch_order(len(data), 0, 0, shuffle=True).tolist()
    models = [Curved() for _ in SIZES]
    optimizers = [momentum_optimizer(model) for model in models]
    common = Curved()
    sgd = torch.optim.SGD(common.parameters(), nesterov=True, **outer) if outer else None
    means, used, agreement = [], 0, 0.0
    for length in rounds:
        for _ in range(length):
            for model, optimizer, size in zip(models, optimizers, SIZES, strict=True):
                mine, used = order[used : used + size], used + size
                optimizer.zero_grad()
                mean_loss(model(data.inputs[mine]), data.factors[mine]).backward()
                optimizer.step()
        weights = [size / sum(SIZES) for size in SIZES]
        with torch.no_grad():
            for ours, *parameters in zip(*(model.parameters() for model in (common, *models)), strict=True):
                ours.grad = ours - sum(weight * each for weight, each in zip(weights, parameters, strict=True))
            agreement = _end_round(common, sgd if length == rounds[0] else None, agreement)
            for model in models:
                model.load_state_dict(common.state_dict())
        means.append(flat_parameters(common))
    return means


def _end_round(model: Curved, sgd: torch.optim.SGD | None, agreement: float) -> float:
    """Go to the mean, or make the outer step; the agreement after it."""
    if sgd is None:
        for each in model.parameters():
            each.sub_(each.grad)
        return agreement
    (group,) = sgd.param_groups
    adapts = group["lr"] == 0.0
    if adapts:
        group["lr"] = (1 - group["momentum"]) / (1 - agreement)
        moved, before = (
            torch.cat([each.flatten() for each in tensors])
            for tensors in (
                [each.grad for each in model.parameters()],
                [sgd.state[each].get("momentum_buffer", torch.zeros_like(each)) for each in model.parameters()],
            )
        )
        if before.any():
            cosine = float(nn.functional.cosine_similarity(moved, before, dim=0))
            agreement = min(max((agreement + cosine) / 2 if agreement else cosine, 0.0), 0.5)
    sgd.step()
    group["lr"] = 0.0 if adapts else group["lr"]
    return agreement


def test_a_round_ends_with_the_weighted_mean_of_the_parameters() -> None:
    means, codecs = _alone([4] * 5 + [2]), sorted(CODECS)
    routes = {"none": "shares", "int8": "shares"}
    exchanges = [Exchange(every=4, codec=codec, route=routes.get(codec, "all-reduce")) for codec in codecs]
    results = run_ranks(each_case, 2, _trained, [(exchange,) for exchange in exchanges])
    for codec, first, second in zip(codecs, *results, strict=True):
        assert first["averaged"] == [(step + 1) % 4 == 0 for step in range(STEPS)]
        ends = [step for step in range(STEPS) if first["averaged"][step]] + [STEPS]
        for step in range(STEPS + 1):
            alike = torch.equal(first["parameters"][step], second["parameters"][step])
            assert alike == (step in ends), (codec, step)
        tolerance = {"bf16": 2e-3, "fp16": 5e-4, "int8": 1e-2}.get(codec, 2e-6)
        for mean, step in zip(means, ends, strict=True):
            assert torch.allclose(first["parameters"][step], mean, atol=tolerance), codec


@pytest.mark.parametrize(("rate", "momentum"), [(0.7, 0.9), (0.0, 0.5)])
def test_a_round_ends_with_an_outer_nesterov_step(rate: float, momentum: float) -> None:
    expected = _alone([4] * 5 + [2], {"lr": rate, "momentum": momentum})
    assert not torch.allclose(expected[-1], _alone([4] * 5 + [2])[-1], atol=1e-2), "it makes no difference"
    exchanges = [Exchange(every=4, codec=codec, outer_rate=rate, outer_momentum=momentum) for codec in ("none", "int8")]
    results = run_ranks(each_case, 2, _trained, [(exchange,) for exchange in exchanges])
    for tolerance, first, second in zip((2e-6, 1e-2), *results, strict=True):
        ends = [step for step in range(STEPS) if first["averaged"][step]] + [STEPS]
        for place, step in zip(expected, ends, strict=True):
            assert torch.equal(first["parameters"][step], second["parameters"][step])
            assert torch.allclose(first["parameters"][step], place, atol=tolerance)


def test_outer_momentum_besides_momentum_of_the_optimizer_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    num_warnings = {}
    for outer, inner in ((0.9, 0.9), (0.0, 0.9), (0.9, 0.0)):
        model, data = torch.nn.Linear(2, 1), torch.randn(8, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=inner)
        exchange = Exchange(every=4, outer_rate=0.7, outer_momentum=outer)
        caplog.clear()
        trainer.attach(model, optimizer, data, local_batch_size=4, exchange=exchange, connect=False).close()
        num_warnings[outer, inner] = len(caplog.messages)
    assert num_warnings == {(0.9, 0.9): 1, (0.0, 0.9): 0, (0.9, 0.0): 0}


def test_other_exchanges_begin_when_all_ranks_have_the_same() -> None:
    local, lossy = Exchange(every=8), Exchange(every=4, codec="int8")
    first, second = run_ranks(_trained, 2, None, {0: local, 8: lossy, 15: EXACT})
    # from step 4 on rounds of 8, from step 12 on rounds of 4 of which the second ends early, from step 18 on none
    assert first["averaged"] == [step not in (4, 5, 6, 7, 8, 9, 10, 12, 13, 14, 16) for step in range(STEPS)]
    for step, averaged in enumerate(first["averaged"]):
        assert torch.equal(first["parameters"][step], second["parameters"][step]) == averaged, step
    assert torch.equal(first["momentum"], second["momentum"])


def _with_buffers(_rank: int) -> dict[str, Any]:
    """Buffers before and after averagings, whether DDP broadcasts them, and Adam's state."""
    model = distributed(Normalised())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    norm, found = model.module.layers[1], []
    options: dict[str, Any] = {"reduction": "mean", "exchange": "local", "window_steps": 4}
    with attach(model, optimizer, Whole(whole=False), **options) as session:
        for inputs, factors in session.loader:
            if session.step_index == 0:
                offer(session, SIZES, exchange=Exchange(every=2, codec="bf16"))
            if session.step_index == 6:
                offer(session, SIZES)
            mean_loss(model(inputs), factors).backward()
            before = norm.running_mean.clone()
            optimizer.step()
            optimizer.zero_grad()
            session.step()
            ends = [norm.running_mean.clone(), norm.num_batches_tracked.clone(), model.module.constant.clone()]
            found.append((before, ends, model.broadcast_buffers))
            if session.step_index == 14:
                break
    state = [optimizer.state[each] for each in model.parameters()]
    return {
        "steps": found,
        "moments": torch.cat([each[name].flatten() for each in state for name in ("exp_avg", "exp_avg_sq")]),
        "counts": {float(each["step"]) for each in state},
        "parameters": flat_parameters(model),
    }


def test_buffers_are_averaged_and_the_state_of_adam_when_local_steps_end() -> None:
    first, second = run_ranks(_with_buffers, 2)
    assert [shares for _, _, shares in first["steps"]] == [True] * 4 + [False] * 7 + [True] * 3
    for step in (9, 11):
        (before, ends, _), (other, other_ends, _) = first["steps"][step], second["steps"][step]
        assert not torch.equal(before, other)
        assert torch.allclose(ends[0], 0.25 * before + 0.75 * other, atol=1e-6)
        assert all(torch.equal(*pair) for pair in zip(ends, other_ends, strict=True))
        assert ends[1] == step + 1
        assert torch.equal(ends[2], torch.tensor([0.1, 0.7, float("inf")])), "a constant stays as it is"
    assert not torch.equal(first["steps"][8][1][0], second["steps"][8][1][0])
    assert torch.equal(first["moments"], second["moments"])
    assert first["counts"] == second["counts"] == {14.0}
    assert torch.equal(first["parameters"], second["parameters"])


# --- what is measured ----------------------------------------------------------------------------------------------


def _noise(_rank: int, exchange: Exchange, wide: bool) -> list[tuple[int, float, float]]:
    """Step and squared norms of this rank's and of the whole gradient, where they were measured."""
    found, heads = [], distributed(Heads() if wide else nn.Linear(40, 8))
    with whole_job(None, heads, exchange=exchange, noise_every=4) as (session, model, optimizer):
        record_batch = session._meter.record_batch

        def listen(batch: Any, loss: Any, num_correct: Any, norms: Any) -> None:
            if norms.reduced:
                step = batch.plan.step if norms.counts is None else batch.plan.step - exchange.every + 1
                found.append((step, sum(map(float, norms.local)), sum(map(float, norms.reduced))))
            record_batch(batch, loss, num_correct, norms)

        session._meter.record_batch = listen  # type: ignore[method-assign]
        train_until(30, session, model, optimizer)
    return found


@pytest.mark.parametrize("wide", [False, True])
def test_the_noise_is_measured_where_all_ranks_have_the_same_parameters(wide: bool) -> None:
    plain, local = run_ranks(_noise, 2, EXACT, wide), run_ranks(_noise, 2, Exchange(every=3), wide)
    for rank in (0, 1):
        norms = {step: numbers for step, *numbers in plain[rank]}
        steps = [step for step, *_ in local[rank]]
        assert steps == [0, 3, 6, 9, 12, 15, 18, 21, 24]  # due on each of the first 20 steps, then on 20, 24, 28
        for step, *numbers in local[rank]:
            if step in norms:
                assert numbers[0] == pytest.approx(norms[step][0], rel=1e-4)
                assert numbers[1] == pytest.approx(norms[step][1], rel=0.1 if wide else 1e-5)
    assert [each[2] for each in local[0]] == [each[2] for each in local[1]]


# --- epochs, states and early ends -----------------------------------------------------------------------------------


def _saved(_rank: int, outer: dict[str, float]) -> dict[str, Any]:
    """Refusals in mid-round, and parameters after 18 steps: in one go, or in two sessions."""
    found: dict[str, Any] = {}
    options: dict[str, Any] = {"exchange": "local", "policy_options": {"every": 4, "codec": "int8", **outer}}
    for how in ("whole", "parts"):
        model, state = distributed(Curved()), None
        optimizer = momentum_optimizer(model)
        for steps in (18,) if how == "whole" else (8, 18):
            with attach(model, optimizer, Whole(whole=False), reduction="mean", **options) as session:
                if state is not None:
                    session.load_state_dict(state)
                for batch in session.loader:
                    train_step(session, model, optimizer, batch, mean_loss)
                    if session.step_index == 5:
                        with pytest.raises(RuntimeError) as refused:
                            session.state_dict()
                        found["refused"] = str(refused.value)
                    if session.step_index == steps:
                        break
                session.average()
                state = session.state_dict()
        found[how] = flat_parameters(model)
    return found


def test_a_job_resumed_at_an_averaging_goes_on_exactly() -> None:
    outer = {"outer_rate": 0.0, "outer_momentum": 0.9}
    for first, second in zip(*run_ranks(each_case, 2, _saved, [({},), (outer,)]), strict=True):
        assert first["refused"].startswith("step 5 is in the middle of a round of local steps, each rank has")
        assert torch.equal(first["whole"], second["whole"])
        assert torch.equal(first["parts"], first["whole"])
        assert torch.equal(second["parts"], first["whole"])


@patch("dynamix.trainer.session.AVERAGED_SHARE", 0.5)
def _averaged(_rank: int) -> dict[str, Any]:
    """Parameters and averaged weights after each step; the averaged ones again, in a run resumed in between."""
    found: dict[str, Any] = {"parameters": [], "averaged": []}
    saved: list[dict[str, Any]] = []
    with _curved_job(exchange="local") as (session, model, optimizer):
        averaged = session.averaged(model)
        for batch in session.loader:
            if session.step_index == 2:
                offer(session, SIZES, exchange=Exchange(every=4))
            train_step(session, model, optimizer, batch, mean_loss)
            found["parameters"].append(flat_parameters(model))
            found["averaged"].append(flat_parameters(averaged))
            if session.step_index > 10 and session.is_averaged and not saved:
                saved = [copy.deepcopy(each.state_dict()) for each in (session, model, optimizer, averaged)]
            if session.step_index == STEPS:
                break
    with _curved_job(exchange="local") as (session, model, optimizer):
        averaged = session.averaged(model)
        for each, state in zip((session, model, optimizer, averaged), saved, strict=True):
            each.load_state_dict(state)
        train_until(STEPS, session, model, optimizer, mean_loss)
        found["resumed"] = flat_parameters(averaged)
    return found


def test_averaged_weights_are_those_of_the_last_samples_where_ranks_agree_and_change_no_training() -> None:
    first, second = run_ranks(_averaged, 2)
    plain = run_ranks(_trained, 2, None, {2: Exchange(every=4)})[0]
    expected, since = first["parameters"][0], 0
    for step, (ours, trained) in enumerate(zip(first["averaged"], plain["parameters"], strict=False), 1):
        assert torch.equal(first["parameters"][step - 1], trained), step
        assert torch.equal(ours, second["averaged"][step - 1]), step
        since += 1
        if plain["averaged"][step - 1]:
            expected, since = torch.lerp(expected, trained, min(1.0, since / (0.5 * step))), 0
        assert torch.allclose(ours, expected, atol=1e-7), step
    assert torch.equal(first["resumed"], first["averaged"][-1])


def _epochs(_rank: int, streams: bool) -> list[tuple[bool, bytes]]:
    """Whether the ranks are averaged at the end of each epoch, and the parameters and momentum there."""
    data: Any = Streamed() if streams else Whole(whole=False, num_samples=100)
    found = []
    with _curved_job(data, exchange=Exchange(every=16)) as (session, model, optimizer):
        for _ in session.epochs(2):
            train_until(10**9, session, model, optimizer, mean_loss)
            momentum = torch.cat([optimizer.state[each]["momentum_buffer"].flatten() for each in model.parameters()])
            found.append((session.is_averaged, torch.cat([flat_parameters(model), momentum]).numpy().tobytes()))
    return found


class Streamed(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """The same samples as a stream, whose end is not known."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        data = Whole(whole=False, num_samples=100)
        return (data[index] for index in range(len(data)))


def test_an_epoch_ends_with_an_averaging() -> None:
    for first, second in zip(*run_ranks(each_case, 2, _epochs, [(False,), (True,)]), strict=True):
        assert [averaged for averaged, _ in first] == [True, True]
        assert first == second
        assert first[0] != first[1]


def _left(_rank: int) -> list[str]:
    said, model = kept_messages(), distributed(Normalised())
    with whole_job(None, model, reduction="mean", exchange=Exchange(every=4)) as (session, _, optimizer):
        train_until(6, session, model, optimizer, mean_loss)
        with pytest.raises(RuntimeError) as refused:
            session.cover(distributed())
    assert model.broadcast_buffers
    return [str(refused.value), *(each for each in said if "local steps" in each)]


def test_a_session_that_ends_in_mid_round_says_so() -> None:
    covered, left = run_ranks(_left, 2)[0]
    assert covered.startswith("step 6 is in the middle of a round of local steps, a model that is covered now")
    assert left.startswith("the session ends in the middle of a round of local steps")


def _begun(_rank: int, exposed: float, permission: str) -> tuple[list[Exchange], Exchange, bool]:
    """The exchange of each step where so little must be exposed, and what the job's specification says of it."""
    beginning.EXPOSED = exposed
    options = {"exchange": permission, "policy": "rule", "window_steps": 10}
    with _curved_job(Whole(whole=False, num_samples=400), **options) as (session, model, optimizer):
        exchanges = []
        for batch in session.loader:
            exchanges.append(session.allocation.exchange)
            train_step(session, model, optimizer, batch, mean_loss)
        session.average()
        parameters = gather(flat_parameters(model))
        job = session._run.reporter.specification(total_samples=None)
    assert all(torch.equal(each, parameters[0]) for each in parameters)
    return exchanges, job.initial_exchange, job.exact_exposed_s is not None


def test_ranks_begin_with_cheaper_exchanges_by_themselves_all_at_one_step() -> None:
    coded = Exchange(codec="int8")
    cases = [(-1e9, "local"), (-1e9, "lossy"), (1.0, "local"), (-1e9, "exact")]
    for rank, of_rank in enumerate(run_ranks(each_case, 2, _begun, cases)):
        rounds = of_rank[0][0][-1]  # by the measured times
        assert rounds.codec == "int8"
        for (exchanges, initial, is_known), begun in zip(of_rank, (rounds, coded, EXACT, EXACT), strict=True):
            assert exchanges == [EXACT] * 2 + [begun] * (len(exchanges) - 2)
            assert rank > 0 or (initial, is_known) == (begun, begun != EXACT)  # rank 0 publishes it
