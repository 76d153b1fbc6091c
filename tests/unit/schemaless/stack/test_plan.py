"""What a stack decides once and keeps, and what it writes for its supervisor and servers. No process is started."""

import configparser
import json
import shlex
import shutil
import socket
import stat
import subprocess
from pathlib import Path

import pytest

from schemaless.config import StackSettings
from schemaless.errors import Misconfigured
from schemaless.stack import embedded, supervision
from schemaless.stack.admin import SERVICE_USER, Accounts, account_statements, new_accounts
from schemaless.stack.containers import with_added
from schemaless.stack.mysql_server import (
    SOCKET_PATH_BYTES_MAX,
    PlannedServer,
    planned_servers,
    render_options,
    socket_folder,
)
from schemaless.stack.plan import (
    USUAL_PORTS,
    PortInUse,
    UnknownFormat,
    admin_document,
    free_ports,
    is_free,
    keep_plan,
    load_or_make_plan,
    load_plan,
    require_free,
    require_plan,
    topology_document,
    verify_paths,
    write_private_json,
)
from schemaless.stack.programs import Flavour, MySQLProgram
from schemaless.stack.supervision import ProcessRole, SupervisedProgram, forget_program, load_programs, save_program
from schemaless.topology import Role, parse_topology


def settings(home: Path, **more: object) -> StackSettings:
    return StackSettings(home=home, **more)


def test_plan_is_kept(tmp_path: Path) -> None:
    """Ports, flavour and passwords are the same at every later start."""
    made = load_or_make_plan(settings(tmp_path))
    assert load_or_make_plan(settings(tmp_path)) == made
    assert stat.S_IMODE((tmp_path / "stack.json").stat().st_mode) == 0o600
    assert len(set(made.ports.values())) == len(made.ports) == 15


def test_accounts_stay_as_the_files_name_them(tmp_path: Path) -> None:
    """Somebody rotated them. A server that comes to a cluster is a copy of others. One of a new cluster is none."""
    plan = load_or_make_plan(settings(tmp_path))
    files = (plan.topology_file, plan.admin_topology_file)

    def written():
        plan.write_topology(plan.servers())
        plan.write_admin_topology(plan.servers())
        return [json.loads(file.read_bytes()) for file in files]

    services, administrators = written()
    assert services == topology_document(plan.servers(), plan.accounts)
    assert administrators == admin_document(services, plan.accounts)
    for entry in services["clusters"]["a"]:
        entry |= {"user": "own", "password": "new"}
    for entry in administrators["clusters"]["b"]:
        entry |= {"password": "newer"}
    administrators["replication"]["password"] = "newest"
    write_private_json(plan.topology_file, services)
    write_private_json(plan.admin_topology_file, administrators)
    assert written() == [services, administrators]
    grown = plan.with_servers(
        [*plan.planned, PlannedServer("a4", "a", None, 9, 1), PlannedServer("c1", "c", None, 8, 3)]
    )
    added = {server.name: grown.node(server) for server in grown.servers()}
    assert (added["a4"].user, added["a4"].password) == ("own", "new")
    assert (added["c1"].user, added["c1"].password) == (SERVICE_USER, plan.accounts.service_password)


def test_told_ports_are_taken(tmp_path: Path) -> None:
    made = load_or_make_plan(settings(tmp_path, first_port=31000))
    assert sorted(made.ports.values()) == list(range(31000, 31015))


def test_other_flavour_than_the_data_is_refused(tmp_path: Path) -> None:
    load_or_make_plan(settings(tmp_path, mysql_flavour="mariadb"))
    with pytest.raises(Misconfigured, match="mariadb's"):
        load_or_make_plan(settings(tmp_path, mysql_flavour="mysql"))


def test_unknown_format_and_damage_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "stack.json"
    path.write_text('{"format": 2}')
    with pytest.raises(UnknownFormat, match="format version 2"):
        load_plan(tmp_path)
    path.write_text('{"format": 3, "flavour"')
    with pytest.raises(Misconfigured, match="damaged"):
        load_plan(tmp_path)


def test_no_secret_is_in_a_repr(tmp_path: Path) -> None:
    plan = load_or_make_plan(settings(tmp_path))
    assert plan.accounts.service_password not in repr(plan)
    assert all(
        plan.accounts.service_password not in repr(server.administrator(plan.accounts)) for server in plan.servers()
    )


def test_topology_names_every_server(tmp_path: Path) -> None:
    plan = load_or_make_plan(settings(tmp_path))
    topology = parse_topology(topology_document(plan.servers(), plan.accounts))
    assert [node.name for node in topology.cluster("b").nodes] == ["b1", "b2", "b3"]


def test_server_ids_are_unique() -> None:
    roles = planned_servers(("a", "b", "c"), 5)
    assert len({role.server_id for role in roles}) == len(roles) == 18


@pytest.mark.parametrize("flavour", Flavour)
def test_only_masters_are_durable_and_only_minions_refuse_writes(tmp_path: Path, flavour: Flavour) -> None:
    for server in load_or_make_plan(settings(tmp_path, mysql_flavour=flavour.value)).servers():
        options = render_options(server, MySQLProgram(flavour, ("mysqld",)))
        is_master = server.role is Role.MASTER
        assert ("innodb-flush-log-at-trx-commit=1\nsync-binlog=1\n" in options) is is_master
        assert ("read-only=ON" in options) is not is_master


@pytest.mark.parametrize("flavour", Flavour)
def test_a_server_that_a_controller_will_open_refuses_writes_and_is_not_durable_yet(
    tmp_path: Path, flavour: Flavour
) -> None:
    """It may become anything. So all servers of a cluster have the same settings, and MySQL's don't start receiving."""
    for planned in planned_servers(("a",), 1, controlled=True):
        server = planned.server(tmp_path / planned.name, 1, tmp_path, flavour, tmp_path / "log")
        options = render_options(server, MySQLProgram(flavour, ("mysqld",)))
        assert "read-only=ON\ninnodb-flush-log-at-trx-commit=2\nsync-binlog=0\n" in options
        assert ("skip-replica-start=ON" in options) is (flavour is Flavour.MYSQL)


@pytest.mark.parametrize("flavour", Flavour)
def test_nobody_can_log_in_without_a_password(flavour: Flavour) -> None:
    statements = account_statements(flavour, new_accounts())
    assert all("IDENTIFIED BY" in statement for statement in statements if statement.startswith("CREATE USER"))
    assert any("'root'" in statement for statement in statements if statement.startswith(("DELETE", "DROP")))


@pytest.mark.parametrize("flavour", Flavour)
def test_a_password_that_somebody_chose_is_quoted(flavour: Flavour) -> None:
    statements = account_statements(flavour, Accounts("o'clock", "back\\slash", "plain", "plain"))
    assert sum("IDENTIFIED BY 'o''clock'" in statement for statement in statements) == 1
    assert sum("IDENTIFIED BY 'back\\\\slash'" in statement for statement in statements) == 1


def test_long_home_gets_short_sockets(tmp_path: Path) -> None:
    """The kernel allows 108 bytes; a checkout may lie deeper."""
    deep = tmp_path / ("d" * 100) / "run"
    assert len(str(socket_folder(deep) / "a20.sock")) <= SOCKET_PATH_BYTES_MAX
    assert stat.S_IMODE(socket_folder(deep).stat().st_mode) == 0o700
    assert socket_folder(Path("/short/run")) == Path("/short/run")


def test_taken_port_is_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(PortInUse, match=f"port {port} \\(kafka\\)"):
            require_free({"kafka": port})


def test_free_ports_differ() -> None:
    assert len(set(free_ports(20))) == 20


def test_program_survives_its_file(tmp_path: Path) -> None:
    program = SupervisedProgram("x-0", ProcessRole.CONSUMERS, ("a b", 'c"%"', "\\d"), "/", {"K": "v w"}, 5)
    save_program(tmp_path, program, log=tmp_path / "x.log")
    loaded = load_programs(tmp_path)["x-0"]
    assert (loaded.role, list(loaded.argv), loaded.env) == (ProcessRole.CONSUMERS, ["a b", 'c"%"', "\\d"], {"K": "v w"})
    forget_program(tmp_path, "x-0")
    assert load_programs(tmp_path) == {}
    assert list(tmp_path.iterdir()) == []


def test_a_service_has_longer_to_say_that_it_can_not_start(tmp_path: Path) -> None:
    """One that imports for two seconds and then fails would be started again at once, for ever."""
    for role, seconds in ((ProcessRole.CONSUMERS, "10"), (ProcessRole.MYSQL, "1")):
        save_program(tmp_path, SupervisedProgram("x-0", role, ("x",), "/"), log=tmp_path / "x.log")
        parser = configparser.RawConfigParser()
        parser.read(tmp_path / "x-0.conf")
        assert parser["program:x-0"]["startsecs"] == seconds


def test_stored_program_gets_the_settings_of_today(tmp_path: Path) -> None:
    """Its own variables stay."""
    plan = load_or_make_plan(settings(tmp_path))
    stored = SupervisedProgram("x-0", ProcessRole.CONSUMERS, ["python"], "/", {"SCHEMALESS_KAFKA": "::", "OWN": "1"})
    env = supervision.with_present_settings(stored, plan).env
    assert env.pop("SCHEMALESS_METRICS_PORT").isdigit()  # one that is free now
    assert env == supervision.service_environment(plan) | {"OWN": "1"}


def test_supervisor_reads_the_words_that_were_written(tmp_path: Path) -> None:
    """Blanks, quotes, percent signs and backslashes reach the program as they are."""
    argv = ("python", "a b", 'c"%"', "\\d", "it's")
    save_program(
        tmp_path, SupervisedProgram("x-0", ProcessRole.TAILER, argv, "/", {"K": "v % w"}), log=tmp_path / "x.log"
    )
    parser = configparser.RawConfigParser(inline_comment_prefixes=(";", "#"))  # as supervisord does
    parser.read(tmp_path / "x-0.conf")
    command = shlex.split(parser["program:x-0"]["command"] % {})
    assert command[-6:] == ["K=v % w", *argv]


@pytest.mark.parametrize("word", ["a\nb", "a ;b", "a #b"])
def test_word_that_supervisor_would_cut_is_refused(tmp_path: Path, word: str) -> None:
    with pytest.raises(Misconfigured, match="supervisord"):
        save_program(tmp_path, SupervisedProgram("x-0", ProcessRole.TAILER, (word,), "/"), log=tmp_path / "x.log")
    assert list(tmp_path.iterdir()) == []


def test_private_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_private_json(path, {"a": 1})
    write_private_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 2}
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.json"]


def test_wheel_alone_says_that_it_has_no_services(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(supervision.NoCheckout, match="not part of the installed package"):
        supervision.checkout_folder()


def test_the_first_stack_has_the_usual_ports_and_keeps_them_while_it_exists(tmp_path: Path) -> None:
    """So that every page can be pasted. Another stack of the user doesn't take them while the first one is down."""
    cache = tmp_path / "cache"
    for name in "1234":
        (tmp_path / name).mkdir()
    first, second, third = (
        load_or_make_plan(settings(tmp_path / name, cache=cache, usual_ports=True)).ports for name in ("1", "2", "3")
    )
    usual = {name: port for name, port in USUAL_PORTS.items() if is_free(port)}
    assert {name: first[name] for name in usual} == usual
    assert not set(USUAL_PORTS.values()) & {*second.values(), *third.values()}
    (tmp_path / "1" / "stack.json").unlink()
    again = load_or_make_plan(settings(tmp_path / "4", cache=cache, usual_ports=True)).ports
    assert {name: again[name] for name in usual} == usual


@pytest.mark.parametrize(
    "name", ["issue#12", "a,b", "a[1]", "50%", "größe", "back\\slash", "it's", 'a"b', "a;b", "a\nb", "a:b"]
)
def test_a_home_that_other_programs_files_can_not_hold_is_refused(tmp_path, name):
    """B3: in one sentence, and before anything is made. Some paths were cut, and folders made outside of the home."""
    home = tmp_path / name / "home"
    with pytest.raises(Misconfigured, match=r"has .* in its name"):
        embedded.up(StackSettings(home=home))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["issue#12", "größe", "a:b"])
def test_a_checkout_in_such_a_folder_is_refused_before_anything_is_installed(tmp_path, name):
    """The stack's own check comes after minutes of packages."""
    script = tmp_path / name / "deploy" / "install-venv"
    script.parent.mkdir(parents=True)
    shutil.copy(Path(__file__).parents[4] / "deploy" / "install-venv", script)
    done = subprocess.run(["bash", script], capture_output=True, text=True, check=False)
    assert (done.returncode, name in done.stderr) == (1, True)
    assert list(script.parents[1].iterdir()) == [script.parent]


def test_a_blank_in_a_path_is_no_reason(tmp_path):
    """So are the other characters of ordinary folders."""
    verify_paths(tmp_path, Path("/home/me/My Projects/v1.2_x+y@z~/a-b"))


def test_a_start_in_containers_keeps_servers_that_were_added(tmp_path):
    """The set-up writes the file at each start, and knows only the first servers. A password that was rotated is that
    of all.
    """

    def document(password, **clusters):
        account = {"user": SERVICE_USER, "password": password}
        return {
            "version": 2,
            "clusters": {name: [{"name": one, **account} for one in servers] for name, servers in clusters.items()},
        }

    file = tmp_path / "topology.json"
    first = document("rotated", a=["a1", "a2"], b=["b1"])
    assert with_added(first, file) == first
    file.write_text(json.dumps(document("old", a=["a1", "a4"], b=["b1"], c=["c1"])))
    assert with_added(first, file) == document("rotated", a=["a1", "a2", "a4"], b=["b1"], c=["c1"])


def test_a_plan_that_was_kept_has_the_servers_that_were_added(tmp_path):
    """Their numbers stay. A plan without any has those of the first start."""
    settings = StackSettings(home=tmp_path, usual_ports=False)
    plan = load_or_make_plan(settings)
    wider = plan.with_servers([*plan.planned, PlannedServer("c1", "c", None, 4711, 3)])
    keep_plan(wider)
    kept = require_plan(tmp_path)
    assert [(one.name, one.server_id) for one in kept.planned][-1] == ("c1", 4711)
    assert kept.ports["c1"] not in plan.ports.values()
    document = json.loads((tmp_path / "stack.json").read_text())
    del document["servers"]
    (tmp_path / "stack.json").write_text(json.dumps(document))
    assert [one.name for one in require_plan(tmp_path).planned] == ["a1", "a2", "a3", "b1", "b2", "b3"]
