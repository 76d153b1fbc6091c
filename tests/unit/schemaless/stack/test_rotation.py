"""A password that somebody rotates stays rotated, whatever makes or starts servers. No server is started."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from schemaless.bus import kafka_accounts
from schemaless.bus.kafka_accounts import KafkaUser
from schemaless.config import StackSettings
from schemaless.runtime.kafka_access import KafkaAccount, read_account
from schemaless.stack import embedded, growth, kafka_broker, mysql_server
from schemaless.stack.admin import Accounts
from schemaless.stack.mysql_server import MySQLServer, PlannedServer
from schemaless.stack.plan import StackPlan, keep_servers, load_or_make_plan, require_plan, write_private_json
from schemaless.stack.programs import Flavour
from schemaless.topology import load_topology

ROTATED = Accounts("new-admin", "new-service", "new-reader", "new-replication")


@pytest.fixture
def plan(tmp_path: Path) -> StackPlan:
    """A stack whose servers and Kafka were made, with accounts in both."""
    made = load_or_make_plan(StackSettings(home=tmp_path, usual_ports=False, kafka_accounts=True))
    made.write_topology(made.servers())
    made.write_admin_topology(made.servers())
    for folder in (made.broker().data, *(server.data for server in made.servers())):
        folder.mkdir(parents=True)
    return made


@pytest.fixture
def made_with(monkeypatch: pytest.MonkeyPatch) -> dict[str, Accounts]:
    """The accounts of servers that are made, by name."""
    found: dict[str, Accounts] = {}
    template: list[Accounts] = []

    def prepare(server: MySQLServer, _template: Path) -> None:
        if not server.data.is_dir():
            server.data.mkdir(parents=True)
            found[server.name] = template[-1]

    def make_template(folder: Path, _flavour: Flavour, accounts: Accounts) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        template.append(accounts)

    monkeypatch.setattr(mysql_server, "make_template", make_template)
    monkeypatch.setattr(mysql_server, "prepare", prepare)
    monkeypatch.setattr(kafka_broker, "prepare", lambda _: None)
    return found


def rotate(plan: StackPlan, cluster: str, accounts: Accounts) -> None:
    """Writes the passwords where an operator does."""
    files = (plan.topology_file, accounts.service_password), (plan.admin_topology_file, accounts.admin_password)
    for file, password in files:
        document = json.loads(file.read_bytes())
        for entry in document["clusters"][cluster]:
            entry["password"] = password
        if "replication" in document:
            document["replication"]["password"] = accounts.replication_password
        write_private_json(file, document)


def in_stack_file(plan: StackPlan, change: Callable[[dict[str, dict[str, str]]], None]) -> None:
    file = plan.home / "stack.json"
    document = json.loads(file.read_bytes())
    change(document)
    write_private_json(file, document)


def test_servers_of_a_new_cluster_get_the_present_passwords(plan: StackPlan, made_with: dict[str, Accounts]) -> None:
    """Also where the command is repeated after another rotation: no file names the cluster yet."""
    rotate(plan, "a", ROTATED)
    in_stack_file(plan, lambda document: document["accounts"].update(reader_password="new-reader"))
    grown = growth._made(require_plan(plan.home), [PlannedServer("c1", "c", None, 9, 3)])
    assert made_with == {"c1": ROTATED}
    rotate(plan, "a", Accounts("later", "later", "later", "later"))
    again = require_plan(plan.home)
    assert again.planned == grown.planned
    (added,) = [server for server in again.servers() if server.name == "c1"]
    assert (again.node(added).password, again.administrator(added).password) == ("new-service", "new-admin")


def test_a_server_that_lost_its_data_gets_the_present_passwords_of_its_cluster(
    plan: StackPlan, made_with: dict[str, Accounts]
) -> None:
    rotate(plan, "b", ROTATED)
    for server in plan.servers():
        if server.name in ("a2", "b1", "b3"):
            server.data.rmdir()
    embedded._prepare(plan, [], print)
    reader = plan.accounts.reader_password
    of_b = Accounts("new-admin", "new-service", reader, "new-replication")
    of_a = Accounts(plan.accounts.admin_password, plan.accounts.service_password, reader, "new-replication")
    assert made_with == {"a2": of_a, "b1": of_b, "b3": of_b}


def test_a_password_that_is_rotated_while_processes_learn_of_a_server_stays(
    plan: StackPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The services' file is written before that wait, and the administrators' after it."""
    grown = plan.with_servers([*plan.planned, PlannedServer("a4", "a", None, 9, 1)])
    monkeypatch.setattr(time, "sleep", lambda _: rotate(plan, "a", ROTATED))
    growth._join(grown, grown.planned[-1:])
    services, administrators = map(load_topology, (plan.topology_file, plan.admin_topology_file))
    assert {node.password for node in services.clusters["a"].nodes} == {"new-service"}
    assert {node.password for node in administrators.clusters["a"].nodes} == {"new-admin"}
    assert len(administrators.clusters["a"].nodes) == 4
    assert administrators.replication is not None
    assert administrators.replication.password == "new-replication"


def test_a_file_that_has_all_servers_is_not_written_again(plan: StackPlan) -> None:
    """Whoever replaces it in that moment would lose what they wrote."""
    files = (plan.topology_file, plan.admin_topology_file)
    before = [file.stat().st_ino for file in files]
    plan.write_topology(plan.servers())
    plan.write_admin_topology(plan.servers())
    assert [file.stat().st_ino for file in files] == before


def test_a_password_that_is_written_into_stack_json_while_servers_change_stays(plan: StackPlan) -> None:
    """There are the accounts that have no file of their own."""
    grown = plan.with_servers([*plan.planned, PlannedServer("c1", "c", None, 9, 3)])
    in_stack_file(plan, lambda document: document["accounts"].update(reader_password="new-reader"))
    in_stack_file(plan, lambda document: document["kafka_accounts"].update(admin="new-admin"))
    keep_servers(grown)
    kept = require_plan(plan.home)
    assert (kept.planned[-1].name, kept.ports) == ("c1", grown.ports)
    assert kept.accounts.reader_password == "new-reader"
    assert kept.kafka_accounts is not None
    assert kept.kafka_accounts.passwords["admin"] == "new-admin"


@pytest.mark.usefixtures("made_with")
def test_the_files_of_kafkas_accounts_stay_as_long_as_its_data(plan: StackPlan) -> None:
    """A broker that is made anew knows the accounts of stack.json only. The controller reads a file before Kafka runs,
    so a first start makes them before it starts anything.
    """
    file = plan.kafka_account_file(KafkaUser.TAILER)
    assert plan.kafka_accounts is not None
    own = plan.kafka_accounts.account(KafkaUser.TAILER)
    rotated = KafkaAccount("tailer", "rotated")
    embedded._prepare(plan, [], print)
    assert read_account(file) == own
    kafka_accounts.write_account(file, rotated)
    embedded._prepare(plan, [], print)
    assert read_account(file) == rotated
    plan.broker().data.rmdir()
    embedded._prepare(plan, [], print)
    assert read_account(file) == own
