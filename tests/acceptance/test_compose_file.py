"""docker-compose.yml, the image's files and deploy/docker, as far as they can be judged without an engine."""

import re
import shutil
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from schemaless.bus.kafka_accounts import KafkaAccounts, KafkaUser, account_file, let_in, new_kafka_accounts
from schemaless.demo.loader import BILLED_CARRIER
from schemaless.demo.programs import calls_folder
from schemaless.errors import Misconfigured
from schemaless.runtime.kafka_access import KafkaAccess, KafkaAccount, KafkaAddress, read_account
from schemaless.stack.admin import new_accounts
from schemaless.stack.container_files import settings_files
from schemaless.stack.containers import TOKEN_FILE, ServerContainer, let_into_kafka, make_mysql_accounts
from schemaless.stack.kafka_broker import answers
from schemaless.stack.local import running_kafka
from schemaless.stack.mysql_server import planned_servers
from schemaless.stack.plan import CLUSTERS, MINIONS, StackPlan, api_names, first_servers, port_names
from schemaless.stack.programs import Flavour
from schemaless.stack.supervision import service_programs

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docker-compose.yml").read_text()
COMPOSE = yaml.safe_load(TEXT)
SERVICES = COMPOSE["services"]
PLANNED = {server.name: server for server in planned_servers(CLUSTERS, MINIONS, controlled=True)}
SET_UP = {"accounts", "setup"}
RUN_ONCE = {*SET_UP, "cli"}
MEASURED = ("controller", "tailer", "indexer", "consumers", "cleaner", "flights-")
LONG_LIVED = sorted(SERVICES.keys() - RUN_ONCE)
OUR_IMAGE = "schemaless:local"
OURS = sorted(name for name in SERVICES if SERVICES[name]["image"] == OUR_IMAGE)
STACK = sorted(name for name in OURS if name not in SET_UP and "profiles" not in SERVICES[name])


def required_variables() -> set[str]:
    return set(re.findall(r"\$\{(\w+):\?", TEXT))


def environment(name: str) -> dict[str, str]:
    return SERVICES[name].get("environment", {})


def test_the_servers_are_those_of_the_embedded_stack():
    """Two clusters with two minions each, by the names and server ids that topology and set-up count on."""
    servers = {name: entry["command"] for name, entry in SERVICES.items() if entry.get("image") == "mysql:9.7"}
    assert servers == {server.name: [f"--server-id={server.server_id}"] for server in PLANNED.values()}


@pytest.mark.parametrize("name", sorted(PLANNED))
def test_a_server_has_the_settings_of_all_and_a_volume_of_its_own(name: str):
    """Any of them may be the master, and no two share data."""
    assert SERVICES[name]["volumes"] == [
        f"{name}:/var/lib/mysql",
        "./deploy/docker/mysql/server.cnf:/etc/mysql/conf.d/schemaless.cnf:ro",
    ]


@pytest.mark.parametrize(("path", "content"), settings_files().items(), ids=settings_files().keys())
def test_settings_files_are_the_embedded_stack_s(path: str, content: str):
    """No setting of a server drifts apart between the two ways to run it."""
    assert (ROOT / "deploy/docker" / path).read_text() == content


def test_servers_commit_in_order_and_wait_for_a_controller():
    """What I3 asks of a server is in its file, and no later line takes it back. Masters are made durable later."""
    options = dict(re.findall(r"^([\w-]+)=(.*)$", settings_files()["mysql/server.cnf"], re.MULTILINE))
    assert (options["replica-preserve-commit-order"], options["gtid-mode"]) == ("ON", "ON")
    assert (options["read-only"], options["skip-replica-start"]) == ("ON", "ON")


def test_the_services_are_those_of_the_embedded_stack(tmp_path: Path):
    """Every program that `schemaless up` runs has its container, with the same command line."""
    ports = dict.fromkeys(port_names(), 1)
    plan = StackPlan(tmp_path, Flavour.MYSQL, ports, new_accounts(), first_servers())
    embedded = sorted(list(program.argv)[1:] for program in service_programs(plan))
    composed = [SERVICES[name]["command"] for name in STACK]
    assert sorted(command[1:] for command in composed) == embedded
    assert {command[0] for command in composed} == {"python"}


def test_the_demo_s_programs_note_their_calls_where_the_report_looks():
    """Census, billing and charges each have the folder, and the carrier, that `schemaless demo --running` reads."""
    calls = calls_folder(Path(environment("cli")["SCHEMALESS_HOME"]))
    assert environment("flights-census")["CENSUS_DIR"] == str(calls / "census")
    assert environment("flights-billing")["BILLING_DIR"] == str(calls / "bills")
    assert environment("flights-billing")["BILLING_CARRIER"] == BILLED_CARRIER
    assert SERVICES["card-processor"]["command"][-1] == str(calls / "charges")


@pytest.mark.parametrize("name", LONG_LIVED)
def test_whatever_lives_on_is_watched_and_started_again(name: str):
    """Health check, restart policy and bounds on memory and logs."""
    service = SERVICES[name]
    assert service["healthcheck"]["test"][0] == "CMD"
    asks = " ".join(service["healthcheck"]["test"])
    assert ("ready 9100 /healthz" in asks) == any(name.startswith(kind) for kind in MEASURED)
    assert service["restart"] == "unless-stopped"
    assert service["mem_limit"]
    assert service["logging"]["options"].keys() == {"max-size", "max-file"}


def test_nothing_starts_before_what_it_needs():
    """Accounts wait for Kafka, and by themselves for MySQL, the controller for accounts, the first datastore for the
    controller, and every other service until that has succeeded.
    """
    awaited = SERVICES["accounts"]["depends_on"]
    servers = {name: {"condition": "service_started"} for name in PLANNED}
    assert awaited == servers | {"kafka": {"condition": "service_healthy"}}
    done = {"condition": "service_completed_successfully"}
    assert SERVICES["controller"]["depends_on"] == {"accounts": done}
    assert SERVICES["setup"]["depends_on"] == {"accounts": done, "controller": {"condition": "service_started"}}
    for name in set(OURS) - RUN_ONCE - {"controller"}:
        assert SERVICES[name]["depends_on"] == {"setup": done}


def test_ports_are_published_on_loopback_only():
    """Only the API and what shows metrics are published, and to this machine only."""
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert published.keys() == {*api_names(), "prometheus", "grafana"}
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)


def test_there_are_no_default_secrets():
    """Whatever is called a password comes from a variable without a default, and goes only to who needs it."""
    holders = {(name, key): value for name in SERVICES for key, value in environment(name).items() if "PASSWORD" in key}
    assert all(re.fullmatch(r"\$\{\w+:\?[^}]+\}", value) for value in holders.values())
    assert {name for name, _ in holders} == {*PLANNED, "kafka", "accounts"}
    assert "PASSWORD" not in (ROOT / "Dockerfile").read_text()
    assert set(re.findall(r'password="([^"]*)"', settings_files()["kafka/server.properties"])) == {
        "${env:SCHEMALESS_KAFKA_PASSWORD}"
    }


@pytest.mark.parametrize("name", OURS)
def test_our_containers_have_no_rights_to_spare(name: str):
    """Not root, no capabilities, nothing writable but /tmp and a program's own; only the set-up writes the topology."""
    service = SERVICES[name]
    assert service["cap_drop"] == ["ALL"]
    assert service["read_only"] is True
    assert service["volumes"][0] == "topology:/var/lib/schemaless" + ("" if name in SET_UP else ":ro")
    reads = {key: {"admin:/var/lib/admin:ro"} for key in ("setup", "controller", "cli")}
    admin = ({"accounts": {"admin:/var/lib/admin"}} | reads).get(name, set())
    assert set(service["volumes"][1:]) - {"programs:/var/lib/programs"} == admin
    users = re.findall(r"^USER (\w+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert users[-1:] == ["schemaless"]


def test_every_volume_is_declared_and_used():
    """A volume that isn't declared would be refused, one that isn't used is left over."""
    used = {volume.split(":")[0] for service in SERVICES.values() for volume in service["volumes"]}
    assert {volume for volume in used if not volume.startswith(".")} == COMPOSE["volumes"].keys()
    assert all((ROOT / volume).exists() for volume in used if volume.startswith("."))


def test_images_have_fixed_versions():
    """No image is whatever is newest today, in the compose file or in the Dockerfile."""
    images = [service["image"] for service in SERVICES.values()]
    images += re.findall(r"^FROM (\S+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert all(re.fullmatch(r"[\w/.-]+:[\w.-]+", image) and not image.endswith(":latest") for image in images)


def test_one_service_builds_the_image_of_all():
    """Each `build` would build and export it again. Nothing may fetch an image of that name from a registry."""
    assert [name for name in SERVICES if "build" in SERVICES[name]] == ["accounts"]
    assert {SERVICES[name]["pull_policy"] for name in OURS} == {"never"}
    waiting = [name for name in OURS if name not in RUN_ONCE]
    assert all({"setup", "accounts"} & SERVICES[name]["depends_on"].keys() for name in waiting), (
        "`up NAME --build` builds it, too"
    )


def test_an_image_holds_only_what_is_named():
    """The build sees nothing by default, so neither .env nor data folders get into an image; what it names exists."""
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    named = [line.removeprefix("!") for line in lines if line.startswith("!")]
    assert not [name for name in named if name.startswith(".")]
    assert all((ROOT / name).exists() for name in named)
    assert {"schemaless", *(SERVICES[name]["command"][2].split(".")[0] for name in OURS if name != "cli")} <= set(named)


def test_make_env_writes_every_password_once(tmp_path: Path):
    """All required variables, each different, for the owner's eyes only. Later runs only add what is missing."""
    script = tmp_path / "deploy/docker/make-env"
    script.parent.mkdir(parents=True)
    shutil.copy(ROOT / "deploy/docker/make-env", script)
    subprocess.run([script], check=True, capture_output=True)
    path = tmp_path / ".env"
    written = path.read_text()
    variables = dict(line.split("=") for line in written.splitlines())
    assert variables.keys() == required_variables()
    assert len(set(variables.values())) == len(variables)
    assert all(re.fullmatch(r"[0-9a-f]{32}", value) for value in variables.values())
    assert path.stat().st_mode & 0o777 == 0o600
    subprocess.run([script], check=True, capture_output=True)
    assert path.read_text() == written
    earlier = "".join(f"{line}\n" for line in written.splitlines() if "KAFKA" not in line) + "MINE=1\n"
    path.write_text(earlier)
    subprocess.run([script], check=True, capture_output=True)
    added = path.read_text().removeprefix(earlier)
    assert re.fullmatch(r"SCHEMALESS_KAFKA_PASSWORD=[0-9a-f]{32}\n", added)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".env", "deploy"]


@pytest.mark.storage
def test_the_broker_s_health_check_knows_a_broker(kafka: str):
    """It succeeds at a broker that answers and fails where nothing listens."""
    script = ROOT / "deploy/docker/kafka/health"
    port = kafka.rsplit(":", 1)[1]
    assert subprocess.run(["bash", script, port], timeout=10, check=False).returncode == 0
    nobody = subprocess.run(["bash", script, "1"], timeout=10, check=False, capture_output=True)
    assert nobody.returncode != 0


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_a_health_check_goes_by_the_status(status: int, code: int):
    """200 from the path is healthy, 503 isn't."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        script = [ROOT / "deploy/docker/ready", str(listener.getsockname()[1]), "/readyz"]
        with subprocess.Popen(script) as process:
            caller, _ = listener.accept()
            with caller:
                assert caller.recv(1000).startswith(b"GET /readyz HTTP/1.0\r\n")
                caller.sendall(b"HTTP/1.1 %d Whatever\r\n\r\n" % status)
            assert process.wait(10) == code


def test_a_service_without_connections_is_not_healthy():
    """The check wants a connection to every port that it is told, and a listener is none."""
    script = ROOT / "deploy/docker/connected"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        command = [script, str(port)]
        assert subprocess.run(command, check=False, capture_output=True).returncode == 1
        with socket.create_connection(("127.0.0.1", port)):
            assert subprocess.run(command, check=False).returncode == 0
            assert subprocess.run([*command, "1"], check=False, capture_output=True).returncode == 1


def test_kafka_s_clients_have_accounts_with_which_only_the_tailer_writes():
    """The broker lets in accounts only, and no service has the administrators' (I17)."""
    settings = dict(re.findall(r"^([\w.-]+)=(.*)$", settings_files()["kafka/server.properties"], re.MULTILINE))
    assert settings["listeners"] == "CLIENT://:9092,CONTROLLER://localhost:9093"
    assert settings["listener.security.protocol.map"] == "CLIENT:SASL_PLAINTEXT,CONTROLLER:SASL_PLAINTEXT"
    assert settings["allow.everyone.if.no.acl.found"] == "false"
    users = {"tailer": KafkaUser.TAILER, "controller": KafkaUser.TAILER, "cli": KafkaUser.ADMIN}
    for name in set(OURS) - SET_UP:
        user = users.get(name, KafkaUser.SERVICE)
        folder = Path("/var/lib/admin" if user is KafkaUser.ADMIN else "/var/lib/schemaless")
        assert environment(name)["SCHEMALESS_KAFKA_ACCOUNT"] == str(account_file(folder, user)), name


def test_set_up_leaves_a_server_as_it_is_that_is_away():
    """Else nothing would start the API, which is needed to promote another one. One that lets nobody in is an error."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as pool:
        pool.submit(lambda: [listener.accept()[0].close() for _ in range(3)])
        server = ServerContainer(PLANNED["a1"], "127.0.0.1", listener.getsockname()[1])
        with pytest.raises(Misconfigured, match="a1 lets neither"):
            make_mysql_accounts([server], "of root", new_accounts(), patience_s=0.1)
    assert make_mysql_accounts([server], "of root", new_accounts(), patience_s=0.1) == ["a1"]


@pytest.mark.storage
@pytest.mark.timeout(120)
def test_set_up_makes_kafka_s_accounts_and_keeps_them(tmp_path: Path):
    """Each in a file of its own. A second run leaves files as they are, and mends an account that the broker lost."""
    accounts = new_kafka_accounts()
    administrators_only = KafkaAccounts({KafkaUser.ADMIN: accounts.passwords[KafkaUser.ADMIN]})
    with running_kafka(tmp_path / "broker", administrators_only) as (kafka, _):
        let_into_kafka(kafka, tmp_path)
        files = {user: account_file(tmp_path, user) for user in KafkaUser if user is not KafkaUser.ADMIN}
        made = {user: read_account(file) for user, file in files.items()}
        assert all(answers(KafkaAddress(kafka, KafkaAccess(account))) for account in made.values())
        let_in(kafka, KafkaAccount(KafkaUser.READER, "another"))
        assert not answers(KafkaAddress(kafka, KafkaAccess(made[KafkaUser.READER])))
        let_into_kafka(kafka, tmp_path)
        assert {user: read_account(file) for user, file in files.items()} == made
        assert answers(KafkaAddress(kafka, KafkaAccess(made[KafkaUser.READER])))


def test_every_service_has_the_token_that_set_up_makes():
    """The API listens beyond loopback, where it refuses to start without a token (I17)."""
    folder = {"topology:/var/lib/schemaless", "topology:/var/lib/schemaless:ro"}
    for name in OURS:
        assert environment(name)["SCHEMALESS_TOKEN_FILE"] == f"/var/lib/schemaless/{TOKEN_FILE}", name
        assert folder & set(SERVICES[name]["volumes"]), name
    for name in api_names():
        assert name in environment(name)["SCHEMALESS_API_HOSTS"].split(",")
