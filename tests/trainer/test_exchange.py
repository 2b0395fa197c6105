"""Exchanges on real gloo ranks: exact where promised, and alike on all ranks."""

import hashlib
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import each_case, run_ranks
from tests.support.training import flat_parameters, offer
from tests.support.whole_numbers import (
    SIZES,
    Heads,
    Normalised,
    Sometimes,
    Whole,
    attach,
    distributed,
    mean_loss,
    train_models,
    train_step,
    train_until,
    whole_job,
    whole_loss,
)
from torch import nn

from dynamix.schemas.messages.allocation import EXACT, LOSSY_CODECS, Exchange
from dynamix.trainer.exchange.plan import CODECS


def _trained(
    _rank: int, options: dict[str, Any], plan: dict[int, Exchange], num_steps: int, installed: Path | None = None
) -> dict[str, Any]:
    """Parameters after some steps, and the exchange of each; `plan` offers exchanges by step."""
    if installed is not None:
        sys.path.insert(0, str(installed))
    with whole_job(Whole(whole=False), **options) as (session, model, optimizer):
        active = []
        for batch in session.loader:
            active.append(session.allocation.exchange)
            if session.step_index in plan:
                offer(session, SIZES, exchange=plan[session.step_index])
            train_step(session, model, optimizer, batch)
            if len(active) == num_steps:
                break
        residuals = [each for part in session._models.exchanges for each in part.residuals().values()]
    shown = {row["exchange"] for row in session.metrics()}
    return {"parameters": flat_parameters(model), "active": active, "residuals": residuals, "shown": shown}


def test_what_a_codec_lost_has_arrived_when_the_next_one_begins() -> None:
    coded = [Exchange(codec="int8", route="shares", shares=(1.0, 3.0)), Exchange(codec="bf16")]
    lossy: dict[str, Any] = {"exchange": "lossy"}
    plans = [plan for each in coded for plan in ({2: each, 20: EXACT}, {2: each})]
    first, second = run_ranks(each_case, 2, _trained, [({}, {}, 40), *((lossy, plan, 40) for plan in plans)])
    assert all(torch.equal(one["parameters"], other["parameters"]) for one, other in zip(first, second, strict=True))
    exact, *results = first
    assert 0 < exact["parameters"].abs().max() < 100
    for exchange, ended, longer in zip(coded, results[::2], results[1::2], strict=True):
        assert ended["active"] == [EXACT] * 6 + [exchange] * 18 + [EXACT] * 16
        assert ended["shown"] == {EXACT.label, exchange.label}
        assert ended["residuals"] == []
        assert (ended["parameters"] - exact["parameters"]).abs().max() < 5e-6
        assert longer["residuals"], "still to be sent"
        assert 3e-5 < (longer["parameters"] - exact["parameters"]).abs().max() < 0.5


def test_decisions_choose_among_the_codecs_of_other_packages_that_the_job_names(example_extension: Path) -> None:
    coarse, backwards = Exchange(codec="coarse"), Exchange(codec="reversed")
    named = {"exchange": "lossy", "policy_options": {"codec": "coarse"}}
    plan = {2: EXACT, 8: backwards, 10: coarse}
    cases: list[tuple[Any, ...]] = [
        ({}, {}, 20),
        (named, plan, 20, example_extension),
        ({"policy_options": {"codec": "reversed"}}, {}, 20),
        ({"exchange": backwards}, {}, 20),
    ]
    (exact, decided, *lossless), (_, other, *_) = run_ranks(each_case, 2, _trained, cases)
    assert decided["active"] == [coarse] * 6 + [EXACT] * 8 + [coarse] * 6, "it does not name `reversed`"
    assert torch.equal(decided["parameters"], other["parameters"])
    assert 0 < (decided["parameters"] - exact["parameters"]).abs().max() < 0.05
    for found in lossless:
        assert set(found["active"]) == {backwards}
        assert torch.equal(found["parameters"], exact["parameters"])


# --- every kind of step --------------------------------------------------------------------------------------------


def changing_levers(_rank: int, num_steps: int) -> list[tuple[bool, bytes]]:
    """Whether the ranks are averaged after each step, and a digest of parameters and buffers; all levers change."""
    drawn, num_ranks = random.Random(11), dist.get_world_size()
    exchanges = [Exchange(codec=codec, route=route) for codec in CODECS for route in ("all-reduce", "shares")]
    found: list[tuple[bool, bytes]] = []
    model = distributed(Normalised())
    options: dict[str, Any] = {"exchange": "local", "local_batch_size": 8, "window_steps": 4, "min_local_batch_size": 2}
    options |= {"rate": 2**-8, "momentum": 0.5, "reduction": "mean"}
    with whole_job(Whole(whole=False), model, **options) as (session, _, optimizer):
        while len(found) < num_steps:
            for batch in session.loader:
                sizes = [drawn.choice([2, 8, 20]) for _ in range(2)]
                exchange = msgspec.structs.replace(drawn.choice(exchanges), every=drawn.choice([1, 1, 2, 3, 16]))
                if exchange.route == "shares" and drawn.random() < 0.7:
                    shares = (drawn.random(), drawn.choice([0.0, 1.0]), *[0.5] * (num_ranks - 2))
                    exchange = msgspec.structs.replace(exchange, shares=shares)
                if exchange.every > 1 and drawn.random() < 0.5:
                    exchange = msgspec.structs.replace(
                        exchange, outer_rate=drawn.choice([0.0, 0.7]), outer_momentum=0.5
                    )
                offer(
                    session,
                    [*sizes, *[4] * (num_ranks - 2)],
                    split=drawn.choice(["fixed", "tracking"]),
                    exchange=exchange,
                )
                is_local = session.allocation.exchange.every > 1
                train_step(session, model, optimizer, batch, mean_loss)
                state = [flat_parameters(model).numpy().tobytes()]
                if is_local:  # else DDP broadcasts them in the next forward pass
                    state += [buffer.numpy().tobytes() for buffer in model.buffers()]
                found.append((session.is_averaged, hashlib.sha256(b"".join(state)).digest()))
    assert flat_parameters(model).isfinite().all()
    return found[:num_steps]


def test_ranks_have_the_same_bits_wherever_they_are_averaged_while_levers_change() -> None:
    first, *others = run_ranks(changing_levers, 3, 200)
    averaged = [is_averaged for is_averaged, _ in first]
    assert 40 < sum(averaged) < 160
    for other in others:
        assert [is_averaged for is_averaged, _ in other] == averaged
        differing = [step for step in range(200) if averaged[step] and other[step] != first[step]]
        assert differing == []
    assert sum(one != other for one, other in zip(first, others[0], strict=True)) > 20


KINDS: dict[str, tuple[Callable[[int], list[nn.Module]], dict[str, Any]]] = {
    "bf16": (lambda _: [distributed(Heads(torch.bfloat16))], {}),
    "one rank without a gradient": (
        lambda rank: [distributed(Sometimes(uses_all=rank == 0), find_unused_parameters=True)],
        {},
    ),
    "two models": (lambda _: [distributed(), distributed()], {}),
    "accumulation": (lambda _: [distributed()], {"micro_batch_size": 3}),
    "empty": (lambda _: [distributed()], {"local_batch_size": (0, 16)}),
    "views": (lambda _: [distributed(gradient_as_bucket_view=True)], {}),
}


def kind_of_step(rank: int, kind: str, exchange: Exchange) -> tuple[torch.Tensor, int]:
    """Parameters after 12 steps of some kind, and how many codecs were used."""
    make_models, options = KINDS[kind]
    models = make_models(rank)
    optimizers = [torch.optim.SGD(model.parameters(), lr=2**-6) for model in models]
    chosen: dict[str, Any] = {"exchange": exchange, "local_batch_size": 8} | options
    with attach(models, optimizers, Whole(), **chosen) as session:  # type: ignore[arg-type]
        train_models(session, models, optimizers, 12)
        assert session.is_averaged
        used = len(session._models.exchanges[0]._codecs)
    return torch.cat([flat_parameters(model) for model in models]), used


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_step_can_be_exchanged_and_without_loss_bit_for_bit(kind: str) -> None:
    """The gradients do not depend on parameters, so that the mean of a round of local steps is that of single ones."""
    codecs = [Exchange(codec=codec, route="shares" if codec == "none" else "all-reduce") for codec in CODECS]
    exchanges = [*codecs, Exchange(codec="rows", route="shares"), Exchange(every=3), Exchange(every=3, codec="rows")]
    first, second = run_ranks(each_case, 2, kind_of_step, [(kind, exchange) for exchange in (EXACT, *exchanges)])
    (plain, num_codecs), *coded = first
    assert plain.abs().max() > 0
    assert num_codecs == 0
    for exchange, (parameters, used), (others, _) in zip(exchanges, coded, second[1:], strict=True):
        assert torch.equal(parameters, others)
        assert used == 1
        is_lossy = exchange.codec in LOSSY_CODECS
        assert torch.allclose(parameters, plain, rtol=0, atol=0.05 if is_lossy else 0.0), exchange.label


# --- what is sent beside the gradient ------------------------------------------------------------------------------


def _measured(_rank: int, exchange: Exchange) -> tuple[list[float], tuple[float | None, float, float]]:
    """Squared norms of this rank's and of the whole gradient, in each of 6 steps; what the row says of coding."""
    found = []
    with whole_job(exchange=exchange, window_steps=100) as (session, model, optimizer):
        for inputs, factors in session.loader:
            optimizer.zero_grad()
            whole_loss(model(inputs), factors).backward()
            norms = session._models._hooks[0].take_norms()
            found += [sum(map(float, norms.local)), sum(map(float, norms.reduced))]
            optimizer.step()
            session.step()
            if len(found) == 12:
                break
        row = session._meter.take_row([], None)
        assert session._meter.take_row([], None).coded.wanted == 0.0
    return found, (row.learning_rate, row.coded.wanted, row.coded.sent)


def test_the_noise_is_measured_on_what_was_decoded_and_a_row_has_the_rate_and_what_codecs_sent() -> None:
    exchanges = [EXACT, *(Exchange(codec=codec, route="shares") for codec in CODECS)]
    for (plain, _), *coded in run_ranks(each_case, 2, _measured, [(exchange,) for exchange in exchanges]):
        assert min(plain) > 0
        for codec, (found, (rate, wanted, sent)) in zip(CODECS, coded, strict=True):
            assert found == pytest.approx(plain, rel=0.02 if codec in LOSSY_CODECS else 1e-6), codec
            assert rate == 2**-6
            assert (sent > 0) == (codec in LOSSY_CODECS)
            assert sent == pytest.approx(wanted, rel=0.02)


def _tracked(rank: int, exchange: Exchange) -> tuple[int, ...]:
    """Sizes after 20 steps in which rank 1 takes three times as long per sample."""
    options: dict[str, Any] = {"exchange": exchange, "policy_options": {"track": 1}}
    with whole_job(local_batch_size=8, **options) as (session, model, optimizer):
        session._meter.clock.seconds_per_sample = lambda: (0.001, 0.003)[rank]  # type: ignore[method-assign]
        train_until(20, session, model, optimizer)
        return session.local_batch_sizes


def test_all_ranks_receive_the_compute_times_beside_every_exchange() -> None:
    exchanges = [EXACT, Exchange(codec="int8", route="shares"), Exchange(every=4, codec="int8")]
    found = run_ranks(each_case, 2, _tracked, [(exchange,) for exchange in exchanges])
    assert found == [[(12, 4)] * len(exchanges)] * 2
