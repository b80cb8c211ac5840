"""Any two of twelve live requests can be told apart, also by colour-blind people: their colours
differ by at least 20 in CIEDE2000, or their patterns differ. Text has enough contrast to what it is
written on."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

SCRIPT = (Path(__file__).parents[2] / "octavo" / "web" / "colours.js").read_text()
XYZ = np.array([[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.072175], [0.0193339, 0.119192, 0.9503041]])  # fmt: skip
WHITE = np.array([0.95047, 1.0, 1.08883])
# What a person without one kind of cones sees (Machado, Oliveira and Fernandes, 2009).
VISIONS = {
    "normal": np.eye(3),
    "deuteranopia": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]]),
    "protanopia": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]),
}  # fmt: skip
ENOUGH = 20


def colours() -> list[np.ndarray]:
    listed = re.search(r"COLOURS = \[(.*?)\]", SCRIPT, re.DOTALL)
    assert listed is not None
    codes = re.findall(r"#([0-9a-f]{6})", listed[1])
    return [np.array([int(code[at : at + 2], 16) / 255 for at in (0, 2, 4)]) for code in codes]


def striped() -> list[bool]:
    listed = re.search(r"STRIPED = \[(.*?)\]", SCRIPT, re.DOTALL)
    assert listed is not None
    return [word == "true" for word in re.findall(r"true|false", listed[1])]


def lab(colour: np.ndarray, vision: np.ndarray) -> np.ndarray:
    linear = np.where(colour <= 0.04045, colour / 12.92, ((colour + 0.055) / 1.055) ** 2.4)
    xyz = XYZ @ np.clip(vision @ linear, 0, 1) / WHITE
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def ciede2000(first: np.ndarray, second: np.ndarray) -> float:
    """The difference of two colours as Sharma, Wu and Dalal (2005) write it."""
    (l1, a1, b1), (l2, a2, b2) = first, second
    mean_chroma = (np.hypot(a1, b1) + np.hypot(a2, b2)) / 2
    g = 0.5 * (1 - np.sqrt(mean_chroma**7 / (mean_chroma**7 + 25**7)))
    c1, c2 = np.hypot((1 + g) * a1, b1), np.hypot((1 + g) * a2, b2)
    h1, h2 = (np.degrees(np.arctan2(b, (1 + g) * a)) % 360 for a, b in ((a1, b1), (a2, b2)))
    turn = (h2 - h1 + 180) % 360 - 180
    dh = 2 * np.sqrt(c1 * c2) * np.sin(np.radians(turn) / 2)
    mean_l, mean_c, mean_h = (l1 + l2) / 2, (c1 + c2) / 2, (h1 + turn / 2) % 360
    t = (
        1
        - 0.17 * np.cos(np.radians(mean_h - 30))
        + 0.24 * np.cos(np.radians(2 * mean_h))
        + 0.32 * np.cos(np.radians(3 * mean_h + 6))
        - 0.20 * np.cos(np.radians(4 * mean_h - 63))
    )
    sl = 1 + 0.015 * (mean_l - 50) ** 2 / np.sqrt(20 + (mean_l - 50) ** 2)
    sc, sh = 1 + 0.045 * mean_c, 1 + 0.015 * mean_c * t
    rotation = (
        -2
        * np.sqrt(mean_c**7 / (mean_c**7 + 25**7))
        * np.sin(np.radians(60 * np.exp(-(((mean_h - 275) / 25) ** 2))))
    )
    parts = (l2 - l1) / sl, (c2 - c1) / sc, dh / sh
    return float(np.sqrt(sum(part**2 for part in parts) + rotation * parts[1] * parts[2]))


def test_the_formula_gives_published_differences() -> None:
    # Pairs 1, 7 and 17 of the table of Sharma, Wu and Dalal.
    for first, second, difference in (
        ((50, 2.6772, -79.7751), (50, 0, -82.7485), 2.0425),
        ((50, 0, 0), (50, -1, 2), 2.3669),
        ((50, 2.5, 0), (73, 25, -18), 27.1492),
    ):
        assert abs(ciede2000(np.array(first), np.array(second)) - difference) < 1e-3


def test_any_two_of_twelve_requests_differ() -> None:
    looks = list(zip(colours(), striped(), strict=True))
    assert len(looks) == 12
    close = 0
    for (one, one_striped), (two, two_striped) in combinations(looks, 2):
        for name, vision in VISIONS.items():
            difference = ciede2000(lab(one, vision), lab(two, vision))
            if difference < ENOUGH:
                close += 1
                assert name != "normal" and one_striped != two_striped, (one, two, name, difference)
    assert close, "without close pairs no pattern would be needed"


STYLE = (Path(__file__).parents[2] / "octavo" / "web" / "page.css").read_text()
LIGHT = re.search(r":root \{(.*?)\n\}", STYLE, re.DOTALL)
DARK = re.search(r"prefers-color-scheme: dark\) \{\s*:root \{(.*?)\}", STYLE, re.DOTALL)
TEXTS = ("ink", "dim", "accent", "waiting", "prefill", "decode", "alarm", "tier", "done")
GROUNDS = ("bg", "panel", "soft", "marked")
PAIRS = [("on-accent", "accent"), ("on-prefill", "prefill"), ("cached-ink", "cached")]


def contrast(one: str, other: str) -> float:
    """The contrast of two colours, as the Web Content Accessibility Guidelines define it."""

    def luminance(code: str) -> float:
        parts = np.array([int(code[at : at + 2], 16) / 255 for at in (1, 3, 5)])
        linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        return float(XYZ[1] @ linear)

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_on_every_ground(scheme: str) -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert LIGHT is not None and DARK is not None
    variables = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", LIGHT[1]))
    if scheme == "dark":
        variables |= dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", DARK[1]))
    pairs = [(text, ground) for text in TEXTS for ground in GROUNDS] + PAIRS
    for text, ground in pairs:
        assert contrast(variables[text], variables[ground]) >= 4.5, (text, ground)
