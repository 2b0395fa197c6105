"""Why each window has the sizes it has, in words: known in global rank 0, which receives the actions.

An action does not say why its policy chose these sizes. What the policy saw of them stands beside the decision in a
window's metrics: times, noise, reward.
"""

from dynamix.schemas.messages import Action
from dynamix.schemas.messages.allocation import EXACT
from dynamix.schemas.messages.policies import Split

from .offers import Refusal

REFUSALS: dict[Refusal, str] = {
    "job": "it is of another job",
    "generation": "it is of another start of the job",
    "length": "it has sizes for another number of ranks",
    "bounds": "a size is outside the bounds of the job or of a rank's memory",
    "sum": "it changes the global batch, which is fixed",
    "lever": "it asks for what this trainer cannot carry out",
    "stale": "it came too late, see max_lag_windows",
    "not_newer": "a newer one was adopted before",
    "future": "it is of a window that has not ended",
}


DIVISIONS: dict[Split, str] = {
    "fixed": "",
    "tracking": ", divided by the ranks",
    "traces": ", until the traces of the nodes' agents say another sum and division",
}


class Decisions:
    """What was decided for windows to come."""

    def __init__(self) -> None:
        self._found: dict[int, dict[str, float | str]] = {}

    def note(self, window: int, adopted: Action | None, refused: tuple[Action, Refusal] | None) -> None:
        """Note which action rules from a window on, or else which one was refused last."""
        if adopted is not None:
            what = f"{sum(adopted.local_batch_sizes)} samples per step"
            divided = DIVISIONS[adopted.split]
            travels = "" if adopted.exchange == EXACT else f", gradients {adopted.exchange.label}"
            self._found[window] = {
                "decision": "adopted",
                "decided_window": adopted.window,
                "policy": adopted.policy,
                "reason": f"policy {adopted.policy} decided {what} on window {adopted.window}{divided}{travels}",
            }
        elif refused is not None:
            action, reason = refused
            self._found[window] = {
                "decision": "refused",
                "reason": f"the action of window {action.window} was refused: {REFUSALS[reason]}",
            }

    def take(self, window: int) -> dict[str, float | str]:
        """What was decided for a window that has ended; earlier ones are forgotten."""
        found = self._found.get(window, {"decision": "none", "reason": "no action came for this window"})
        self._found = {later: noted for later, noted in self._found.items() if later > window}
        return found
