"""Exchanges on real gloo ranks: exact where promised, and alike on all ranks."""

import hashlib
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import pytest
import torch
from tests.support.ranks import run_ranks
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
    whole_loss,
)
from torch import nn

from dynamix.schemas.messages.allocation import EXACT, LOSSY_CODECS, Exchange
from dynamix.trainer.exchange.codecs import CODECS

ROUTES = {"all-reduce": Exchange(), "shares": Exchange(route="shares", shares=(1.0, 3.0))}


def _trained(
    _rank: int, options: dict[str, Any], plan: dict[int, Exchange], *, whole: bool = True, num_steps: int = 40
) -> dict[str, Any]:
    """Parameters after some steps, and the exchange of each; `plan` offers exchanges by step."""
    model = distributed()
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-6)
    with attach(model, optimizer, Whole(whole=whole), **options) as session:
        ruled = []
        for batch in session.loader:
            ruled.append(session.allocation.exchange)
            if session.step_index in plan:
                offer(session, SIZES, exchange=plan[session.step_index])
            train_step(session, model, optimizer, batch)
            if len(ruled) == num_steps:
                break
        residuals = [each for part in session._models.exchanges for each in part.residuals().values()]
    shown = {row["exchange"] for row in session.metrics()}
    return {"parameters": flat_parameters(model), "ruled": ruled, "residuals": residuals, "shown": shown}


@pytest.fixture(scope="module", params=[True], ids=[""])
def exact(request: pytest.FixtureRequest) -> torch.Tensor:
    """The parameters after training as plain DDP does, with gradients weighed."""
    first, second = run_ranks(partial(_trained, whole=request.param), 2, {}, {})
    assert torch.equal(first["parameters"], second["parameters"])
    assert set(first["ruled"]) == {EXACT}
    parameters: torch.Tensor = first["parameters"]
    assert 0 < parameters.abs().max() < 100
    return parameters


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("codec", sorted(set(CODECS) - LOSSY_CODECS))
def test_gradients_of_whole_numbers_arrive_bit_for_bit(codec: str, route: str, exact: torch.Tensor) -> None:
    exchange = Exchange(codec=codec, route=route, shares=ROUTES[route].shares)
    for result in run_ranks(_trained, 2, {"exchange": exchange}, {}):
        assert set(result["ruled"]) == {exchange}
        assert result["shown"] == {exchange.label}
        assert torch.equal(result["parameters"], exact)


@pytest.mark.parametrize(("codec", "route"), [("int8", "shares"), ("bf16", "all-reduce")])
@pytest.mark.parametrize("exact", [False], indirect=True, ids=[""])
def test_what_a_codec_lost_has_arrived_when_the_next_one_begins(codec: str, route: str, exact: torch.Tensor) -> None:
    lossy = Exchange(codec=codec, route=route, shares=ROUTES[route].shares)
    plan = {2: lossy, 20: EXACT}
    results = run_ranks(partial(_trained, whole=False), 2, {"exchange": "lossy"}, plan)
    assert [result["ruled"] for result in results] == [[EXACT] * 6 + [lossy] * 18 + [EXACT] * 16] * 2
    assert torch.equal(results[0]["parameters"], results[1]["parameters"])
    assert [result["residuals"] for result in results] == [[], []]
    flushed = (results[0]["parameters"] - exact).abs().max().item()

    longer = run_ranks(partial(_trained, whole=False), 2, {"exchange": "lossy"}, {2: lossy})
    assert all(result["residuals"] for result in longer), "still to be sent"
    assert torch.equal(longer[0]["parameters"], longer[1]["parameters"])
    lost = (longer[0]["parameters"] - exact).abs().max().item()
    assert flushed < 5e-6
    assert 3e-5 < lost < 0.5


# --- every kind of step --------------------------------------------------------------------------------------------


def _changing(_rank: int, num_steps: int) -> list[tuple[bool, bytes]]:
    """Whether the ranks are averaged after each step, and a digest of parameters and buffers; all levers change."""
    model = distributed(Normalised())
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-8, momentum=0.5)
    drawn = random.Random(11)
    exchanges = [Exchange(codec=codec, route=route) for codec in CODECS for route in ("all-reduce", "shares")]
    found: list[tuple[bool, bytes]] = []
    options: dict[str, Any] = {"exchange": "local", "local_batch_size": 8, "window_steps": 4, "min_local_batch_size": 2}
    with attach(model, optimizer, Whole(whole=False), reduction="mean", **options) as session:
        while len(found) < num_steps:
            for batch in session.loader:
                sizes = [drawn.choice([2, 8, 20]) for _ in range(2)]
                exchange = msgspec.structs.replace(drawn.choice(exchanges), every=drawn.choice([1, 1, 2, 3, 16]))
                if exchange.route == "shares" and drawn.random() < 0.7:
                    shares = (drawn.random(), drawn.choice([0.0, 1.0]), 0.5)
                    exchange = msgspec.structs.replace(exchange, shares=shares)
                if exchange.every > 1 and drawn.random() < 0.5:
                    exchange = msgspec.structs.replace(exchange, outer_rate=0.7, outer_momentum=0.5)
                offer(session, [*sizes, 4], split=drawn.choice(["fixed", "tracking"]), exchange=exchange)
                is_local = session.allocation.exchange.every > 1
                train_step(session, model, optimizer, batch, mean_loss)
                state = [flat_parameters(model).numpy().tobytes()]
                if is_local:  # else DDP broadcasts them in the next forward pass
                    state += [buffer.numpy().tobytes() for buffer in model.buffers()]
                found.append((session.is_averaged, hashlib.sha256(b"".join(state)).digest()))
    assert flat_parameters(model).isfinite().all()
    return found[:num_steps]


def test_ranks_have_the_same_bits_wherever_they_are_averaged_while_levers_change() -> None:
    first, *others = run_ranks(_changing, 3, 200)
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


def _kind_of_step(rank: int, kind: str, exchanges: Sequence[Exchange]) -> list[tuple[torch.Tensor, int]]:
    """Parameters after 12 steps of some kind with each of these, and how many codecs were used."""
    make_models, options = KINDS[kind]
    found = []
    for exchange in exchanges:
        models = make_models(rank)
        optimizers = [torch.optim.SGD(model.parameters(), lr=2**-6) for model in models]
        chosen: dict[str, Any] = {"exchange": exchange, "local_batch_size": 8} | options
        with attach(models, optimizers, Whole(), **chosen) as session:  # type: ignore[arg-type]
            train_models(session, models, optimizers, 12)
            assert session.is_averaged
            used = len(session._models.exchanges[0]._codecs)
        found.append((torch.cat([flat_parameters(model) for model in models]), used))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_step_can_be_exchanged(kind: str) -> None:
    """The gradients do not depend on parameters, so that the mean of a round of local steps is that of single ones."""
    exchanges = [Exchange(codec=codec, route="shares" if codec == "none" else "all-reduce") for codec in CODECS]
    exchanges += [Exchange(every=3), Exchange(every=3, codec="rows")]
    (plain, *firsts), (_, *seconds) = run_ranks(_kind_of_step, 2, kind, [EXACT, *exchanges])
    assert plain[0].abs().max() > 0
    for exchange, first, second in zip(exchanges, firsts, seconds, strict=True):
        assert torch.equal(first[0], second[0])
        assert (plain[1], first[1]) == (0, 1)
        if exchange.codec in LOSSY_CODECS:
            assert torch.allclose(first[0], plain[0], atol=0.05)
        else:
            assert torch.equal(first[0], plain[0])


# --- what is sent beside the gradient ------------------------------------------------------------------------------


def _measured(_rank: int, exchanges: Sequence[Exchange]) -> list[list[float]]:
    """Squared norms of this rank's and of the whole gradient, in each of 6 steps, for each exchange."""
    return [_norms(exchange) for exchange in exchanges]


def _norms(exchange: Exchange) -> list[float]:
    model = distributed()
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-6)
    found = []
    with attach(model, optimizer, Whole(), exchange=exchange) as session:
        for inputs, factors in session.loader:
            optimizer.zero_grad()
            whole_loss(model(inputs), factors).backward()
            norms = session._models._hooks[0].take_norms()
            found += [sum(map(float, norms.local)), sum(map(float, norms.reduced))]
            optimizer.step()
            session.step()
            if len(found) == 12:
                break
    return found


def test_the_noise_is_measured_on_what_was_decoded() -> None:
    exchanges = [Exchange(codec=codec, route="shares") for codec in CODECS]
    for plain, *coded in run_ranks(_measured, 2, [EXACT, *exchanges]):
        assert min(plain) > 0
        for codec, found in zip(CODECS, coded, strict=True):
            assert found == pytest.approx(plain, rel=0.02 if codec in LOSSY_CODECS else 1e-6), codec


def _tracked(rank: int, exchange: Exchange) -> tuple[tuple[int, ...], list[float]]:
    """Sizes after 20 steps in which rank 1 takes three times as long per sample, and the times that all received."""
    model = distributed()
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-6)
    options: dict[str, Any] = {"exchange": exchange, "policy_options": {"track": 1}}
    with attach(model, optimizer, Whole(), local_batch_size=8, **options) as session:
        session._meter.clock.seconds_per_sample = lambda: (0.001, 0.003)[rank]  # type: ignore[method-assign]
        received: list[float] = []
        after_step = session._steering.after_step

        def listen(position: Any, times: list[float] | None = None, counts: tuple[int, ...] = ()) -> None:
            received.extend(times or [])
            after_step(position, times, counts)

        session._steering.after_step = listen  # type: ignore[method-assign]
        for batch in session.loader:
            train_step(session, model, optimizer, batch)
            if session.step_index == 20:
                break
        return session.local_batch_sizes, received


@pytest.mark.parametrize("exchange", [EXACT, Exchange(codec="int8", route="shares"), Exchange(every=4, codec="int8")])
def test_all_ranks_receive_the_compute_times_beside_every_exchange(exchange: Exchange) -> None:
    for sizes, received in run_ranks(_tracked, 2, exchange):
        assert sizes == (12, 4)
        assert received == pytest.approx([0.001, 0.003] * (20 // exchange.every))


def _counted(_rank: int, exchange: Exchange) -> tuple[float, float, float]:
    """What a rank's row says of the learning rate and of what codecs with loss were to send and sent."""
    model = distributed()
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-6)
    with attach(model, optimizer, Whole(), exchange=exchange, window_steps=100) as session:
        for batch in session.loader:
            train_step(session, model, optimizer, batch)
            if session.step_index == 4:
                break
        row = session._meter.take_row([], None)
        assert session._meter.take_row([], None).coded.wanted == 0.0
    assert row.learning_rate is not None
    return row.learning_rate, row.coded.wanted, row.coded.sent


def test_a_row_has_the_learning_rate_and_what_codecs_sent() -> None:
    for rate, wanted, sent in run_ranks(_counted, 2, Exchange(codec="int8")):
        assert rate == 2**-6
        assert 0 < sent == pytest.approx(wanted, rel=0.02)
    for rate, *coded in run_ranks(_counted, 2, EXACT):
        assert (rate, *coded) == (2**-6, 0.0, 0.0)
