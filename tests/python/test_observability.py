"""deploy/observability as it is: expressions name metrics that there are, promtool accepts the files, and Prometheus
reads a fleet with them so that every panel has data. What needs Prometheus is left out where there is none.
"""

import contextlib
import dataclasses
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx2
import pytest
import yaml

import fleet as fleets
from fleet import MODEL, Router, host_and_port
from processes import REPOSITORY, Process, ask, free_port, wait_until

FOLDER = REPOSITORY / "deploy" / "observability"
PAGE = REPOSITORY / "docs" / "alerts.md"
CACHE = fleets.cache_folder() / "debian" / "prometheus" / "usr" / "bin"
NODE = "a"
TENANT = "research"
# Within how many seconds Prometheus has read the fleet often enough for every panel.
FULL_SECONDS = 90
# Within how many seconds it answers.
START_SECONDS = 30
# Testing all rules takes promtool four seconds of a core, of which a busy machine leaves it a twentieth.
PROMTOOL_SECONDS = 180
# Long enough to hold two readings of any page on a busy machine.
RANGE = "1m"
# What a viewer's choices and Grafana itself put into an expression.
CHOSEN = {"$__rate_interval": RANGE, "$__range": RANGE, "$router": ".*", "$replica": f"{NODE}/0"}
# Panels that may be empty in a healthy fleet without GPUs and batch jobs: nobody waited, and no stream lost its engine.
EMPTY = {
    "Wait in the queue",
    "Time left",
    "Pause of resumed streams",
    "Busy",
    "Memory",
    "Power",
    "Temperature",
    "Held down",
    "Memory faults",
}

TOKEN = re.compile(
    r"""(?P<space>\s+|\#.*)
    | (?P<text>"(?:[^"\\]|\\.)*")
    | (?P<range>\[[0-9a-z:]+\])
    | (?P<number>[0-9]+(?:\.[0-9]+)?(?:ms|[smhdwy])?)
    | (?P<word>[a-zA-Z_:][a-zA-Z0-9_:]*)
    | (?P<sign>=~|!~|!=|==|>=|<=|[-+*/%^(){},=<>])""",
    re.VERBOSE,
)
LABEL_LISTS = {"by", "without", "on", "ignoring", "group_left", "group_right"}
OPERATORS = {"and", "or", "unless", "bool", "offset"}
# What Prometheus adds to each sample, and what `agents.yml` does.
TARGET_LABELS = {"job", "instance", "node"}


@dataclasses.dataclass
class Named:
    """What an expression names."""

    metrics: dict[str, set[str]] = dataclasses.field(default_factory=dict)
    """By metric, the labels by which it is selected."""
    labels: set[str] = dataclasses.field(default_factory=set)
    """By which series are put together."""


def named(expression: str) -> Named:
    """Takes an expression apart; fails where a part of it is none of what is known here."""
    tokens, at = [], 0
    while at < len(expression):
        token = TOKEN.match(expression, at)
        assert token, f"{expression!r}: what is {expression[at:]!r}?"
        at = token.end()
        if token.lastgroup != "space":
            tokens.append((token.lastgroup, token.group()))
    found, last, closing = Named(), "", None
    for (kind, text), (_, after) in zip(tokens, [*tokens[1:], ("end", "")], strict=True):
        if closing:
            if text == closing:
                closing = None
            elif kind == "word":
                (found.metrics[last] if closing == "}" else found.labels).add(text)
        elif text == "{":
            assert last in found.metrics, f"{expression!r} selects without a metric's name"
            closing = "}"
        elif kind == "word" and text in LABEL_LISTS:
            assert after == "(", f"{expression!r}: no list of labels after `{text}`"
            closing = ")"
        elif kind == "word" and text not in OPERATORS and after not in ("(", "by", "without"):
            last = text
            found.metrics.setdefault(last, set())
    return found


def documented() -> dict[str, set[str]]:
    """The labels of each name that samples have, by docs/metrics.md."""
    samples = {"up": set()}
    for line in (REPOSITORY / "docs" / "metrics.md").read_text().splitlines():
        if row := re.match(r"\| `(\w+)` \| (\w+) \| (.*?) \| ", line):
            name, kind, labels = row.groups()
            of = set(re.findall(r"`(\w+)`", labels))
            if kind == "histogram":
                samples |= {f"{name}_bucket": of | {"le"}, f"{name}_sum": of, f"{name}_count": of}
            else:
                assert kind in ("counter", "gauge") and name.endswith("_total") == (kind == "counter"), line
                samples[name] = of
    assert len(samples) > 80, "docs/metrics.md has another form than this test knows"
    return samples


DOCUMENTED = documented()


def check(expression: str, *templates: str) -> None:
    """Fails where an expression, or a template of what it gives, names something that there is not."""
    asked = named(expression)
    assert asked.metrics, expression
    labels = set(TARGET_LABELS)
    for metric, selected in asked.metrics.items():
        assert metric in DOCUMENTED, f"{expression!r}: docs/metrics.md has no `{metric}`"
        labels |= DOCUMENTED[metric]
        assert selected <= DOCUMENTED[metric] | TARGET_LABELS, f"{expression!r}: `{metric}` has no {selected}"
    shown = {label for text in templates for label in re.findall(r"{{\s*(?:\$labels\.)?(\w+)\s*}}", text)}
    assert asked.labels | shown <= labels, f"{expression!r} has none of {(asked.labels | shown) - labels}"


def rules() -> list[dict]:
    """All alerts."""
    return [rule for group in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"] for rule in group["rules"]]


def dashboards() -> dict[str, dict]:
    """All dashboards by their file's name."""
    return {path.name: json.loads(path.read_text()) for path in sorted((FOLDER / "dashboards").glob("*.json"))}


def panels() -> list[tuple[str, dict, dict]]:
    """Dashboard, panel and target of each expression."""
    return [
        (name, panel, target)
        for name, dashboard in dashboards().items()
        for panel in dashboard["panels"]
        for target in panel.get("targets", [])
    ]


def chosen(expression: str) -> str:
    """An expression as Grafana sends it."""
    for variable, value in CHOSEN.items():
        expression = expression.replace(variable, value)
    return expression


def test_an_expression_is_taken_apart():
    asked = 'sum by (le, job) (rate(a_bucket{b="x{", c=~"y"}[5m])) / 1.5 > 0 unless on (d) max without (e) (f) # g'
    found = named(asked)
    assert found == Named({"a_bucket": {"b", "c"}, "f": set()}, {"le", "job", "d", "e"})


def test_alerts_name_metrics_that_there_are():
    for rule in rules():
        check(rule["expr"], *rule["annotations"].values())


def test_alerts_have_a_section_that_says_what_helps():
    sections = re.findall(r"^## (\w+)$", PAGE.read_text(), re.MULTILINE)
    assert sections == [rule["alert"] for rule in rules()]
    for rule in rules():
        assert rule["annotations"].keys() == {"summary", "description", "runbook"}
        assert rule["annotations"]["runbook"] == f"docs/alerts.md#{rule['alert'].lower()}"


def test_every_alert_fires_in_a_test_of_its_own():
    tests = yaml.safe_load((FOLDER / "alerts_test.yml").read_text())["tests"]
    asked = [query for test in tests for query in test["promql_expr_test"]]
    fired = {
        label
        for query in asked
        for sample in query["exp_samples"]
        for label in re.findall(r'alertname="(\w+)"', sample["labels"])
    }
    assert fired == {rule["alert"] for rule in rules()}


def test_commands_that_help_are_there():
    commands = {" ".join(span.split()) for span in re.findall(r"`(hostler\s[^`]+)`", PAGE.read_text())}
    assert commands
    for command in commands:
        _, *words = command.split()
        subcommand = words[:2] if words[0] == "keys" else words[:1]
        page = ask(*subcommand, "--help")
        for flag in re.findall(r"--[a-z-]+", command):
            assert f"{flag} " in page or f"{flag}\n" in page, f"`{command}` has no {flag}"


def test_dashboards_are_as_their_source_says(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    rendered = runpy.run_path(str(FOLDER / "dashboards.py"))["rendered"]()
    written = {path.name: path.read_text() for path in (FOLDER / "dashboards").iterdir()}
    assert written == rendered, "run deploy/observability/dashboards.py"


def test_panels_name_metrics_that_there_are():
    for _, panel, target in panels():
        check(chosen(target["expr"]), target["legendFormat"])
        assert panel["description"], panel["title"]
    for dashboard in dashboards().values():
        variables = [variable for variable in dashboard["templating"]["list"] if variable["type"] == "query"]
        for variable in variables:
            metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["definition"]).groups()
            assert metric in DOCUMENTED and label in DOCUMENTED[metric] | TARGET_LABELS, variable["definition"]
        texts = json.dumps(dashboard["panels"])
        assert set(re.findall(r"\$\{?(\w+)", texts)) - {"__rate_interval", "__range"} == {
            "datasource",
            *(variable["name"] for variable in variables),
        }


def program(name: str) -> str:
    """Where one of Prometheus' programs is; .ci/run unpacks Debian's package into the cache."""
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:{CACHE}")
    if not found:
        pytest.skip(f"there is no {name} here")
    return found


def accepts(*arguments: str) -> None:
    """Fails unless promtool has nothing to say against a file."""
    ended = subprocess.run(
        [program("promtool"), *arguments],
        cwd=FOLDER,
        capture_output=True,
        text=True,
        timeout=PROMTOOL_SECONDS,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_promtool_accepts_the_configuration():
    accepts("check", "config", "prometheus.yml")


def test_promtool_accepts_the_alerts():
    accepts("check", "rules", "alerts.yml")


def test_each_alert_fires_when_it_should_and_never_otherwise():
    accepts("test", "rules", "alerts_test.yml")


@dataclasses.dataclass
class Watched:
    """A fleet, and the Prometheus that reads it."""

    router: Router
    prometheus: httpx2.Client
    key: str

    def ask(self, path: str, **parameters: str) -> dict:
        """An answer of Prometheus' API."""
        answer = self.prometheus.get(f"/api/v1/{path}", params=parameters)
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]

    def has_data(self, expression: str) -> bool:
        """Whether Grafana would draw something: a number, which NaN is not."""
        return any(series["value"][1] != "NaN" for series in self.ask("query", query=expression)["result"])

    def up(self) -> set[str]:
        """The jobs of which all pages are read."""
        states = {target["labels"]["job"]: target["health"] for target in self.ask("targets")["activeTargets"]}
        return {job for job, health in states.items() if health == "up"}

    def chat(self) -> None:
        """A streamed chat of a tenant, whose usage is asked for, through the edge."""
        asked = [{"role": "user", "content": "Say something about locomotives. " * 20}]
        body = {"model": MODEL, "messages": asked, "max_tokens": 3, "stream": True}
        body["stream_options"] = {"include_usage": True}
        shown = {"authorization": f"Bearer {self.key}"}
        httpx2.post(f"{self.router.edge}/chat/completions", json=body, headers=shown, timeout=60).raise_for_status()


def configuration(folder: Path, router: Router, agent_pages: str) -> Path:
    """The configuration as it is, with the addresses of this fleet, read every second."""
    text = (FOLDER / "prometheus.yml").read_text()
    for old, new in (("127.0.0.1:8002", host_and_port(router.admin)), ("_interval: 15s", "_interval: 1s")):
        assert old in text
        text = text.replace(old, new)
    (folder / "prometheus.yml").write_text(text)
    (folder / "agents.yml").write_text(json.dumps([{"targets": [agent_pages], "labels": {"node": NODE}}]))
    shutil.copy(FOLDER / "alerts.yml", folder)
    return folder / "prometheus.yml"


def is_ready(client: httpx2.Client, child: subprocess.Popen, log: Path) -> bool:
    """Whether Prometheus answers."""
    assert child.poll() is None, f"it exited {child.returncode}: {log.read_text(errors='replace')[-2000:]}"
    try:
        return client.get("/-/ready").status_code == 200
    except httpx2.TransportError:
        return False


@contextlib.contextmanager
def running_fleet():
    """A router with a key, and an agent with two engines; gives the router, the address of the agent's page, the key."""
    # Not pytest's own folder: engines listen on Unix sockets below this one, whose paths must stay short.
    folder = Path(tempfile.mkdtemp(prefix="hostler-"))
    engine, pages, started = fleets.simulated(), f"127.0.0.1:{free_port()}", []
    try:
        ask("keys", "create", "--file", str(folder / "keys.toml"), "--tenant", TENANT, "--out", str(folder / "key"))
        router = Router("router", folder, variables={"HOSTLER_ROUTER_KEYS_FILE": str(folder / "keys.toml")})
        started.append(router)
        places = ["--run-dir", str(folder / "run"), "--log-dir", str(folder / "log"), "--agent-admin", pages]
        flags = ["--engine", "simulated", "--replicas", "2", "--", "--served-model-name", MODEL, *engine.flags]
        started.append(Process("agent", ["agent", "--router", router.agents, "--node", NODE, *places, *flags], folder))

        def all_ready() -> bool:
            return [replica.phase for replica in router.replicas()] == ["ready", "ready"]

        wait_until(all_ready, engine.start_seconds, "both engines ready", pause=0.2)
        yield router, pages, (folder / "key").read_text().strip()
    finally:
        for process in reversed(started):
            process.stop()
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def running_prometheus(found: str, config: Path):
    """Prometheus with this configuration, and its storage beside it; ended by its pid."""
    port, log = free_port(), config.with_suffix(".stderr")
    storage = ["--storage.tsdb.path", str(config.parent / "data"), "--web.listen-address", f"127.0.0.1:{port}"]
    with log.open("wb") as errors:
        child = subprocess.Popen([found, "--config.file", str(config), *storage], stdout=errors, stderr=errors)
    try:
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=30, trust_env=False) as client:
            wait_until(lambda: is_ready(client, child, log), START_SECONDS, f"Prometheus on port {port}", pause=0.1)
            yield client
    finally:
        child.terminate()
        try:
            child.wait(timeout=10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait(timeout=10)


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """A fleet that Prometheus reads."""
    found = program("prometheus")
    with running_fleet() as (router, pages, key):
        config = configuration(tmp_path_factory.mktemp("prometheus"), router, pages)
        with running_prometheus(found, config) as client:
            yield Watched(router, client, key)


def test_prometheus_reads_router_and_agents(watched: Watched):
    wait_until(lambda: watched.up() == {"hostler-router", "hostler-agent"}, FULL_SECONDS, "both pages read", pause=0.2)
    # An agent's replica has the router's name for it.
    same = 'hostler_agent_engine_ready{node="a"} and on (node, replica) hostler_replica_ready'
    wait_until(lambda: len(watched.ask("query", query=same)["result"]) == 2, FULL_SECONDS, "both replicas", pause=0.2)


def test_every_panel_has_data(watched: Watched):
    asked = [(panel["title"], chosen(target["expr"])) for _, panel, target in panels()]
    assert {title for title, _ in asked} >= EMPTY

    def filled() -> bool:
        watched.chat()
        return all(watched.has_data(expression) for title, expression in asked if title not in EMPTY)

    try:
        wait_until(filled, FULL_SECONDS, "data in every panel", pause=0.5)
    except AssertionError:
        empty = [one for one in asked if one[0] not in EMPTY and not watched.has_data(one[1])]
        raise AssertionError(f"no data: {empty}") from None


def test_prometheus_evaluates_every_alert_and_none_fires(watched: Watched):
    def evaluated() -> list[dict]:
        alerts = [rule for group in watched.ask("rules")["groups"] for rule in group["rules"]]
        return alerts if all(rule["health"] != "unknown" for rule in alerts) else []

    alerts = wait_until(evaluated, FULL_SECONDS, "all alerts evaluated", pause=0.2)
    assert {rule["name"] for rule in alerts} == {rule["alert"] for rule in rules()}
    assert {rule["health"] for rule in alerts} == {"ok"}, alerts
    # Samples of a second instead of 15: a busy machine may fall silent for so many.
    firing = {rule["name"] for rule in alerts if rule["state"] == "firing"}
    assert firing <= {"HostlerStaleReports"}, alerts
