"""What deploy/ has for Prometheus and Grafana fits the code: names of metrics, sections of the runbook, valid files."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.unit.test_pages import metrics_of_the_code

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "deploy" / "prometheus"
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "schemaless.json").read_text())
RULES = [rule for group in yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
NAME = re.compile(r"\bschemaless_[a-z_]+\b")
QUESTIONS = ["Does it run?", "How far behind is it?", "How fast is it?", "What fails?", "How long yet?"]


def unknown_metrics(expression: str) -> set[str]:
    """The names in an expression that no service serves. Histograms and counters have endings."""
    bare = {re.sub(r"_(bucket|sum|count|total)$", "", name) for name in NAME.findall(expression)}
    return bare - metrics_of_the_code()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_asks_for_metrics_that_exist_and_leads_to_its_section(rule):
    """Whoever is woken by it reads what it means and what to do."""
    assert unknown_metrics(rule["expr"]) == set()
    assert rule["labels"]["severity"] in ("critical", "warning")
    page, _, heading = rule["annotations"]["runbook_url"].partition("#")
    sections = re.findall(r"^## (\w+)$", (ROOT / page).read_text(), re.MULTILINE)
    assert heading in [section.lower() for section in sections]


def test_every_section_of_the_runbook_is_of_an_alert():
    sections = re.findall(r"^## (\w+)$", (ROOT / "docs" / "alerts.md").read_text(), re.MULTILINE)
    assert sections == [rule["alert"] for rule in RULES]


def test_the_dashboard_answers_its_questions_with_metrics_that_exist():
    """Each panel has a place of its own, a title, and expressions."""
    rows = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
    assert rows == QUESTIONS
    panels = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(places)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)
    for panel in panels:
        assert panel["title"]
        assert panel["targets"]
        for target in panel["targets"]:
            assert target["legendFormat"]
            assert unknown_metrics(target["expr"]) == set()


def test_a_name_that_no_service_serves_is_found():
    """The checks above could pass for want of names."""
    assert unknown_metrics("rate(schemaless_tailer_no_such_thing_total[1m])") == {"schemaless_tailer_no_such_thing"}


def test_prometheus_scrapes_every_service_of_compose():
    """Under the port that its settings name, and with the token."""
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    scraped = yaml.safe_load((PROMETHEUS / "compose.yml").read_text())["scrape_configs"]
    targets = [target for job in scraped for entry in job["static_configs"] for target in entry["targets"]]
    assert all("authorization" in job for job in scraped)
    for target in targets:
        name, _, port = target.partition(":")
        environment = services[name]["environment"]
        kind = "API" if name.startswith("api-") else name.upper()
        setting = "SCHEMALESS_API_PORT" if kind == "API" else f"SCHEMALESS_{kind}_METRICS_PORT"
        assert environment[setting] == port
    assert {target.partition(":")[0] for target in targets} == {
        "api-0", "api-1", "tailer", "indexer", "consumers", "cleaner",
    }  # fmt: skip


def test_promtool_takes_the_rules_and_the_configuration():
    """Where it is installed (Debian's package prometheus). Elsewhere the other tests of this file are the check."""
    promtool = shutil.which("promtool")
    if promtool is None:
        assert all(rule.keys() == {"alert", "expr", "for", "labels", "annotations"} for rule in RULES)
        return
    for command in (["check", "rules", "alerts.yml"], ["check", "config", "--syntax-only", "compose.yml"]):
        done = subprocess.run([promtool, *command], cwd=PROMETHEUS, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
