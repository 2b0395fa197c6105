"""Colours of the page as those see them who do not tell red from green, or blue from yellow."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest

STYLE = Path(__file__).parents[2] / "cli/dynamix/cli/dashboard/page/style.css"
LINES = tuple(f"s{number}" for number in range(8))
PARTS = ("data", "compute", "communication", "wait", "update")
TOLD_APART = 10.0
"""Distance in CIELAB; 2.3 is just noticed where two areas meet."""

SEEN = {
    "all cones": np.eye(3),
    "no long ones": np.array([
        [0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]
    ]),
    "no middle ones": np.array([
        [0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]
    ]),
    "no short ones": np.array([
        [1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]
    ]),
}  # fmt: skip
"""From linear sRGB to what is seen of it without one kind of cones: Machado, Oliveira, Fernandes 2009, severity 1."""

XYZ = np.array([
    [0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]
])  # fmt: skip
WHITE = np.array([0.95047, 1.0, 1.08883])


def palette(*, dark: bool) -> dict[str, str]:
    """The style sheet's colours by name; the second block is that of the dark scheme."""
    block = re.findall(r":root \{(.*?)\}", STYLE.read_text(), flags=re.DOTALL)[dark]
    return dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", block))


def linear(colour: str) -> np.ndarray:
    parts = np.array([int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def lab(light: np.ndarray) -> np.ndarray:
    """CIELAB of linear sRGB, under D65."""
    ratio = XYZ @ np.clip(light, 0, 1) / WHITE
    bent = np.where(ratio > 216 / 24389, np.cbrt(ratio), ratio * 841 / 108 + 4 / 29)
    return np.array([116 * bent[1] - 16, 500 * (bent[0] - bent[1]), 200 * (bent[1] - bent[2])])


def distance(first: str, second: str, seen: np.ndarray) -> float:
    return float(np.linalg.norm(lab(seen @ linear(first)) - lab(seen @ linear(second))))


def test_distances_are_those_of_cielab() -> None:
    assert distance("#000000", "#ffffff", SEEN["all cones"]) == pytest.approx(100, abs=0.01)
    assert distance("#ff0000", "#00ff00", SEEN["all cones"]) == pytest.approx(170.58, abs=0.1)
    assert distance("#d55e00", "#7aa000", SEEN["no middle ones"]) < TOLD_APART, "an orange and a green of one lightness"


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("names", [LINES, PARTS])
@pytest.mark.parametrize("cones", SEEN)
def test_any_two_colours_are_told_apart(names: tuple[str, ...], cones: str, dark: bool) -> None:
    colours = palette(dark=dark)
    close = {
        (first, second): round(found, 1)
        for first, second in itertools.combinations(names, 2)
        if (found := distance(colours[first], colours[second], SEEN[cones])) < TOLD_APART
    }
    assert close == {}
