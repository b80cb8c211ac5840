"""Samples the stacks of a Python process, and draws them as a flame graph.

py-spy takes the samples from outside, so the process needs no change and is hardly slowed down.

    "main (server.py:10);step (engine.py:80);plan (scheduler.py:200)" -> 37 samples

A flame graph shows a rectangle for each function: as wide as its share of the samples, above the
function that called it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from octavo.errors import OctavoError

WIDTH = 1200
ROW = 18
LETTER = 6.6  # average width at font size 11
MIN_PIXELS = 1.0  # narrower rectangles are left out
FRAME = re.compile(r"(?P<name>.+) \((?P<file>[^()]*?)(:(?P<line>\d+))?\)$")


def find_py_spy() -> str | None:
    """Return the path of py-spy, beside this Python or elsewhere."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


class StackSampler:
    """Samples a process in the background until `finish`. Raises OctavoError without py-spy."""

    def __init__(self, pid: int, seconds: float, rate: int = 100, subprocesses: bool = False):
        program = find_py_spy()
        if program is None:
            raise OctavoError("py-spy is not installed: pip install py-spy")
        self.directory = tempfile.TemporaryDirectory(prefix="octavo-profile-")
        self.output = Path(self.directory.name) / "stacks.txt"
        command = [program, "record", "--pid", str(pid), "--duration", str(max(round(seconds), 1))]
        command += ["--rate", str(rate), "--format", "raw", "--output", str(self.output)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )

    def finish(self) -> Counter[str]:
        """Return the samples of each stack. Waits for the end of the period."""
        _, errors = self.process.communicate()
        try:
            text = self.output.read_text()
        except OSError:
            reason = errors.strip().splitlines()[-1:] or ["py-spy wrote nothing"]
            raise OctavoError(
                f"the stacks cannot be read ({reason[0]}): containers need the capability "
                "SYS_PTRACE, and other users' processes need root"
            ) from None
        finally:
            self.directory.cleanup()
        return read_stacks(text)

    def stop(self) -> None:
        self.process.terminate()


def read_stacks(text: str) -> Counter[str]:
    """Read lines of the form `outermost;...;innermost COUNT`."""
    samples: Counter[str] = Counter()
    for line in text.splitlines():
        stack, _, count = line.rpartition(" ")
        if stack and count.isdigit():
            samples[stack] += int(count)
    return samples


def hottest_functions(stacks: Counter[str], count: int = 5) -> list[tuple[str, float]]:
    """Return the functions with the most samples of their own, and their shares of all samples."""
    samples_by_function: Counter[str] = Counter()
    for stack, samples in stacks.items():
        samples_by_function[short_name(stack.rpartition(";")[2])] += samples
    total = max(sum(stacks.values()), 1)
    return [(name, samples / total) for name, samples in samples_by_function.most_common(count)]


def short_name(frame: str) -> str:
    """Return a frame without its line, and with the last two parts of its path."""
    match = FRAME.match(frame)
    if match is None:
        return frame
    path_end = Path(match["file"]).parts[-2:]
    return f"{match['name']} ({'/'.join(path_end)})"


# ---- drawing -------------------------------------------------------------------------------------


@dataclass
class FlameNode:
    """A function in one call path: the children are the functions that it called."""

    name: str
    samples: int = 0
    children: dict[str, FlameNode] = field(default_factory=dict)


def build_tree(stacks: Counter[str]) -> FlameNode:
    root = FlameNode("all")
    for stack, samples in stacks.items():
        root.samples += samples
        node = root
        for frame in stack.split(";"):
            name = short_name(frame)
            node = node.children.setdefault(name, FlameNode(name))
            node.samples += samples
    return root


def flame_svg(title: str, stacks: Counter[str]) -> str:
    """Return the text of an SVG file. The outermost function is at the bottom."""
    root = build_tree(stacks)
    rectangles: list[tuple[float, int, float, FlameNode]] = []
    place(root, 0.0, 0, WIDTH / max(root.samples, 1), rectangles)
    depth = max((level for _, level, _, _ in rectangles), default=0) + 1
    height = (depth + 2) * ROW
    elements = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" role="img" font-family="system-ui, sans-serif">'
        f'<rect width="100%" height="100%" fill="#fff"/>'
        f'<text x="8" y="{ROW - 4}" font-size="13" font-weight="600">{escape(title)}: '
        f"{root.samples:,} samples</text>"
    ]
    for left, level, width, node in rectangles:
        top = height - (level + 1) * ROW
        share = node.samples / max(root.samples, 1)
        label = node.name[: max(int(width / LETTER) - 1, 0)]
        elements.append(
            f'<g><title>{escape(node.name)}: {share:.1%}</title><rect x="{left:.1f}" y="{top}" '
            f'width="{max(width - 0.5, 0.5):.1f}" height="{ROW - 1}" rx="2" '
            f'fill="{colour_of(node.name)}"/><text x="{left + 3:.1f}" y="{top + ROW - 6}" '
            f'font-size="11">{escape(label)}</text></g>'
        )
    return "\n".join([*elements, "</svg>\n"])


def place(
    node: FlameNode,
    left: float,
    level: int,
    pixels: float,
    rectangles: list[tuple[float, int, float, FlameNode]],
) -> None:
    """Add the rectangles of a node and of the functions that it called."""
    width = node.samples * pixels
    if width < MIN_PIXELS:
        return
    rectangles.append((left, level, width, node))
    for child in sorted(node.children.values(), key=lambda called: called.name):
        place(child, left, level + 1, pixels, rectangles)
        left += child.samples * pixels


def colour_of(name: str) -> str:
    """Return a warm colour that depends on the name alone."""
    number = sum(ord(letter) * (index + 7) for index, letter in enumerate(name))
    return f"hsl({20 + number % 35}, {65 + number % 20}%, {68 + number % 12}%)"
