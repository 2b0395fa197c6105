import msgspec
import numpy as np
import pytest
from tests.support import examples

from dynamix.schemas.codec import MalformedMessageError
from dynamix.schemas.features import (
    GLOBAL_INDEX,
    RANK_FEATURES,
    RANK_INDEX,
    check_state,
    stack_ranks,
    state_of,
    unpack_global,
    unpack_ranks,
)


def test_the_packed_state_carries_each_value_under_its_name() -> None:
    rows = unpack_ranks(state_of(examples.window()))
    assert rows.shape == (2, len(RANK_FEATURES))
    expected = {
        "tx_bytes_per_s": 4_000_000.0,  # 4 MB in a window of 10 steps of 0.1 s
        "retransmits": 3.0,
        "srtt_us": 80.0,
        "cpu_time_ratio": np.float32(0.9),
        "accuracy": 0.75,
        "compute_time_s": np.float32(0.05),
        "sigma_norm": 2.0,
        "sigma_norm_sq": 4.0,
        "local_batch_size": 128.0,
    }
    for name, value in expected.items():
        assert rows[1, RANK_INDEX[name]] == value, name


def test_the_global_features_are_equal_in_the_messages_of_all_nodes() -> None:
    first, second = state_of(examples.window("node-a", (0, 1))), state_of(examples.window("node-b", (2, 3)))
    assert first.global_features == second.global_features
    assert unpack_global(first)[GLOBAL_INDEX["noise_scale"]] == 2000.0


def test_what_is_not_known_is_nan_and_never_a_silent_zero() -> None:
    window = examples.window(ranks=(0,), job_metrics=examples.job_metrics(sigma_norm_sq=None, accuracy_change=None))
    state = state_of(window)
    rows = unpack_ranks(state)
    assert np.isnan(rows[0, RANK_INDEX["sigma_norm"]])
    assert np.isnan(rows[0, RANK_INDEX["age_windows"]])
    assert np.isnan(unpack_global(state)[GLOBAL_INDEX["accuracy_change"]])


def test_traffic_of_the_namespace_is_a_rate_over_the_collectors_interval() -> None:
    node = examples.NodeMetrics(interval_s=4.0)
    rows = unpack_ranks(state_of(examples.window(ranks=(0,), probe="proc", node_metrics=node)))
    assert rows[0, RANK_INDEX["tx_bytes_per_s"]] == 1_000_000.0


def test_states_are_unpacked_together_as_each_alone() -> None:
    states = [examples.state(f"node-{number}", tuple(range(number))) for number in (1, 2, 5)]
    np.testing.assert_array_equal(stack_ranks(states), np.concatenate([unpack_ranks(state) for state in states]))


def test_numbers_are_rounded_once_and_what_float32_cannot_hold_is_unknown() -> None:
    window = examples.window(ranks=(0,), job_metrics=examples.job_metrics(loss=1 / 3, accuracy=1e300), stretch=4)
    values = unpack_global(state_of(window))
    assert values[GLOBAL_INDEX["loss"]] == np.float32(1 / 3)
    assert values[GLOBAL_INDEX["stretch"]] == 4.0
    assert np.isnan(values[GLOBAL_INDEX["accuracy"]])


def test_bytes_that_do_not_fit_the_ranks_are_refused() -> None:
    state = examples.state()
    infinite = np.full(len(state.global_features) // 4, np.inf, "<f4").tobytes()
    for changes, reason in (
        ({"features": state.features[:-4]}, "do not fit"),
        ({"global_features": b""}, "do not fit"),
        ({"feature_version": 99}, "version 99"),
        ({"global_features": infinite}, "infinite"),
    ):
        with pytest.raises(MalformedMessageError, match=reason):
            check_state(msgspec.structs.replace(state, **changes))
