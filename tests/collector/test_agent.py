"""A node's agent: what it leaves, from known rows (1280 samples in 0.5 s, 0.3 s of waiting in 10 steps of 0.1 s).

Learned agents: what they see, what their network does to their wish, and which files are none of theirs.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support import examples, learned

from dynamix.collector.agent import AgentNetwork, shipped_network, trace_of
from dynamix.collector.observation import CollectorSettings
from dynamix.collector.service import _chooser
from dynamix.runtime.service import StartError
from dynamix.schemas import sight
from dynamix.schemas.codec import MalformedMessageError, encode
from dynamix.schemas.messages import FieldView, Report, SeenTrace, Trace
from dynamix.schemas.networks import NetworkFileError
from dynamix.schemas.policies import MULTIPLIERS
from dynamix.schemas.sight import Sight, inputs_of


def seen(strength: float = 1.0, appetite: float = 512.0, waiting_s: float = 0.03) -> SeenTrace:
    return SeenTrace(strength=strength, appetite=appetite, waiting_s=waiting_s)


def left(own: SeenTrace | None = None, **changes: Any) -> Trace:
    totals = changes.pop("totals", examples.totals(4))
    view = FieldView(**({"activity": (0.0, 0.0), "own": own} | changes))
    return trace_of(examples.report(window=4, totals=totals, field=view))


def test_jobs_of_other_policies_have_no_agents() -> None:
    assert trace_of(examples.report()) is None


def test_the_first_trace_is_what_was_measured() -> None:
    trace = left()
    assert (trace.node, trace.window, trace.ranks) == ("node-a", 4, (0, 1))
    assert trace.activity == (2560.0, 2560.0)
    assert trace.waiting_s == pytest.approx(0.03)
    assert trace.appetite == 512.0


@pytest.mark.parametrize(("strength", "expected"), [(1.0, 1780.0), (0.5, 2170.0)])
def test_half_of_a_trace_evaporates_and_of_a_weaker_one_more(strength: float, expected: float) -> None:
    """0.5 * 1000 + 0.5 * 2560, and 0.25 * 1000 + 0.75 * 2560."""
    assert left(seen(strength), activity=(1000.0, 1000.0)).activity == (expected, expected)


def test_the_waiting_around_counts_where_it_is_less() -> None:
    assert left(around=(seen(waiting_s=0.01), seen(waiting_s=0.5))).waiting_s == pytest.approx(0.011)


@pytest.mark.parametrize(
    ("rate_exponent", "noise_multiplier", "expected"),
    [
        (0.5, 1.0, 1024.0),  # a noise scale of 2000 and 0.03 s of 0.1 s of communication: as large as permitted
        (0.0, 0.01, 256.0),  # without noise every sample more is lost
        (0.0, 0.3, 512.0 * 2 ** (-8 / 16)),  # f / (512 f + 600) / (0.03 + 0.07 f) is greatest at f = 0.709
    ],
)
def test_the_wish_is_the_global_batch_of_the_greatest_progress_per_second(
    rate_exponent: float, noise_multiplier: float, expected: float
) -> None:
    options = {"noise_multiplier": noise_multiplier}
    trace = left(keeps_global_batch=False, rate_exponent=rate_exponent, options=options)
    assert trace.appetite == pytest.approx(expected)


def test_an_appetite_diffuses_from_the_cells_beside_it() -> None:
    """0.2 of the mean of 100 and of 400 at half the strength, and 0.8 of 1024."""
    around = (seen(appetite=100.0), seen(strength=0.5, appetite=400.0))
    trace = left(keeps_global_batch=False, rate_exponent=0.5, around=around)
    assert trace.appetite == pytest.approx(0.2 * 200.0 + 0.8 * 1024.0)


def test_without_a_known_noise_the_appetite_stays() -> None:
    trace = left(seen(appetite=300.0), keeps_global_batch=False, totals=examples.totals(4, noise=None))
    assert trace.appetite == pytest.approx(300.0)


def test_a_view_that_does_not_fit_the_rows_is_refused() -> None:
    with pytest.raises(MalformedMessageError, match="a view of 3 ranks with 2 rows"):
        left(activity=(1.0, 1.0, 1.0))


# --- learned agents

SEEN = SeenTrace(strength=0.5, appetite=400.0, waiting_s=0.02)


def network(favour: int | None = None, **fields: Any) -> AgentNetwork:
    return AgentNetwork(learned.policy_file("appetite", favour=favour, **fields).to_bytes(), "made up")


def report(*, is_learned: bool, node: str = "node-a", ranks: tuple[int, ...] = (0, 1), **changes: Any) -> Report:
    """A noise scale of 600 and no learning-rate rule: the wish is 512 * 2^-0.5."""
    of_row = changes.pop("row", {})
    rows = tuple(examples.row(rank, **of_row) for rank in ranks)
    fields: dict[str, Any] = {
        "activity": (2000.0,) * len(ranks),
        "own": SEEN,
        "around": (SEEN,),
        "keeps_global_batch": False,
        "base_global_batch_size": 512,
        "options": {"noise_multiplier": 0.3, "learned": float(is_learned)},
    }
    totals = examples.totals(4, **changes.pop("totals", {}))
    before = examples.totals(3, loss_sum=5120.0)
    view = FieldView(**(fields | changes))
    return examples.report(node, ranks, 4, rows=rows, totals=totals, totals_before=before, field=view)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"own": None, "around": ()},
        {"rate_exponent": 0.5},
        {
            "options": {"max_change": 1.3, "noise_multiplier": 0.01},
            "totals": {"global_batch_size": 300},
            "own": None,
            "around": (),
        },
        {"totals": {"noise": None}},
        {"keeps_global_batch": True},
    ],
)
def test_untrained_it_is_the_rule_of_the_agent_to_the_bit(changes: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"options": {"noise_multiplier": 0.3}} | changes
    rule = trace_of(report(is_learned=False, **fields))
    fields["options"] = fields["options"] | {"learned": 1.0}
    assert encode(trace_of(report(is_learned=True, **fields), network().factor)) == encode(rule)


@pytest.mark.parametrize("choice", range(len(MULTIPLIERS)))
def test_the_factor_multiplies_the_agents_own_wish_within_the_bounds(choice: int) -> None:
    """At half of the batch and at its double the bounds of the wish, 256 and 1024, are met."""
    expected = min(max(512 * 2**-0.5 * MULTIPLIERS[choice], 256.0), 1024.0)
    trace = trace_of(report(is_learned=True, own=None, around=()), network(favour=choice).factor)
    assert trace.appetite == pytest.approx(expected)
    assert trace.activity == trace_of(report(is_learned=False, own=None, around=())).activity


def shown(**changes: Any) -> dict[str, float]:
    of = report(is_learned=True, **changes)
    return dict(zip(sight.INPUTS, inputs_of(Sight(of, of.field, 0.03, 1024.0)).tolist(), strict=True))


def test_inputs_are_what_the_agent_sees() -> None:
    seen = shown()
    assert seen["waiting_share"] == pytest.approx(0.3)
    assert (seen["least_sync_share"], seen["most_compute_share"]) == (pytest.approx(0.3), pytest.approx(0.5))
    assert (seen["wish_to_batch_log2"], seen["batch_to_base_log2"]) == (1.0, 0.0)
    assert seen["batch_to_noise_log2"] == pytest.approx(math.log2(512 / 2000))
    assert seen["loss_change_log2"] == -1.0
    assert seen["speed_change_log2"] == pytest.approx(math.log2(2560 / 2000))
    assert seen["around_appetite_to_batch_log2"] == pytest.approx(math.log2(400 / 512))
    assert (seen["own_strength"], seen["around_strength"]) == (0.5, 0.5)


def test_what_is_not_known_is_no_number() -> None:
    seen = shown(own=None, around=(), totals={"noise": None, "num_correct": None}, row={"times_split": False})
    unknown = {name for name, number in seen.items() if math.isnan(number)}
    assert unknown == {
        *("least_sync_share", "most_sync_share", "least_compute_share", "most_compute_share", "most_data_share"),
        *("speed_change_log2", "batch_to_noise_log2", "accuracy", "held_out_accuracy"),
        *("own_appetite_to_batch_log2", "around_appetite_to_batch_log2", "around_waiting_to_own_log2"),
    }


def test_the_network_that_comes_with_the_package_is_one_of_agents() -> None:
    assert shipped_network().actions == MULTIPLIERS
    assert trace_of(report(is_learned=True)).appetite > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda metadata: metadata | {"action_set": "global"},
            "not a network of agents, as `dynamix learn --policy stigmergy` writes it: Invalid enum value",
        ),
        (lambda metadata: metadata | {"inputs": ["ping_ms"]}, r"its inputs are not those of this program \(ping_ms\)"),
        (lambda metadata: metadata | {"actions": [2.0, 1.0]}, "its actions are not those of this program"),
    ],
)
def test_a_foreign_file_is_refused_in_a_sentence(
    change: Callable[[dict[str, Any]], dict[str, Any]], message: str
) -> None:
    file = learned.policy_file("appetite")
    data = file.to_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    metadata = change(json.loads(header["__metadata__"]["dynamix"]))
    header["__metadata__"]["dynamix"] = json.dumps(metadata)
    text = json.dumps(header).encode()
    with pytest.raises(NetworkFileError, match=f"mine: {message}"):
        AgentNetwork(len(text).to_bytes(8, "little") + text + data[8 + length :], "mine")


def test_a_collector_takes_the_file_that_its_settings_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.safetensors"
    path.write_bytes(learned.policy_file("appetite", favour=5).to_bytes())
    choose = _chooser(CollectorSettings(agents=str(path)))
    assert trace_of(report(is_learned=True, own=None, around=()), choose).appetite == 256.0
    assert _chooser(CollectorSettings()) is None
    path.write_bytes(path.read_bytes()[:-100])
    for file, reason in (
        (path, "its tensors or metadata cannot be read"),
        (tmp_path / "none", "cannot be read: No such file"),
    ):
        with pytest.raises(StartError, match=f"DYNAMIX_COLLECTOR_AGENTS={file}: {reason}"):
            _chooser(CollectorSettings(agents=str(file)))
