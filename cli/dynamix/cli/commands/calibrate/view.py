"""What a calibration found, for reading."""

from collections.abc import Iterator

from dynamix.cli.tables import console_for, new_table, print_lines
from dynamix.lab.calibration import Calibration, RankSpeed


def show(calibration: Calibration, *, stderr: bool) -> None:
    """Print tables and remarks."""
    console = console_for(stderr=stderr)
    print_lines(console, ["Time of a step = overhead + max(samples, saturation) / rate"])
    rows = [(str(rank.rank), _rate(rank), _overhead(rank), _saturation(rank)) for rank in calibration.ranks]
    console.print(new_table("rank", "samples/s", "overhead, ms", "saturation, samples", rows=rows))
    print_lines(console, _lines(calibration))
    print_lines(console, [f"- {remark}" for remark in calibration.remarks])


def _rate(rank: RankSpeed) -> str:
    error = "" if rank.samples_per_s_error is None else f" ± {rank.samples_per_s_error:.1f}"
    return f"{rank.samples_per_s:.1f}{error}"


def _overhead(rank: RankSpeed) -> str:
    if rank.overhead_error_s is None:
        return "not known"
    return f"{rank.overhead_s * 1000:.2f} ± {rank.overhead_error_s * 1000:.2f}"


def _saturation(rank: RankSpeed) -> str:
    return "none seen" if rank.saturation_error is None else f"{rank.saturation:.0f} ± {rank.saturation_error:.1f}"


def _lines(calibration: Calibration) -> Iterator[str]:
    scenario = calibration.scenario
    network, stragglers, congestion = scenario.network, scenario.stragglers, scenario.congestion
    yield (
        f"Communication: {calibration.communication_s * 1000:.2f} ms a step ({network.topology}, "
        f"{network.bandwidth_mbit_s:g} Mbit/s, latency {network.latency_s * 1e6:.0f} us), overlap {network.overlap:g}, "
        f"{network.num_buckets} buckets"
    )
    if stragglers is not None:
        yield f"Jitter: {stragglers.jitter:.1%} of a step's compute time"
        if stragglers.factor > 1:
            yield (
                f"Stragglers: {stragglers.factor:g} times slower for {stragglers.mean_slow_s:g} s, "
                f"every {stragglers.mean_normal_s + stragglers.mean_slow_s:g} s and rank"
            )
    if congestion is not None:
        yield (
            f"Congestion: {congestion.factor:g} times less bandwidth for {congestion.mean_congested_s:g} s, "
            f"every {congestion.mean_clear_s + congestion.mean_congested_s:g} s"
        )
    yield (
        f"Virtual step times of {calibration.num_windows} windows ({calibration.num_left_out} left out): off by "
        f"{calibration.median_error:.1%} in the median, {calibration.p90_error:.1%} at the 90th percentile"
    )
    if (median := calibration.steady_median_error) is not None and (p90 := calibration.steady_p90_error) is not None:
        yield f"of undisturbed windows: {median:.1%} and {p90:.1%}"
