"""The node level on real gloo ranks: two nodes of two ranks, told apart by their launcher."""

import logging
import os
from typing import Any

import pytest
import torch
from tests.support.exchanges import make_parts
from tests.support.ranks import each_case, run_ranks
from tests.support.training import flat_parameters
from tests.support.whole_numbers import Whole, distributed, train_step, whole_job
from tests.trainer.test_exchange import changing_levers, kind_of_step
from tests.trainer.test_weighting import compare_with_one_batch

from dynamix.schemas.messages.allocation import EXACT, LOSSY_CODECS, Exchange
from dynamix.trainer.exchange.nodes import Cut, Nodes

ON = {"DYNAMIX_TRAINER_NODES": "on"}


def _as_node(rank: int, function: Any, cases: list[tuple[Any, ...]]) -> list[Any]:
    """Results of `function(rank, *case)` for each case, as a launcher of two ranks per node starts them."""
    os.environ["GROUP_RANK"] = str(rank // 2)
    return each_case(rank, function, cases)


def test_only_nodes_with_several_ranks_each_sum_first(caplog: pytest.LogCaptureFixture) -> None:
    assert Nodes.among([(0, 1, 2, 3)], 0) is None
    assert Nodes.among([(0,), (1,)], 0) is None
    assert caplog.text == ""
    with caplog.at_level(logging.WARNING):
        assert Nodes.among([(0, 1), (2,)], 0) is None
    assert "1 to 2 ranks" in caplog.text
    crossed = Nodes.among([(0, 3), (1, 2)], 3)
    assert crossed is not None
    assert (crossed.inside, crossed.peers) == ((0, 3), (2, 3))
    shared = crossed.between(Exchange(route="shares", shares=(1.0, 2.0, 3.0, 4.0)))
    assert shared.shares == (5.0, 5.0), "a node has the shares of its ranks"


def test_a_rank_keeps_its_piece_of_a_parameter_when_buckets_are_made_again() -> None:
    shapes: dict[str, tuple[int, ...]] = {"table": (160, 3), "weight": (4, 5), "bias": (7,), "scale": ()}
    flat = torch.arange(508.0)
    for num_ranks in (2, 3, 8):
        cuts = [Cut.of(make_parts(shapes), num_ranks, place) for place in range(num_ranks)]
        pieces = torch.split(cuts[0].by_rank(flat), cuts[0].lengths)
        again = torch.zeros_like(flat)
        cuts[0].put_back(torch.cat(pieces), again)
        assert torch.equal(again, flat)
        for cut, piece in zip(cuts, pieces, strict=True):
            assert [cut.parts[-1].stop, cut.parts[0].shape[1]] == [len(piece), 3], "the table is cut between rows"
        backwards = make_parts(dict(reversed(shapes.items())))
        for place, cut in enumerate(cuts):
            other = Cut.of(backwards, num_ranks, place)
            assert {(part.key, part.shape) for part in other.parts} == {(part.key, part.shape) for part in cut.parts}


def test_the_gradient_of_nodes_equals_one_big_batch() -> None:
    cases: list[tuple[Any, ...]] = [(reduction, {"weighting": "hook"}) for reduction in ("mean", "sum")]
    cases.append(("mean", {"weighting": "hook", "split": "tracking"}))
    for found in run_ranks(_as_node, 4, compare_with_one_batch, cases, environ=ON):
        for outcome in found:
            assert outcome["error"] < 1e-9
            assert outcome["norm_error"] < 1e-6


def test_nodes_have_the_same_bits_wherever_they_are_averaged_while_levers_change() -> None:
    (first,), *others = run_ranks(_as_node, 4, changing_levers, [(300,)], environ=ON)
    averaged = [is_averaged for is_averaged, _ in first]
    assert 60 < sum(averaged) < 240
    for (other,) in others:
        assert [step for step in range(300) if averaged[step] and other[step] != first[step]] == []


def test_codecs_and_rounds_between_nodes_are_exact_but_for_rounding() -> None:
    exchanges = [Exchange(codec="int8"), Exchange(codec="rows", route="shares"), Exchange(codec="fp16", every=3)]
    for kind in ("bf16", "accumulation"):
        cases = [(kind, exchange) for exchange in (EXACT, *exchanges)]
        (plain, _), *_ = run_ranks(each_case, 4, kind_of_step, cases[:1])[0]
        assert plain.abs().max() > 0
        for found in run_ranks(_as_node, 4, kind_of_step, cases, environ=ON):
            for (_, exchange), (parameters, num_codecs) in zip(cases, found, strict=True):
                assert num_codecs == 1
                atol = 0.05 if exchange.codec in LOSSY_CODECS else 0.0
                assert torch.allclose(parameters, plain, rtol=0, atol=atol), exchange.label


def _in_rounds(_rank: int, nodes: str) -> tuple[list[torch.Tensor], float, float]:
    """Parameters after each step of rounds of three, and the moments of the gradient noise."""
    os.environ["DYNAMIX_TRAINER_NODES"] = nodes
    found = []
    options: dict[str, Any] = {"exchange": Exchange(every=3), "local_batch_size": (4, 12, 0, 8), "noise_every": 1}
    with whole_job(Whole(whole=False), distributed(), **options) as (session, model, optimizer):
        for batch in session.loader:
            train_step(session, model, optimizer, batch)
            found.append(flat_parameters(model))
        noise = session._run.noise
    return found, noise.trace, noise.squared_norm


def test_in_a_round_the_ranks_of_a_node_stay_together_and_the_noise_is_the_same() -> None:
    ((one, *noise), (_, *flat_noise)), ((same, *_), _), ((other, *_), _), _ = run_ranks(
        _as_node, 4, _in_rounds, [("on",), ("off",)]
    )
    assert all(map(torch.equal, one, same))
    assert list(map(torch.equal, one, other))[:6] == [False, False, True] * 2
    assert noise == pytest.approx(flat_noise, rel=1e-5)
