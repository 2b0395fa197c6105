"""A captured /proc tree with numbers known in advance, copies of it with changes, and a clock moved by hand."""

from pathlib import Path

from tests.support import examples

from dynamix.collector.procfs import Proc
from dynamix.schemas.messages import RankRow

CAPTURED = Path(__file__).parents[1] / "data" / "proc"


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def captured_row(**changes: object) -> RankRow:
    """The row of the captured process 4242."""
    fields = {
        "pid": 4242,
        "pid_start_ticks": 8812345,
        "pid_namespace": Proc(CAPTURED).owner(4242).pid_namespace,
        "uid": 1000,
    }
    return examples.row(0, **(fields | changes))


def copy_with(target: Path, changes: dict[str, tuple[str, str]], without: tuple[str, ...] = ()) -> Path:
    """The captured tree at `target`, in the named files the first `old` changed to `new`, and without some files."""
    for source in CAPTURED.rglob("*"):
        name = str(source.relative_to(CAPTURED))
        if not source.is_file() or name.startswith(without):
            continue
        text = source.read_text()
        old, new = changes.get(name, ("", ""))
        assert old in text, f"{old!r} is not in {name}"
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_text(text.replace(old, new, 1) if old else text)
    return target
