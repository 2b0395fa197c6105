"""The policy of AdaptDL's code: what our windows are to it, and, where its package is installed, what it decides."""

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from bench.adaptdl.dynamix_adaptdl.profile import Profile, SizeTimes, gradient_statistics, local_batch_size
from bench.results import adaptdl
from bench.results.__main__ import main
from tests.support import examples
from tests.support.toy_cluster import ToyCluster

from dynamix.arbitrator.policies.goodput import goodput
from dynamix.arbitrator.policies.policy import Decision
from dynamix.schemas.features import GLOBAL_INDEX, RANK_INDEX
from dynamix.schemas.messages import Job

INSTALLED = Path(__file__).parents[2] / "out" / "adaptdl"
RATES = np.array([3000.0, 3000.0, 1000.0, 1000.0])
INITIAL = (128,) * 4
CLUSTER = ToyCluster(RATES, communication_s=0.02)
"""With 128 samples: computes for 128 / 3000 + 0.002 s on rank 0, 0.130 s on ranks 2 and 3, and communicates 0.02 s."""


def job_of(**options: float) -> Job:
    return examples.job(
        {"node-a": (0, 1, 2, 3)}, policy="adaptdl", policy_options=options, min_local_batch_size=8,
        supports_tracking=True,
    )  # fmt: skip


def observed(profile: Profile, size: int, *, slowest: bool = False) -> Profile:
    sizes = np.full(4, float(size))
    return profile.observe(job_of(), *CLUSTER.observe(sizes, job_of(), INITIAL), slowest=slowest)


@pytest.mark.parametrize(("slowest", "compute_s"), [(False, 128 / 3000 + 0.002), (True, 0.130)])
def test_what_a_rank_waits_for_others_is_synchronisation(slowest: bool, compute_s: float) -> None:
    found = observed(Profile(), 128, slowest=slowest).fit_arguments()
    assert found.local_batch_sizes.tolist() == [128]
    assert found.step_s == pytest.approx([0.150])
    assert found.accumulation_step_s == pytest.approx([compute_s])


def test_times_are_summed_for_each_size_and_never_forgotten() -> None:
    steps = job_of().window_steps
    profile = observed(Profile(times={64: SizeTimes(10, 1.0, 0.5)}), 128)
    profile = observed(observed(profile, 64), 128)
    assert {size: times.num_steps for size, times in profile.times.items()} == {64: 10 + steps, 128: 2 * steps}
    assert profile.times[64].step_s == pytest.approx(1.0 + steps * (64 / 1000 + 0.022))
    assert profile.fit_arguments().step_s[1] == pytest.approx(0.150)


def test_a_carry_keeps_everything() -> None:
    profile = observed(Profile(), 128).fitted((0.25,) * 7)
    assert Profile.unpack(profile.pack()) == profile
    assert Profile.unpack(b"") == Profile()


def test_what_is_not_known_is_left_out() -> None:
    for column, value in (("sync_time_s", np.nan), ("step_time_s", np.nan), ("age_windows", 1.0)):
        obs_WF, global_F = CLUSTER.observe(np.full(4, 128.0), job_of(), INITIAL)
        obs_WF[0, RANK_INDEX[column]] = value
        global_F[GLOBAL_INDEX["noise_scale"]] = np.nan
        profile = Profile(noise_scale=70.0).observe(job_of(), obs_WF, global_F, slowest=False)
        assert profile == Profile(noise_scale=70.0, windows_since_fit=1)


@pytest.mark.parametrize(("total", "size"), [(512, 128), (513, 129), (515, 129)])
def test_a_batch_is_divided_equally_and_rounded_up(total: int, size: int) -> None:
    assert local_batch_size(job_of(), total) == size


def test_its_efficiency_of_our_statistics_is_pollux_formula() -> None:
    """AdaptDL's (var + sqr) / (var / scale + sqr) / scale, against ours, which names B_noise itself."""
    sqr, var = gradient_statistics(700.0, 512)
    efficiency = (var + sqr) / (var / 2 + sqr) / 2
    assert efficiency == pytest.approx(goodput(np.array([1024.0]), np.array([1024.0]), 700.0, 512)[0])


def test_the_experiment_says_how_to_install_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(adaptdl, "extension_names", lambda _: ["another"])
    places = ["--output", str(tmp_path / "docs"), "--work", str(tmp_path / "work")]
    assert main(["--only", "adaptdl", "--scale", "smoke", *places]) == 2
    assert "run this experiment with `make adaptdl`" in capsys.readouterr().err


# --- with AdaptDL's package ------------------------------------------------------------------------------------------


@pytest.fixture
def policy(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The policy's module, with the package that `make adaptdl` has installed."""
    monkeypatch.syspath_prepend(INSTALLED)
    pytest.importorskip("adaptdl.goodput", reason="AdaptDL's package is not installed: `make adaptdl` installs it")
    from bench.adaptdl.dynamix_adaptdl import policy  # noqa: PLC0415 - it imports that package

    return policy


def run(policy: ModuleType, noise_scale: float, **options: float) -> list[Decision]:
    cluster = ToyCluster(RATES, communication_s=0.02, noise_scale=noise_scale)
    return cluster.run(policy.AdaptDl(), job_of(**options), 15)


def test_its_code_chooses_a_larger_equal_size_for_more_noise_and_none_below_the_initial(policy: ModuleType) -> None:
    sizes = [run(policy, noise)[-1].allocation.local_batch_sizes for noise in (10.0, 20_000.0)]
    assert sizes[0] == INITIAL
    assert len(set(sizes[1])) == 1
    assert 128 < sizes[1][0] <= max(job_of().max_local_batch_sizes)
    assert not hasattr(np, "int")


def test_before_the_noise_is_known_the_sizes_stay(policy: ModuleType) -> None:
    assert {decision.allocation.local_batch_sizes for decision in run(policy, np.nan)} == {INITIAL}


def test_with_the_fast_loop_only_the_sum_is_its_decision(policy: ModuleType) -> None:
    assert {decision.allocation.split for decision in run(policy, 1000.0, track=1.0)} == {"tracking"}
    assert {decision.allocation.split for decision in run(policy, 1000.0)} == {"fixed"}


def test_equal_windows_give_equal_decisions(policy: ModuleType) -> None:
    assert run(policy, 3000.0) == run(policy, 3000.0)
