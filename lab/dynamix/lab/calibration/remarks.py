"""What a calibration could not know, in sentences."""

from collections.abc import Iterator

from dynamix.lab.simulator.scenario import Scenario

from .fit import MAX_JITTER, CalibrationFit
from .lines import MIN_SPREAD


def remarks_on(fit: CalibrationFit, scenario: Scenario) -> tuple[str, ...]:
    """The sentences, most important first."""
    return tuple(_remarks(fit, scenario))


def _remarks(fit: CalibrationFit, scenario: Scenario) -> Iterator[str]:
    if flat := [str(rank) for rank, line in enumerate(fit.lines) if not line.is_distinct]:
        yield (
            f"The sizes of rank{'s' * (len(flat) > 1)} {', '.join(flat)} did not vary enough to tell overhead from "
            f"rate (by a factor of {MIN_SPREAD:g}, and more than the times scatter): all of the time is taken to grow "
            "with the samples. Run the job with the policy `random`."
        )
    if fit.exposure is not None and not fit.exposure.is_distinct:
        yield (
            "No overlap of communication with computing was visible: what is exposed does not change with the compute "
            "time. The communication is taken to be exposed whole."
        )
    if fit.jitter >= MAX_JITTER:
        yield f"The windows scatter more than a jitter of {MAX_JITTER:g} explains: it is written as that."
    if fit.stragglers is None:
        yield "No stragglers were visible: no rank was slower than usual for some windows."
    if fit.exposure is not None and fit.congestion is None:
        yield "No congestion was visible: no windows waited for the network for much longer, or nothing was sent again."
    if scenario.network.gradient_bytes:
        yield (
            f"The sockets carried gradients of {scenario.network.gradient_bytes} bytes, not the workload's: the "
            "scenario sends as much."
        )
