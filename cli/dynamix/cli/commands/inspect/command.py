"""Show what a capture holds: windows, decisions, rewards, gaps, and whether it was made by this build.

dynamix inspect FILE                   a line for each window
dynamix inspect FILE --window 12       one window with every rank
dynamix inspect FILE --png FILE        the job as a figure
"""

import argparse
from pathlib import Path

from dynamix.cli.errors import CommandError, MisuseError, explained, reading
from dynamix.cli.inspection.inspection import Inspection, document, inspect
from dynamix.cli.inspection.window import CapturedWindow
from dynamix.cli.output import STANDARD_OUTPUT, add_json_argument, add_png_argument, write_json
from dynamix.recording.capture import CaptureError, fingerprint


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("file", metavar="FILE", help="a capture: `dynamix capture JOB -o FILE` makes one")
    parser.add_argument("--window", type=int, metavar="N", help="this window only, with every rank")
    parser.add_argument("--generation", type=int, metavar="G", help="of this restart of the job (default: the last)")
    parser.add_argument("--all", action="store_true", help="every window, also of a long job")
    add_json_argument(parser)
    add_png_argument(parser, "draw sizes, step time, accuracy, rewards and decisions")


def run(arguments: argparse.Namespace) -> int:
    """Read and show; 1 when the file is cut off or damaged, or holds messages that cannot be used."""
    if arguments.generation is not None and arguments.window is None:
        raise MisuseError("--generation selects the restart of --window N: add --window")
    from . import view

    with explained(CaptureError), reading(arguments.file):
        keep_details = arguments.window is not None or arguments.json is not None
        inspection = inspect(Path(arguments.file), keep_details=keep_details)
    here, stderr = fingerprint(), arguments.json == STANDARD_OUTPUT
    windows = [window for _, window in sorted(inspection.windows.items())]
    if arguments.window is None:
        view.show(inspection, here, every=arguments.all, stderr=stderr)
    else:
        windows = [_chosen(inspection, arguments.window, arguments.generation)]
        view.show_window(windows[0], stderr=stderr)
    if arguments.png:
        _draw(inspection, arguments.png)
    if arguments.json is not None:
        write_json(document(inspection, here, windows), arguments.json)
    return 0 if inspection.is_sound else 1


def _chosen(inspection: Inspection, window: int, generation: int | None) -> CapturedWindow:
    """The window that was asked for; of several generations that have it, the last."""
    found = [known for known in inspection.sorted_windows() if known.window == window]
    if generation is not None:
        found = [known for known in found if known.generation == generation]
    if not found:
        known = inspection.sorted_windows()
        held = f"{known[0].window} to {known[-1].window}" if known else "none"
        raise MisuseError(f"the capture has no such window; it has {held}")
    return found[-1]


def _draw(inspection: Inspection, path: str) -> None:
    from .figure import draw

    if not inspection.sorted_windows():
        raise CommandError("the capture has no window to draw")
    draw(inspection, path)
