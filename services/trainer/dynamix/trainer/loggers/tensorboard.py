"""A logger for TensorBoard: `tensorboard --logdir runs`."""

from pathlib import Path
from typing import Any

from .delivery import Metrics


class TensorBoardLogger:
    """Writes each window's numbers as scalars, and the reason of a decision as text when it is another one."""

    def __init__(self, log_dir: str | Path | None = None, *, writer: Any = None) -> None:
        """Write into a directory, by default `runs/<job>`; or by a `SummaryWriter` of the script, which stays open."""
        self._log_dir = log_dir
        self._writer = writer
        self._is_own = writer is None
        self._texts: dict[str, str] = {}

    def log(self, metrics: Metrics, *, step: int) -> None:
        """Write a window, and flush: TensorBoard shows it at once."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - an extra, and slow to import

            self._writer = SummaryWriter(str(self._log_dir or Path("runs") / str(metrics["job"])))
        for name, value in metrics.items():
            if not isinstance(value, str):
                self._writer.add_scalar(name, value, step)
            elif self._texts.get(name) != value:
                self._texts[name] = value
                self._writer.add_text(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the writer, if it is ours."""
        if self._is_own and self._writer is not None:
            self._writer.close()
