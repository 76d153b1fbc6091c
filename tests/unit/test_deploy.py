"""What deploy/ has for Prometheus and Grafana fits the code: names of metrics, sections of the runbook, valid files."""

import copy
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from schemaless import config
from schemaless.storage import translation
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


def test_the_alert_on_refused_accounts_knows_all_numbers_of_mysql_for_it():
    """One that the code learns later would fire nothing."""
    (rule,) = (rule for rule in RULES if rule["alert"] == "SchemalessAccountRefused")
    (numbers,) = re.findall(r'code=~"([0-9|]+)"', rule["expr"])
    assert sorted(map(int, numbers.split("|"))) == sorted(translation._ACCOUNT)


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


def as_grafana_reads_it(dashboard: dict[str, Any]) -> dict[str, Any]:
    """Through the types that Grafana publishes of its schema. What they don't know is lost."""
    register_default_plugins()
    return json.loads(JSONEncoder().encode(Dashboard.from_json(dashboard)))


def lost(given: Any, kept: Any, where: str = "") -> list[str]:
    """Where `given` has something that `kept` hasn't. Grafana adds defaults of its own."""
    if isinstance(given, dict) and isinstance(kept, dict):
        return [place for name, value in given.items() for place in lost(value, kept.get(name), f"{where}/{name}")]
    if isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        return [place for n, pair in enumerate(zip(given, kept, strict=True)) for place in lost(*pair, f"{where}/{n}")]
    return [] if given == kept else [where]


def test_the_schema_of_grafana_takes_the_dashboard():
    """Nothing of it is lost on the way through the types. A member that Grafana doesn't know is."""
    assert lost(DASHBOARD, as_grafana_reads_it(DASHBOARD)) == []
    misspelt = copy.deepcopy(DASHBOARD)
    misspelt["panels"][1]["fieldConfig"]["defaults"]["units"] = "short"
    assert lost(misspelt, as_grafana_reads_it(misspelt)) == ["/panels/1/fieldConfig/defaults/units"]


def test_a_name_that_no_service_serves_is_found():
    """The checks above could pass for want of names."""
    assert unknown_metrics("rate(schemaless_tailer_no_such_thing_total[1m])") == {"schemaless_tailer_no_such_thing"}


def test_prometheus_scrapes_every_service_of_compose():
    """Under the port that its settings name, and with the token. The controller runs before there is a token."""
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    scraped = yaml.safe_load((PROMETHEUS / "compose.yml").read_text())["scrape_configs"]
    targets = [target for job in scraped for entry in job.get("static_configs", []) for target in entry["targets"]]
    found = [entry for job in scraped for entry in job.get("dns_sd_configs", [])]
    targets += [f"{name}:{entry['port']}" for entry in found for name in entry["names"]]
    assert all("authorization" in job for job in scraped)
    for target in targets:
        name, _, port = target.partition(":")
        environment = services[name]["environment"]
        setting = "SCHEMALESS_API_PORT" if name.startswith("api-") else "SCHEMALESS_METRICS_PORT"
        assert environment[setting] == port
    assert {target.partition(":")[0] for target in targets} == {
        "api-0", "api-1", "tailer", "indexer", "consumers", "cleaner",
    }  # fmt: skip


def test_every_process_of_a_scaled_service_is_scraped():
    """A name as a target is one of the addresses behind it, and sums over processes would be too small."""
    scraped = yaml.safe_load((PROMETHEUS / "compose.yml").read_text())["scrape_configs"]
    by_one_name = {target for job in scraped for entry in job.get("static_configs", []) for target in entry["targets"]}
    assert by_one_name == {"api-0:8000", "api-1:8000"}  # their published ports let nobody scale them
    by_address = [entry for job in scraped for entry in job.get("dns_sd_configs", [])]
    assert all(entry["type"] == "A" for entry in by_address)


def test_promtool_takes_the_rules_and_the_configuration():
    """Where it is installed (Debian's package prometheus). Elsewhere the other tests of this file are the check."""
    promtool = shutil.which("promtool")
    if promtool is None:
        assert all(rule.keys() == {"alert", "expr", "for", "labels", "annotations"} for rule in RULES)
        return
    for command in (["check", "rules", "alerts.yml"], ["check", "config", "--syntax-only", "compose.yml"]):
        done = subprocess.run([promtool, *command], cwd=PROMETHEUS, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


RULE_TESTS = """
rule_files: [{rules}]
evaluation_interval: 15s
tests:
  - name: Kafka is away, so the group took all partitions of one datastore, and one can't be opened in another
    interval: 15s
    input_series:
      - {{series: 'schemaless_tailer_partitions{{datastore="trips"}}', values: '8x20'}}
      - {{series: 'schemaless_tailer_partitions{{datastore="fares"}}', values: '2x20'}}
      - {{series: 'schemaless_tailer_partitions{{datastore="fine"}}', values: '1x20'}}
      - {{series: 'schemaless_tailer_partition_open{{datastore="fares", partition="0"}}', values: '0x20'}}
      - {{series: 'schemaless_tailer_partition_open{{datastore="fares", partition="1"}}', values: '1x20'}}
      - {{series: 'schemaless_tailer_partition_open{{datastore="fine", partition="0"}}', values: '1x20'}}
    promql_expr_test:
      - expr: sum by (alertname, datastore) (ALERTS{{alertstate="firing", datastore!=""}})
        eval_time: 2m
        exp_samples:
          - labels: '{{alertname="SchemalessPartitionClosed", datastore="trips"}}'
            value: 1
          - labels: '{{alertname="SchemalessPartitionClosed", datastore="fares"}}'
            value: 1
  - name: the cleaner finds something on masters, of which two processes tell, and on a minion. A falling total is none
    interval: 15s
    input_series:
      - series: 'schemaless_api_index_master_faults{{index="found", kind="stale", instance="a"}}'
        values: '0x3 1x3 0x13'
      - series: 'schemaless_api_index_master_faults{{index="found", kind="stale", instance="b"}}'
        values: '0x4 1x3 0x12'
      - {{series: 'schemaless_api_index_master_faults{{index="old", kind="ghost", instance="a"}}', values: '0x20'}}
      - {{series: 'schemaless_api_index_faults_total{{index="old", kind="ghost", instance="a"}}', values: '7x8 5x11'}}
      - {{series: 'schemaless_api_index_minion_faults{{index="there", node="m", kind="missing"}}', values: '2x20'}}
      - {{series: 'schemaless_api_index_minion_faults{{index="there", node="n", kind="missing"}}', values: '0x20'}}
    promql_expr_test:
      - expr: sum by (alertname, index, node, kind) (ALERTS{{alertstate="firing", index!=""}})
        eval_time: 4m
        exp_samples:
          - labels: '{{alertname="SchemalessIndexFaults", index="found", kind="stale"}}'
            value: 1
          - labels: '{{alertname="SchemalessIndexMinionFaults", index="there", node="m", kind="missing"}}'
            value: 1
  - name: a cell fails, which two API processes report. Another program fails because its breaker is open
    interval: 15s
    input_series:
      - series: 'schemaless_api_trigger_failing_cells{{datastore="trips", program="billing", instance="a"}}'
        values: '0x2 2x17'
      - series: 'schemaless_api_trigger_failing_cells{{datastore="trips", program="billing", instance="b"}}'
        values: '0x3 2x16'
      - {{series: 'schemaless_api_trigger_failing_cells{{datastore="trips", program="down"}}', values: '9x20'}}
      - {{series: 'schemaless_api_trigger_failing_cells{{datastore="trips", program="well"}}', values: '0x20'}}
      - {{series: 'schemaless_api_trigger_tripped_workers{{datastore="trips", program="billing"}}', values: '0x20'}}
      - {{series: 'schemaless_api_trigger_tripped_workers{{datastore="trips", program="down"}}', values: '1x20'}}
    promql_expr_test:
      - expr: sum by (alertname, program) (ALERTS{{alertstate="firing", program!=""}})
        eval_time: 3m
        exp_samples:
          - labels: '{{alertname="SchemalessCellsFail", program="billing"}}'
            value: 1
  - name: a server refuses two processes, and a broker one. What another server refuses, or refused once, is no account
    interval: 15s
    input_series:
      - {{series: 'schemaless_service_mysql_refusals_total{{node="a1", code="1045", instance="a"}}', values: '0+9x20'}}
      - {{series: 'schemaless_service_mysql_refusals_total{{node="a1", code="4151", instance="b"}}', values: '1+1x20'}}
      - {{series: 'schemaless_service_mysql_refusals_total{{node="a2", code="1146"}}', values: '0+9x20'}}
      - {{series: 'schemaless_service_mysql_refusals_total{{node="b1", code="1045"}}', values: '0 9x20'}}
      - {{series: 'schemaless_service_kafka_refusals_total{{broker="k:9092", account="tailer"}}', values: '0+1x20'}}
    alert_rule_test:
      - alertname: SchemalessAccountRefused
        eval_time: 4m
        exp_alerts:
          - exp_labels: {{severity: critical, node: a1}}
            exp_annotations:
              summary: a1 refuses the account of the topology file
              runbook_url: docs/alerts.md#schemalessaccountrefused
          - exp_labels: {{severity: critical, broker: "k:9092", account: tailer}}
            exp_annotations:
              summary: k:9092 refuses the account tailer
              runbook_url: docs/alerts.md#schemalessaccountrefused
  - name: one of two tailers is dead, the cleaner's address is unknown since it was stopped, and the rest runs
    interval: 15s
    input_series:
      - {{series: 'up{{job="schemaless-api", instance="api"}}', values: '1x40'}}
      - {{series: 'up{{job="schemaless-tailer", instance="one"}}', values: '1x40'}}
      - {{series: 'up{{job="schemaless-tailer", instance="two"}}', values: '0x40'}}
      - {{series: 'up{{job="schemaless-cleaner", instance="old"}}', values: '1x4 stale'}}
      - {{series: 'up{{job="schemaless-indexer", instance="indexer"}}', values: '1x40'}}
      - {{series: 'up{{job="schemaless-consumers", instance="census"}}', values: '1x40'}}
    promql_expr_test:
      - expr: sum by (alertname, job, instance) (ALERTS{{alertstate="firing"}})
        eval_time: 5m
        exp_samples:
          - labels: '{{alertname="SchemalessProcessDown", job="schemaless-tailer", instance="two"}}'
            value: 1
          - labels: '{{alertname="SchemalessServiceGone", job="schemaless-cleaner"}}'
            value: 1
"""


def test_what_the_rules_name_is_an_alert_and_nothing_else(tmp_path):
    """Partitions that nobody has, faults of indexes, failing cells, services without a process; where promtool is."""
    promtool = shutil.which("promtool")
    if promtool is None:
        return
    tests = tmp_path / "tests.yml"
    tests.write_text(RULE_TESTS.format(rules=PROMETHEUS / "alerts.yml"))
    done = subprocess.run([promtool, "test", "rules", str(tests)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


MANIFESTS = list(yaml.safe_load_all((ROOT / "deploy" / "kubernetes" / "schemaless.yaml").read_text()))
DEPLOYMENTS = {one["metadata"]["name"]: one["spec"] for one in MANIFESTS if one["kind"] == "Deployment"}


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_a_deployment_selects_its_pods_and_names_settings_that_exist(name):
    """What the services would refuse, beside the schema of Kubernetes. No right is to spare."""
    spec = DEPLOYMENTS[name]
    pod = spec["template"]
    assert spec["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    (container,) = pod["spec"]["containers"]
    (copying,) = pod["spec"]["initContainers"]  # the services take no secret that another user owns
    mounted = {mount["name"] for one in (container, copying) for mount in one["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["spec"]["volumes"]}
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    cut_off_s = {"schemaless-tailer": 35, "schemaless-api": 25}.get(name, 20)  # by itself, if its end hangs
    assert pod["spec"]["terminationGracePeriodSeconds"] > cut_off_s
    asked = container["livenessProbe"]["httpGet"]
    assert (asked["path"], asked["port"]) == ("/healthz", container["ports"][0]["name"])
    kinds = [kind for kind in vars(config).values() if isinstance(kind, type) and issubclass(kind, config.Settings)]
    known = {config.variable_of(kind, field) for kind in kinds for field in kind.model_fields}
    named = [entry["name"] for entry in container["env"] if entry["name"].startswith("SCHEMALESS_")]
    assert set(named) <= known
    assert {"SCHEMALESS_TOPOLOGY", "SCHEMALESS_KAFKA"} <= set(named)


KUBERNETES = ("1.31", "1.34", "1.37")


@pytest.mark.parametrize("version", KUBERNETES)
def test_the_schemas_of_kubernetes_take_each_manifest(version):
    """Strictly: a name that isn't in the schema is refused, such as one that is misspelt."""
    for manifest in MANIFESTS:
        kubernetes_validate.validate(manifest, version, strict=True)
    misspelt = copy.deepcopy(next(one for one in MANIFESTS if one["kind"] == "Deployment"))
    misspelt["spec"]["template"]["spec"]["terminationGracePeriodSecond"] = 35
    with pytest.raises(kubernetes_validate.ValidationError, match="terminationGracePeriodSecond"):
        kubernetes_validate.validate(misspelt, version, strict=True)


def test_kubernetes_runs_every_service():
    commands = {name: spec["template"]["spec"]["containers"][0]["command"][2] for name, spec in DEPLOYMENTS.items()}
    assert sorted(commands.values()) == ["api", "cleaner", "consumers", "indexer", "tailer"]
    service = next(one["spec"] for one in MANIFESTS if one["kind"] == "Service")
    assert service["selector"].items() <= DEPLOYMENTS["schemaless-api"]["template"]["metadata"]["labels"].items()
