"""What a dashboard is in Grafana's words; dashboards.py says what is on them."""

import dataclasses

GRID_WIDTH = 24
GREEN, YELLOW, RED = "green", "yellow", "red"
# The one that the viewer chooses at the top of a dashboard.
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclasses.dataclass
class Panel:
    """One picture. `series` are expressions by their legend; `steps` are colors by the value from which they hold."""

    title: str
    description: str
    series: dict[str, str]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    steps: dict[float, str] = dataclasses.field(default_factory=dict)
    words: dict[int, tuple[str, str]] = dataclasses.field(default_factory=dict)
    most: float | None = None
    stacked: bool = False


def stat(
    title: str, description: str, expression: str, steps: dict[float, str] | None = None, unit: str = "short"
) -> Panel:
    """The latest value as a number."""
    return Panel(title, description, {"": expression}, unit, "stat", width=4, steps=steps or {})


def timeline(
    title: str, description: str, series: dict[str, str], words: dict[int, tuple[str, str]], width: int = GRID_WIDTH
) -> Panel:
    """A bar for each series, which has a word and a color for each value."""
    return Panel(title, description, series, kind="state-timeline", width=width, words=words)


def variable(name: str, label: str, metric: str, source: str, several: bool) -> dict:
    """A choice of what Prometheus has under a label."""
    query = f"label_values({metric}, {source})"
    chosen = (
        {"allValue": ".*", "current": {"selected": True, "text": ["All"], "value": ["$__all"]}}
        if several
        else {"current": {}}
    )
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "definition": query,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
        "multi": several,
        "includeAll": several,
        **chosen,
    }


def drawn(panel: Panel) -> dict:
    """A panel in Grafana's words, without its place."""
    steps = [{"color": color, "value": value if at else None} for at, (value, color) in enumerate(panel.steps.items())]
    defaults = {
        "unit": panel.unit,
        "min": 0,
        "color": {"mode": "thresholds" if panel.steps and panel.kind == "stat" or panel.words else "palette-classic"},
        "thresholds": {"mode": "absolute", "steps": steps or [{"color": GREEN, "value": None}]},
    }
    if panel.most is not None:
        defaults["max"] = panel.most
    if panel.words:
        words = {
            str(value): {"color": color, "index": at, "text": text}
            for at, (value, (text, color)) in enumerate(panel.words.items())
        }
        defaults["mappings"] = [{"type": "value", "options": words}]
    if panel.kind == "timeseries":
        defaults["custom"] = {
            "fillOpacity": 20 if panel.stacked else 5,
            "showPoints": "never",
            "stacking": {"group": "A", "mode": "normal" if panel.stacked else "none"},
            "thresholdsStyle": {"mode": "dashed" if panel.steps else "off"},
        }
    options = {
        "timeseries": {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "stat": {"colorMode": "value", "graphMode": "area", "reduceOptions": {"calcs": ["lastNotNull"]}},
        "state-timeline": {
            "mergeValues": True,
            "showValue": "never",
            "legend": {"displayMode": "list", "placement": "bottom"},
        },
    }
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options[panel.kind],
        "targets": [
            {
                "refId": chr(ord("A") + at),
                "datasource": SOURCE,
                "expr": expression,
                "legendFormat": legend or panel.title,
                "range": True,
            }
            for at, (legend, expression) in enumerate(panel.series.items())
        ],
    }


def placed(rows: dict[str, list[Panel]]) -> list[dict]:
    """All panels from left to right, below a line for each row."""
    panels, top = [], 0
    for title, row in rows.items():
        panels.append(
            {
                "type": "row",
                "title": title,
                "collapsed": False,
                "gridPos": {"h": 1, "w": GRID_WIDTH, "x": 0, "y": top},
                "panels": [],
            }
        )
        left, tallest, top = 0, 0, top + 1
        for panel in row:
            height = 4 if panel.width == 4 else 8
            if left + panel.width > GRID_WIDTH:
                left, tallest, top = 0, 0, top + tallest
            panels.append(drawn(panel) | {"gridPos": {"h": height, "w": panel.width, "x": left, "y": top}})
            left, tallest = left + panel.width, max(tallest, height)
        top += tallest
    return [{"id": at, **panel} for at, panel in enumerate(panels, start=1)]


def dashboard(name: str, title: str, description: str, variables: list[dict], rows: dict[str, list[Panel]]) -> dict:
    """A whole dashboard."""
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "current": {}}
    link = {"type": "dashboards", "title": "Hostler", "tags": ["hostler"], "includeVars": True, "keepTime": True}
    return {
        "uid": f"hostler-{name}",
        "title": title,
        "description": description,
        "tags": ["hostler"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "links": [link],
        "templating": {"list": [source, *variables]},
        "annotations": {"list": []},
        "panels": placed(rows),
    }
