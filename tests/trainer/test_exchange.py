"""How gradients travel, on real gloo ranks: exact where it is said to be, alike on all ranks, and never a hang."""

import hashlib
import random
from collections.abc import Callable
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
    Sometimes,
    Whole,
    attach,
    distributed,
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


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("codec", sorted(LOSSY_CODECS))
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

EXCHANGES = [Exchange(codec=codec, route=route) for codec in CODECS for route in ("all-reduce", "shares")]


def _changing(_rank: int, num_steps: int) -> list[bytes]:
    """The parameters after each step, as a digest, while sizes, split and exchange change in each window."""
    model = distributed()
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-8, momentum=0.5)
    drawn = random.Random(7)
    digests = []
    options: dict[str, Any] = {
        "local_batch_size": 8,
        "window_steps": 3,
        "base_global_batch_size": 24,
    }
    with attach(model, optimizer, Whole(whole=False), exchange="lossy", **options) as session:
        while len(digests) < num_steps:
            for batch in session.loader:
                sizes = [drawn.choice([0, 1, 8, 20]) for _ in range(2)]
                exchange = drawn.choice(EXCHANGES)
                if exchange.route == "shares" and drawn.random() < 0.7:
                    shares = (drawn.random(), drawn.choice([0.0, 1.0]), 0.5)
                    exchange = msgspec.structs.replace(exchange, shares=shares)
                offer(session, [*sizes, 4], split=drawn.choice(["fixed", "tracking"]), exchange=exchange)
                train_step(session, model, optimizer, batch)
                digests.append(hashlib.sha256(flat_parameters(model).numpy().tobytes()).digest())
    assert flat_parameters(model).isfinite().all()
    return digests[:num_steps]


def test_the_parameters_of_all_ranks_are_the_same_bits_over_500_steps_of_changing_levers() -> None:
    first, *others = run_ranks(_changing, 3, 500)
    assert len(set(first)) == 500
    assert others == [first, first]


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


def _kind_of_step(rank: int, kind: str, exchange: Exchange) -> tuple[torch.Tensor, int]:
    """Parameters after 12 steps of some kind, and how many codecs were used."""
    make_models, options = KINDS[kind]
    models = make_models(rank)
    optimizers = [torch.optim.SGD(model.parameters(), lr=2**-6) for model in models]
    with attach(models, optimizers, Whole(), exchange=exchange, **options) as session:  # type: ignore[arg-type]
        train_models(session, models, optimizers, 12)
        used = len(session._models.exchanges[0]._codecs)
    return torch.cat([flat_parameters(model) for model in models]), used


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_step_can_be_exchanged(kind: str) -> None:
    plain = run_ranks(_kind_of_step, 2, kind, EXACT)
    for codec in CODECS:
        exchange = Exchange(codec=codec, route="shares" if codec == "none" else "all-reduce")
        first, second = run_ranks(_kind_of_step, 2, kind, exchange)
        assert torch.equal(first[0], second[0])
        assert (plain[0][1], first[1]) == (0, 1)
        if codec in LOSSY_CODECS:
            assert torch.allclose(first[0], plain[0][0], atol=0.05)
        else:
            assert torch.equal(first[0], plain[0][0])


# --- what travels beside the gradient ------------------------------------------------------------------------------


def _measured(_rank: int, exchange: Exchange) -> list[float]:
    """Squared norms of this rank's and of the whole gradient, in each of 6 steps."""
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
    plain = run_ranks(_measured, 2, EXACT)
    assert min(plain[0] + plain[1]) > 0
    for codec in CODECS:
        coded = run_ranks(_measured, 2, Exchange(codec=codec, route="shares"))
        for rank in (0, 1):
            assert coded[rank] == pytest.approx(plain[rank], rel=0.02 if codec in LOSSY_CODECS else 1e-6), codec


def _tracked(rank: int, codec: str) -> tuple[tuple[int, ...], list[float]]:
    """Sizes after 12 steps in which rank 1 takes three times as long per sample, and the times that all were told."""
    model = distributed()
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-6)
    options = {
        "exchange": "lossy",
        "policy_options": {"track": 1, "codec": codec, "route": "shares"},
        "local_batch_size": 8,
    }
    with attach(model, optimizer, Whole(), **options) as session:
        session._meter.clock.seconds_per_sample = lambda: (0.001, 0.003)[rank]  # type: ignore[method-assign]
        heard: list[float] = []
        take_times = session._models.take_times
        session._models.take_times = lambda: heard.extend(times := take_times() or []) or times  # type: ignore[method-assign]
        for batch in session.loader:
            train_step(session, model, optimizer, batch)
            if session.step_index == 12:
                break
        return session.local_batch_sizes, heard


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_compute_times_travel_exactly_beside_every_codec(codec: str) -> None:
    for sizes, heard in run_ranks(_tracked, 2, codec):
        assert sizes == (12, 4)
        assert heard == pytest.approx([0.001, 0.003] * 12)


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
