"""What a calibration found, for reading."""

from rich.table import Table

from dynamix.cli.tables import console_for, new_table, print_line
from dynamix.lab.calibration import Calibration, RankSpeed


def show(calibration: Calibration, *, stderr: bool) -> None:
    """Print tables and remarks."""
    console = console_for(stderr=stderr)
    print_line(console, "Time of a step = overhead + samples / rate")
    console.print(_ranks(calibration))
    for line in (*_lines(calibration), *(f"- {remark}" for remark in calibration.remarks)):
        print_line(console, line)


def _ranks(calibration: Calibration) -> Table:
    table = new_table("rank", "samples/s", "overhead, ms")
    for rank in calibration.ranks:
        table.add_row(str(rank.rank), _rate(rank), _overhead(rank))
    return table


def _rate(rank: RankSpeed) -> str:
    error = "" if rank.samples_per_s_error is None else f" ± {rank.samples_per_s_error:.1f}"
    return f"{rank.samples_per_s:.1f}{error}"


def _overhead(rank: RankSpeed) -> str:
    if rank.overhead_error_s is None:
        return "not known"
    return f"{rank.overhead_s * 1000:.2f} ± {rank.overhead_error_s * 1000:.2f}"


def _lines(calibration: Calibration) -> list[str]:
    network, stragglers, congestion = (
        calibration.scenario.network,
        calibration.scenario.stragglers,
        calibration.scenario.congestion,
    )
    communication = (
        f"Communication: {calibration.communication_s * 1000:.2f} ms a step ({network.topology}, "
        f"{network.bandwidth_mbit_s:g} Mbit/s), overlap {network.overlap:g}, {network.num_buckets} buckets"
    )
    lines = [communication]
    if stragglers is not None:
        lines.append(f"Jitter: {stragglers.jitter:.1%} of a step's time per sample")
        if stragglers.factor > 1:
            lines.append(
                f"Stragglers: {stragglers.factor:g} times slower for {stragglers.mean_slow_s:g} s, "
                f"every {stragglers.mean_normal_s + stragglers.mean_slow_s:g} s and rank"
            )
    if congestion is not None:
        lines.append(
            f"Congestion: {congestion.factor:g} times less bandwidth for {congestion.mean_congested_s:g} s, "
            f"every {congestion.mean_clear_s + congestion.mean_congested_s:g} s"
        )
    lines.append(
        f"Virtual step times of {calibration.num_windows} windows ({calibration.num_left_out} left out): off by "
        f"{calibration.median_error:.1%} in the median, {calibration.p90_error:.1%} at the 90th percentile"
    )
    if calibration.steady_median_error is not None and calibration.steady_p90_error is not None:
        lines.append(
            f"of undisturbed windows: {calibration.steady_median_error:.1%} and {calibration.steady_p90_error:.1%}"
        )
    return lines
