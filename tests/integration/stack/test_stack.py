"""The embedded stack on real servers: started, harmed, stopped, started again. A sleeper stands for the services. Its
Kafka has accounts.
"""

import itertools
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pymysql
import pytest
from confluent_kafka.admin import AdminClient

from schemaless.bus import kafka_accounts, warm_up
from schemaless.bus.client import client_settings
from schemaless.bus.kafka_accounts import KafkaUser
from schemaless.cli.stack import up
from schemaless.config import StackSettings
from schemaless.errors import AccountRefused, BusRefuses, NotFound
from schemaless.ops.datastores import create_datastore
from schemaless.runtime.kafka_access import KafkaAccess, KafkaAccount, KafkaAddress, read_account
from schemaless.stack import embedded, kafka_broker, supervision
from schemaless.stack.admin import READER_USER, SERVICE_USER, Accounts, session
from schemaless.stack.endpoints import _kafka_account, present_masters, refresh_endpoints
from schemaless.stack.local import LocalServer, running_topology
from schemaless.stack.mysql_server import MySQLServer
from schemaless.stack.plan import (
    PortInUse,
    StackPlan,
    UnknownFormat,
    load_or_make_plan,
    require_plan,
    write_private_json,
)
from schemaless.stack.programs import Flavour
from schemaless.stack.supervision import ProcessRole, ProcessState, SupervisedProgram, service_programs
from schemaless.topology import load_topology
from tests.waiting import LIMIT_S, until

pytestmark = [pytest.mark.storage, pytest.mark.timeout(180)]


def sleeping_services(plan: StackPlan) -> list[SupervisedProgram]:
    """A controller, without which no server takes a write, and a tailer that does nothing."""
    return [
        *(program for program in service_programs(plan) if program.role is ProcessRole.CONTROLLER),
        SupervisedProgram(
            "tailer-0",
            ProcessRole.TAILER,
            [sys.executable, "-c", "import time; time.sleep(9999)"],
            "/",
            {"SCHEMALESS_METRICS_PORT": str(plan.ports["tailer-0-metrics"])},
        ),
    ]


def start(settings: StackSettings, said: list[str] | None = None) -> dict[str, Any]:
    lines = said if said is not None else []
    return embedded.up(settings, say=lines.append, services=sleeping_services)


UP = (
    "import sys; from pathlib import Path; from schemaless.config import StackSettings; "
    "from schemaless.stack import embedded; from tests.integration.stack.test_stack import sleeping_services; "
    "settings = StackSettings(home=Path(sys.argv[1]), kafka_accounts=True); "
    "embedded.up(settings, say=print, services=sleeping_services)"
)


@pytest.fixture(scope="module")
def first_starts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[StackSettings, list[str]]]:
    """A stack that two processes started at once, over what a killed first start had made by half; what they said."""
    home = tmp_path_factory.mktemp("stack") / "my home"
    for half_made in ("mysql/.template.new", "mysql/a1/data.new", "kafka/data.new"):
        (home / half_made).mkdir(parents=True)
    made = StackSettings(home=home, warm_up_s=0)
    argv = [sys.executable, "-X", "faulthandler", "-c", UP, str(home)]  # one that crashes says where
    starts = [subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) for _ in "ab"]
    try:
        said = [process.communicate(timeout=2 * LIMIT_S)[0] for process in starts]
        assert [process.returncode for process in starts] == [0, 0]
        yield made, said
    finally:
        for process in starts:
            process.kill()
        embedded.down(made)
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(scope="module")
def settings(first_starts: tuple[StackSettings, list[str]]) -> StackSettings:
    """A stack that is up. A test that stops it starts it again."""
    return first_starts[0]


def endpoints(settings: StackSettings) -> dict[str, Any]:
    return json.loads((settings.home / "endpoints.json").read_bytes())


def pid_of(settings: StackSettings, name: str) -> int | None:
    return next(entry["pid"] for entry in endpoints(settings)["processes"] if entry["name"] == name)


def query(node: dict[str, Any], statement: str) -> Any:
    """As somebody outside: with what endpoints.json says, over TCP."""
    connection = pymysql.connect(
        host=node["host"], port=node["port"], user=node["user"], password=node["password"], autocommit=True
    )
    with connection, connection.cursor() as cursor:
        cursor.execute(statement)
        return cursor.fetchall()


def test_only_a_first_start_warms_the_broker(first_starts: tuple[StackSettings, list[str]]) -> None:
    """Of two starts at once one warms it, and a start of a running stack doesn't. The topic for it is gone."""
    settings, said = first_starts
    assert sorted(text.count("warming the broker") for text in said) == [0, 1]
    assert "stays cold" not in "".join(said)
    repeated: list[str] = []
    start(settings.model_copy(update={"warm_up_s": 4.0}), repeated)
    assert repeated == []
    admin = AdminClient(client_settings(require_plan(settings.home).broker().bootstrap))
    until(lambda: warm_up.TOPIC not in admin.list_topics(timeout=10).topics)


def test_endpoints_tell_where_everything_is(settings: StackSettings) -> None:
    found = endpoints(settings)
    assert stat.S_IMODE((settings.home / "endpoints.json").stat().st_mode) == 0o600
    assert [len(cluster["minions"]) for cluster in found["clusters"].values()] == [2, 2]
    assert found["datastores"]["mezzanine"] == {"shards": 64, "topic": "schemaless.mezzanine.cells", "partitions": 8}
    assert {entry["role"] for entry in found["processes"]} == {"mysql", "kafka", "tailer", "controller"}
    targets = json.loads((settings.home / "scrape-targets.json").read_bytes())
    measured = {entry["name"]: entry["metrics"] for entry in found["processes"] if entry["metrics"]}
    assert [target["labels"] for target in targets] == [
        {"job": f"schemaless-{name}", "process": f"{name}-0"} for name in ("controller", "tailer")
    ]
    assert measured == {target["labels"]["process"]: f"http://{target['targets'][0]}/metrics" for target in targets}
    for entry in found["processes"]:
        os.kill(entry["pid"], 0)
        assert Path(entry["log"]).exists()


def test_reader_may_read_everything_and_write_nothing(settings: StackSettings) -> None:
    node = endpoints(settings)["clusters"]["a"]["master"]
    assert query(node, "SELECT shards FROM schemaless.datastore WHERE name = 'mezzanine'") == ((64,),)
    with pytest.raises(pymysql.MySQLError, match="denied"):
        query(node, "DELETE FROM schemaless.datastore")


def test_a_folder_of_before_there_were_administrators_is_refused(tmp_path: Path) -> None:
    """Its servers have one account that may do everything, and no other one can be made with what it knows."""
    (tmp_path / "stack.json").write_text('{"format": 1}')
    with pytest.raises(UnknownFormat, match="this program knows version 4"):
        start(StackSettings(home=tmp_path))


def test_killed_process_comes_back_under_a_new_pid(settings: StackSettings) -> None:
    """A service and a server: supervised alike."""
    for name in ("tailer-0", "a2"):
        old = pid_of(settings, name)
        assert old is not None
        os.kill(old, signal.SIGKILL)
        until(lambda name=name, old=old: pid_of(settings, name) not in (None, old))


def test_minion_replicates_again_after_a_kill(settings: StackSettings) -> None:
    plan = require_plan(settings.home)
    minion = next(server for server in plan.servers() if server.name == "b3")
    old = pid_of(settings, minion.name)
    assert old is not None
    os.kill(old, signal.SIGKILL)
    until(lambda: pid_of(settings, minion.name) not in (None, old))

    def healthy() -> bool:
        try:
            with session(minion.administrator(plan.accounts)) as connected:
                status = connected.replication()
        except Exception:
            return False
        return status is not None and status.healthy

    until(healthy)


def test_minion_killed_between_a_ddl_and_its_position_goes_on(tmp_path: Path) -> None:
    """MariaDB commits them one after the other; the gap is made by hand. MySQL has no gap, and must go on as well."""
    flavour = Flavour(StackSettings().mysql_flavour or Flavour.MARIADB)
    with running_topology(tmp_path, clusters=("a",), flavour=flavour) as running:
        master, minion = (running.descriptions[name] for name in ("a1", "a2"))
        with session(master.administrator(running.accounts)) as connected:
            for number in range(3):
                connected.query(f"CREATE DATABASE made_{number}")
        until(lambda: "made_2" in databases(minion, running.accounts))
        if flavour is Flavour.MARIADB:
            with session(minion.administrator(running.accounts)) as connected:
                connected.query("STOP SLAVE")
                connected.query("SET GLOBAL gtid_slave_pos = '1-100-1'")
        running.servers[minion.name].kill()
        running.servers[minion.name].start()
        with session(master.administrator(running.accounts)) as connected:
            connected.query("CREATE DATABASE made_later")
        until(lambda: "made_later" in databases(minion, running.accounts))


def databases(server: MySQLServer, accounts: Accounts) -> set[str]:
    with session(server.administrator(accounts)) as connected:
        return {row["Database"] for row in connected.query("SHOW DATABASES")}


def test_process_held_down_stays_down_until_it_may_run(settings: StackSettings) -> None:
    supervision.stop(settings.home, "tailer-0")
    until(lambda: pid_of(settings, "tailer-0") is None)
    start(settings)  # a second `up` leaves it alone
    assert pid_of(settings, "tailer-0") is None
    supervision.start(settings.home, "tailer-0")
    until(lambda: pid_of(settings, "tailer-0") is not None)


def test_a_process_that_runs_again_prints_where_everything_is(
    settings: StackSettings, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`up NAME --json`, as `up --json` does."""
    monkeypatch.setenv("SCHEMALESS_HOME", str(settings.home))
    up("tailer-0", as_json=True)
    assert json.loads(capsys.readouterr().out)["api"] == require_plan(settings.home).api_urls()


def test_unknown_process_is_refused(settings: StackSettings) -> None:
    with pytest.raises(NotFound, match="nosuch"):
        supervision.stop(settings.home, "nosuch")


def test_added_program_is_supervised_until_it_is_removed(settings: StackSettings) -> None:
    supervision.add_program(settings.home, "extra-0", ProcessRole.CONSUMERS, ["sleep", "9999"], {"A": 'b % "c"'})
    until(lambda: "extra-0" in {entry["name"] for entry in endpoints(settings)["processes"]})
    pid = next(process.pid for process in supervision.processes(settings.home) if process.name == "extra-0")
    environment = Path(f"/proc/{pid}/environ")  # the supervisor's own until the program has taken its place
    until(lambda: b'A=b % "c"\0' in environment.read_bytes())
    supervision.remove_program(settings.home, "extra-0")
    assert "extra-0" not in {process.name for process in supervision.processes(settings.home)}


def test_a_program_that_can_not_start_is_tried_again_with_growing_pauses(settings: StackSettings) -> None:
    """Also where it takes longer to fail than supervisord's usual second."""
    home, starts = settings.home, settings.home / "starts"
    code = f"import time; print(time.time(), file=open({str(starts)!r}, 'a')); time.sleep(1.2); exit(1)"
    supervision.add_program(home, "broken-0", ProcessRole.CONSUMERS, [sys.executable, "-c", code], {})
    try:
        until(lambda: starts.exists() and len(starts.read_text().split()) >= 3)
    finally:
        supervision.remove_program(home, "broken-0")
    first, second, third = map(float, starts.read_text().split()[:3])
    assert second - first > 1.9
    assert third - second > 2.9


def test_new_datastore_is_told_soon(settings: StackSettings) -> None:
    plan = require_plan(settings.home)
    topology, administrators = map(load_topology, (plan.topology_file, plan.admin_topology_file))
    bootstrap = plan.broker().bootstrap
    create_datastore(topology, bootstrap, "flights", shards=2, partitions=2, administrators=administrators)
    told = {"shards": 2, "topic": "schemaless.flights.cells", "partitions": 2}
    until(lambda: endpoints(settings)["datastores"].get("flights") == told)


def test_kafka_of_a_stack_with_accounts_lets_in_who_has_one(tmp_path: Path) -> None:
    """endpoints.json has a reader's. Tailer and other services have files of their own. An administrator who is refused
    is told so at once.
    """
    plan = load_or_make_plan(StackSettings(home=tmp_path, kafka_accounts=True))
    assert require_plan(tmp_path) == plan
    embedded._prepare_kafka(plan)
    broker = plan.broker()
    broker.log.parent.mkdir()
    server = LocalServer("kafka", broker.argv(), broker.log, lambda me: kafka_broker.wait_ready(broker, alive=me.alive))
    try:
        server.start()
        account = _kafka_account(plan)["kafka_account"]
        plain = str(broker.bootstrap)
        assert not kafka_broker.answers(plain)
        assert kafka_broker.answers(KafkaAddress(plain, KafkaAccess(KafkaAccount(**account))))
        tailer, cleaner = (
            dict(next(program.env for program in service_programs(plan) if program.name == name))
            for name in ("tailer-0", "cleaner-0")
        )
        assert tailer["SCHEMALESS_KAFKA_ACCOUNT"] != cleaner["SCHEMALESS_KAFKA_ACCOUNT"]
        assert read_account(Path(tailer["SCHEMALESS_KAFKA_ACCOUNT"])).user == "tailer"
        kafka_accounts.let_in(broker.bootstrap, KafkaAccount(KafkaUser.ADMIN, "rotated"))
        refused = until(lambda: refusal(plan))  # Kafka takes up a password a moment after it answered
        assert "account 'admin'" in str(refused)
        assert str(tmp_path / "stack.json") in refused.hint
    finally:
        server.kill()


def refusal(plan: StackPlan) -> BusRefuses | None:
    try:
        embedded._await_kafka(plan)
    except BusRefuses as error:
        return error
    return None


def in_stack_file(home: Path, accounts: str, **passwords: str) -> None:
    """Writes passwords where an operator does for the accounts that have no file of their own."""
    document = json.loads((home / "stack.json").read_bytes())
    document[accounts] |= passwords
    write_private_json(home / "stack.json", document)


def test_second_start_changes_nothing(settings: StackSettings) -> None:
    before = refresh_endpoints(settings.home)
    said: list[str] = []
    assert start(settings, said) == before
    assert said == []


def test_a_rotated_password_is_left_alone_and_one_that_is_refused_is_named(settings: StackSettings) -> None:
    """Of services and of administrators. `up` made the first ones, and a file that names another one is somebody's."""
    plan = require_plan(settings.home)
    files = (plan.topology_file, plan.admin_topology_file)
    before = [file.read_text() for file in files]
    masters = [server for server in plan.servers() if server.name in present_masters(load_topology(files[0]))]

    def rotate(user: str, password: str) -> None:
        for server in masters:
            with session(server.administrator(plan.accounts)) as connected:
                connected.query(f"ALTER USER '{user}'@'%' IDENTIFIED BY '{password}'")

    def name_in_files(*passwords: str) -> None:
        for file, text, password in zip(files, before, passwords, strict=True):
            document = json.loads(text)
            for entry in itertools.chain(*document["clusters"].values()):
                entry["password"] = password
            write_private_json(file, document)

    made = (plan.accounts.service_password, plan.accounts.admin_password)
    try:
        rotate(SERVICE_USER, "rotated")
        name_in_files("rotated", made[1])
        kept = [file.read_text() for file in files]
        start(settings)
        assert [file.read_text() for file in files] == kept
        name_in_files("rotated", "wrong")
        with pytest.raises(AccountRefused, match="refuses the account 'admin'") as refused:
            start(settings)
        assert str(files[1]) in refused.value.hint
        name_in_files("wrong", made[1])
        with pytest.raises(AccountRefused, match="refuses the account 'schemaless'"):
            start(settings)
    finally:
        rotate(SERVICE_USER, made[0])
        for file, text in zip(files, before, strict=True):
            file.write_text(text)
    start(settings)
    assert [file.read_text() for file in files] == before


def test_rotated_accounts_of_kafka_and_of_readers_stay(settings: StackSettings) -> None:
    """Those of services are in files. endpoints.json gets the readers' from stack.json."""
    plan = require_plan(settings.home)
    file, bootstrap = plan.kafka_account_file(KafkaUser.TAILER), plan.broker().bootstrap
    rotated = KafkaAccount(KafkaUser.TAILER, "rotated")
    for user in (KafkaUser.TAILER, KafkaUser.READER):
        kafka_accounts.let_in(bootstrap, KafkaAccount(user, "rotated"))
    kafka_accounts.write_account(file, rotated)
    for server in plan.servers():
        if server.name in present_masters(load_topology(plan.topology_file)):
            with session(plan.administrator(server)) as connected:
                connected.query(f"ALTER USER '{READER_USER}'@'%' IDENTIFIED BY 'rotated'")
    in_stack_file(settings.home, "accounts", reader_password="rotated")
    in_stack_file(settings.home, "kafka_accounts", reader="rotated")
    found = start(settings)
    assert read_account(file).password == "rotated"
    assert query(found["clusters"]["a"]["master"], "SELECT 1") == ((1,),)
    reader = KafkaAddress(found["kafka"], KafkaAccess(KafkaAccount(**found["kafka_account"])))
    until(lambda: kafka_broker.answers(reader))


def test_data_survive_down_and_up(settings: StackSettings) -> None:
    """Also: the ports stay, a port that somebody took meanwhile is named, and Kafka's administrator has the password
    that it got before.
    """
    before = endpoints(settings)
    kafka_accounts.let_in(require_plan(settings.home).broker().bootstrap, KafkaAccount(KafkaUser.ADMIN, "rotated"))
    embedded.down(settings)
    in_stack_file(settings.home, "kafka_accounts", admin="rotated")
    assert not (settings.home / "endpoints.json").exists()
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", before["clusters"]["a"]["master"]["port"]))
        other.listen()
        with pytest.raises(PortInUse, match=r"port \d+ \(a1\) is in use"):
            start(settings)
    after = start(settings)
    assert after["datastores"] == before["datastores"]
    assert after["kafka"] == before["kafka"]
    assert query(
        after["clusters"]["b"]["minions"][1], "SELECT shards FROM schemaless.datastore WHERE name = 'mezzanine'"
    ) == ((64,),)


def test_stack_is_found_again_after_its_supervisor_was_killed(settings: StackSettings) -> None:
    """No process outlives the supervisor, so the next start finds ports and data folders free."""
    os.kill(int((settings.home / "run" / "supervisor.pid").read_text()), signal.SIGKILL)
    start(settings)
    states = {process.state for process in supervision.processes(settings.home)}
    assert states == {ProcessState.RUNNING}


def test_of_two_first_starts_one_waits_for_the_other(first_starts: tuple[StackSettings, list[str]]) -> None:
    """And one that was killed half-way is finished by the next, though a data folder was half-made."""
    _, said = first_starts
    assert sum("waiting for another command" in output for output in said) == 1


def test_folder_of_an_unknown_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "stack.json").write_text('{"format": 99}')
    with pytest.raises(UnknownFormat, match="format version 99"):
        start(StackSettings(home=tmp_path))
