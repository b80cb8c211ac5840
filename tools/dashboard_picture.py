"""Draws panels of the Grafana dashboard from the values in a Prometheus, as an SVG file.

    python tools/dashboard_picture.py http://127.0.0.1:9090 dashboard.svg

The queries are those of deploy/grafana/dashboards/octavo.json. The picture shows the last two
minutes.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

from octavo.bench.picture import Axis, Panel, Series, draw, points

DASHBOARD = Path(__file__).parent.parent / "deploy" / "grafana" / "dashboards" / "octavo.json"
TITLES = (
    ("Generated tokens per second", "Running sequences"),
    ("Time to first token (TTFT)", "Inter-token latency (ITL)"),
    ("KV blocks in use", "Prefix cache hit rate"),
    ("KV tiers: prompt tokens found", "Acceptance rate"),
)
SUBSTITUTES = {"$__rate_interval": "20s", "$worker": ".*"}
UNITS = {"s": "seconds", "percentunit": "share", "reqps": "requests per second"}
WIDTH = 620
SECONDS = 120.0


def query(url: str, expression: str, start: float, end: float) -> list[dict[str, Any]]:
    for name, value in SUBSTITUTES.items():
        expression = expression.replace(name, value)
    fields = urlencode({"query": expression, "start": start, "end": end, "step": 1})
    with urlopen(f"{url}/api/v1/query_range?{fields}", timeout=30) as reply:
        series: list[dict[str, Any]] = json.load(reply)["data"]["result"]
    return series


def lines(url: str, panel: dict[str, Any], start: float, end: float) -> Iterator[Series]:
    """Yield the lines of a panel. Times are seconds after `start`."""
    for target in panel["targets"]:
        for series in query(url, target["expr"], start, end):
            name = target["legendFormat"]
            for label, value in series["metric"].items():
                name = name.replace(f"{{{{{label}}}}}", value)
            values = [(float(when) - start, float(value)) for when, value in series["values"]]
            finite = [(when, value) for when, value in values if math.isfinite(value)]
            if finite:
                yield Series(name, finite)


def stack(rows: list[list[Panel]]) -> Panel:
    """Place rows of panels below each other."""
    groups = []
    top = 0.0
    for row in rows:
        left = 0.0
        for panel in row:
            groups.append(f'<g transform="translate({left:g} {top:g})">{panel.body}</g>')
            left += panel.width
        top += max(panel.height for panel in row)
    return Panel(max(sum(panel.width for panel in row) for row in rows), top, "\n".join(groups))


def picture(url: str, path: Path, start: float, end: float) -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    graphs = {panel["title"]: panel for panel in panels if panel["type"] == "timeseries"}
    rows = []
    for titles in TITLES:
        row = []
        for title in titles:
            unit = UNITS.get(graphs[title]["fieldConfig"]["defaults"]["unit"], "")
            row.append(
                points(
                    title,
                    list(lines(url, graphs[title], start, end)),
                    Axis("seconds"),
                    Axis(unit, starts_at_zero=True),
                    connected=True,
                    width=WIDTH,
                    mark_size=0,
                )
            )
        rows.append(row)
    draw(path, stack(rows))


if __name__ == "__main__":
    now = time.time()
    picture(sys.argv[1], Path(sys.argv[2]), now - SECONDS, now)
