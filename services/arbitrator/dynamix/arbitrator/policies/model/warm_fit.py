"""A fit of step times that may have begun with that of an earlier run, beside one of this run alone while on trial."""

from typing import NamedTuple

from dynamix.schemas.messages import Job

from .recurrence import ProfileTrial, Standing, disagreement
from .step_time_fit import StepTimeFit, Window


class WarmFit(NamedTuple):
    """What decisions rest on."""

    fit: StepTimeFit
    """With what earlier runs taught, unless that was dropped."""
    cold: StepTimeFit | None = None
    """The fit to this run's windows only, while the other one is on trial."""

    def observe(self, job: Job, window: Window, trial: ProfileTrial) -> "FitVerdict":
        """After one more window, and what it says of the profile."""
        if trial.standing is not Standing.ON_TRIAL:
            fit = self.fit.observe(job, window)
            return FitVerdict(WarmFit(fit), fit, trial)
        cold = (self.cold or StepTimeFit.empty(job)).observe(job, window)
        model = self.fit.model(job)
        if cold.model(job) is None or model is None:  # nothing was measured: nothing is known of this cluster
            return FitVerdict(WarmFit(self.fit, cold), cold, trial)
        off = disagreement(model, window)
        judged = trial.judge(agrees=off is None)
        warm = self.fit if off is not None else self.fit.observe(job, window)
        ruling = warm if off is None else cold
        kept = WarmFit(warm, cold) if judged.standing is Standing.ON_TRIAL else WarmFit(ruling)
        return FitVerdict(kept, ruling, judged, off or "", is_first=off is None and judged.num_agreeing == 1)


class FitVerdict(NamedTuple):
    """What a window says of a profile's times."""

    kept: WarmFit
    ruling: StepTimeFit
    """The fit to decide by now."""
    trial: ProfileTrial
    disagreement: str = ""
    """How the window contradicts the profile, in words; empty when it does not."""
    is_first: bool = False
    """Whether this is the first window that agrees."""
