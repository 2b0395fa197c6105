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
    assert np.isfinite(np.frombuffer(state.features, "<f4")).all()


def test_what_published_rules_for_exchanges_need_makes_a_state_newer() -> None:
    older = state_of(examples.window())
    assert (older.feature_version, len(older.global_features)) == (2, 4 * 10)
    assert np.isnan(unpack_global(older)[GLOBAL_INDEX["learning_rate"] :]).all()
    newer = state_of(examples.window(job_metrics=examples.job_metrics(learning_rate=0.25, gradient_norm=1.5)))
    assert newer.feature_version == 4
    values = unpack_global(newer)
    assert [values[GLOBAL_INDEX[name]] for name in ("learning_rate", "gradient_norm")] == [0.25, 1.5]
    assert np.isnan(values[GLOBAL_INDEX["coding_gain"]])
    np.testing.assert_array_equal(values[:10], unpack_global(older)[:10])


def test_rates_of_links_make_a_state_newer_and_older_ones_are_read_beside_it() -> None:
    older, window = state_of(examples.window("node-a", (0, 1))), examples.window("node-b", (2, 3))
    link = {"link_bytes_per_s": 4e6, "link_peer": 3}
    first, second = window.ranks
    known = msgspec.structs.replace(first, training=msgspec.structs.replace(first.training, **link))
    newer = state_of(msgspec.structs.replace(window, ranks=(known, second)))
    assert (older.feature_version, newer.feature_version) == (2, 5)
    assert len(newer.features) == len(older.features) + 2 * 2 * 4
    rows = stack_ranks([older, newer])
    assert rows.shape == (4, len(RANK_FEATURES))
    np.testing.assert_array_equal(rows[:, RANK_INDEX["link_bytes_per_s"]], [np.nan, np.nan, 4e6, np.nan])
    np.testing.assert_array_equal(rows[:, RANK_INDEX["link_peer"]], [np.nan, np.nan, 3.0, np.nan])
    np.testing.assert_array_equal(rows[2:, :28], unpack_ranks(state_of(window))[:, :28])


def test_the_energy_of_a_window_makes_a_state_newer() -> None:
    newer = state_of(examples.window(energy_j=262.5))
    assert newer.feature_version == 6
    assert unpack_global(newer)[GLOBAL_INDEX["energy_j"]] == 262.5
    assert np.isnan(unpack_global(newer)[GLOBAL_INDEX["coding_gain"]])
    assert np.isnan(unpack_global(state_of(examples.window()))[GLOBAL_INDEX["energy_j"]])


def test_a_window_that_lasts_several_times_as_long_makes_a_state_newer() -> None:
    newer = state_of(examples.window(stretch=4))
    assert newer.feature_version == 7
    assert unpack_global(newer)[GLOBAL_INDEX["stretch"]] == 4.0
    assert np.isnan(unpack_global(state_of(examples.window()))[GLOBAL_INDEX["stretch"]])
    assert state_of(examples.window(stretch=1)) == state_of(examples.window())


def test_what_float32_cannot_hold_is_unknown() -> None:
    state = state_of(examples.window(ranks=(0,), job_metrics=examples.job_metrics(loss=1e300)))
    assert np.isnan(unpack_global(state)[GLOBAL_INDEX["loss"]])


def test_traffic_of_the_namespace_is_a_rate_over_the_collectors_interval() -> None:
    node = examples.NodeMetrics(interval_s=4.0)
    rows = unpack_ranks(state_of(examples.window(ranks=(0,), probe="proc", node_metrics=node)))
    assert rows[0, RANK_INDEX["tx_bytes_per_s"]] == 1_000_000.0


def test_values_are_rounded_once_from_float64() -> None:
    window = examples.window(ranks=(0,), job_metrics=examples.job_metrics(loss=1 / 3))
    assert unpack_global(state_of(window))[GLOBAL_INDEX["loss"]] == np.float32(1 / 3)


def test_states_are_unpacked_together_as_each_alone_also_where_masks_are_padded() -> None:
    states = [examples.state(f"node-{number}", tuple(range(number))) for number in (1, 2, 3, 5)]
    assert any(len(RANK_FEATURES) * len(state.ranks) % 8 for state in states)
    rows = stack_ranks(states)
    np.testing.assert_array_equal(rows, np.concatenate([unpack_ranks(state) for state in states]))
    assert rows.flags.writeable


def test_a_state_whose_job_part_is_broken_is_refused_before_it_is_unpacked() -> None:
    state = examples.state()
    infinite = np.full(len(state.global_features) // 4, np.inf, "<f4").tobytes()
    with pytest.raises(MalformedMessageError, match="not finite"):
        check_state(msgspec.structs.replace(state, global_features=infinite))
    with pytest.raises(MalformedMessageError, match="mask bytes do not fit"):
        check_state(msgspec.structs.replace(state, global_known=b""))
    check_state(state)


def test_what_earlier_programs_did_not_measure_is_unknown_and_changes_no_byte_of_their_states() -> None:
    earlier = examples.state()
    assert earlier.feature_version == 2
    assert np.isnan(unpack_global(earlier)[GLOBAL_INDEX["local_drift"]])
    now = state_of(examples.window(job_metrics=examples.job_metrics(local_drift=4.5)))
    assert now.feature_version == 3
    assert unpack_global(now)[GLOBAL_INDEX["local_drift"]] == 4.5
    assert now.global_features[: len(earlier.global_features)] == earlier.global_features
    with pytest.raises(MalformedMessageError, match="mask bytes do not fit"):
        check_state(msgspec.structs.replace(now, feature_version=2))


def test_bytes_that_do_not_fit_the_ranks_are_refused() -> None:
    state = examples.state()
    with pytest.raises(MalformedMessageError, match="do not fit"):
        unpack_ranks(msgspec.structs.replace(state, features=state.features[:-4]))
    with pytest.raises(MalformedMessageError, match="version 99"):
        unpack_ranks(msgspec.structs.replace(state, feature_version=99))
    nan = np.full(len(state.features) // 4, np.nan, "<f4").tobytes()
    with pytest.raises(MalformedMessageError, match="not finite"):
        unpack_ranks(msgspec.structs.replace(state, features=nan))
