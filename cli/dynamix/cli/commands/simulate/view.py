"""What is seen of a simulation: how far it is, and a table at the end."""

from dynamix.cli.formatting import formatted, sizes_text
from dynamix.cli.tables import console_for, new_table

from .simulation import SimulatedWindow, Simulation


def window_text(line: SimulatedWindow, limit_s: float) -> str:
    """One window in a line; `limit_s` is the virtual time at which the job ends at the latest."""
    accuracy = "" if line.held_out_accuracy is None else f", accuracy {line.held_out_accuracy:.1%}"
    return (
        f"window {line.window}: {line.time_s:.1f} of at most {limit_s:g} s, step "
        f"{line.step_time_s * 1000:.1f} ms, batch {line.global_batch_size} = {sizes_text(line.local_batch_sizes)}"
        f"{accuracy}"
    )


def show_summary(simulation: Simulation, *, stderr: bool) -> None:
    """The outcome as a table."""
    scenario = simulation.episode.scenario
    what = f"{scenario.name} ({scenario.workload}, {scenario.world_size} workers)"
    title = f"{what} under {simulation.policy}, seed {simulation.seed}"
    table = new_table("name", "value", rows=_rows(simulation), left=("name",), title=title, show_header=False)
    console_for(stderr=stderr).print(table)


def _rows(simulation: Simulation) -> list[tuple[str, str]]:
    episode, scenario = simulation.episode, simulation.episode.scenario
    reached = episode.time_to_target_s
    last = simulation.windows[-1]
    return [
        (f"time to {scenario.target_accuracy:.1%}", "missed" if reached is None else f"{reached:g} s"),
        (f"accuracy at {scenario.fixed_time_s:g} s", formatted(episode.accuracy_at_fixed_time, "{:.1%}")),
        ("test accuracy at the end", f"{episode.test_accuracy:.1%}"),
        ("virtual time", f"{episode.virtual_time_s:.1f} s"),
        ("windows, steps", f"{episode.num_windows}, {episode.num_steps}"),
        ("samples", f"{episode.samples_seen:,}"),
        ("actions applied", str(len(episode.applied))),
        ("last batch", f"{last.global_batch_size} = {sizes_text(last.local_batch_sizes)}"),
    ]
