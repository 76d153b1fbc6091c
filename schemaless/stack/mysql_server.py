"""MySQL and MariaDB servers on this machine: the servers of a stack, and each one's data folder, options and
command line.

Their settings are in mysql_server.py. local.py starts and stops the processes without a supervisor, supervision.py
with one. Owns the naming: a1, a2, a3 are the servers of cluster a.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from schemaless.errors import AccountRefused, Misconfigured, StorageUnavailable
from schemaless.stack.admin import ADMIN_USER, SERVICE_USER, Accounts, account_statements, session
from schemaless.stack.programs import SEE_LOG, Flavour, MySQLProgram, find_mysql, find_program
from schemaless.topology import Node, Role

INITIALISE_TIMEOUT_S = 120
READY_TIMEOUT_S = 180.0
SOCKET_PATH_BYTES_MAX = 100  # the kernel's limit is 108, and MySQL adds a suffix for its lock file


@dataclass(frozen=True, slots=True)
class MySQLServer:
    """Description of one server. `folder` holds everything of it but the socket.

    `role` is what it is when it starts. None: it starts read-only and receives nothing, and waits for a
    controller.
    """

    name: str
    cluster: str
    role: Role | None
    flavour: Flavour
    folder: Path
    port: int
    server_id: int
    socket: Path
    cluster_id: int  # MariaDB's GTID domain: one for each cluster
    log: Path

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def option_file(self) -> Path:
        return self.folder / "server.cnf"

    @property
    def init_file(self) -> Path:
        """SQL that the server runs at each start."""
        return self.folder / "start.sql"

    def argv(self) -> list[str]:
        """Returns the command line that runs the server in the foreground, with its log on stderr."""
        return [*find_mysql(self.flavour).argv, f"--defaults-file={self.option_file}"]

    def node(self, accounts: Accounts) -> Node:
        """Returns the server as the services see it."""
        password = accounts.service_password
        socket = str(self.socket)
        return Node(self.name, self.cluster, "127.0.0.1", self.port, SERVICE_USER, password, socket)

    def administrator(self, accounts: Accounts) -> Node:
        """Returns the server as administrators reach it."""
        return replace(self.node(accounts), user=ADMIN_USER, password=accounts.admin_password)


def make_template(folder: Path, flavour: Flavour, accounts: Accounts) -> None:
    """Initialises one data folder, which `prepare` copies for every server. That is faster than initialising each."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)  # of a killed command, maybe with passwords of that time
    for killed in folder.parent.glob(f"{folder.name}.*"):
        shutil.rmtree(killed, ignore_errors=True)
    own = Path(
        tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent)
    )  # what a killed command began may still run
    fresh, script = own / "data", own / "accounts.sql"
    script.touch(mode=0o600)
    script.write_text("".join(f"{statement};\n" for statement in account_statements(flavour, accounts)))
    _initialise(find_mysql(flavour), fresh, script)
    (fresh / "auto.cnf").unlink(missing_ok=True)  # MySQL's server_uuid: every copy makes its own
    fresh.rename(folder)
    shutil.rmtree(own)


def prepare(server: MySQLServer, template: Path) -> None:
    """Makes folder, data and option file. An interrupted copy has another name, and is made again."""
    server.folder.mkdir(parents=True, exist_ok=True)
    server.socket.parent.mkdir(parents=True, exist_ok=True)
    if not server.data.is_dir():
        fresh = server.folder / "data.new"
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.copytree(template, fresh)
        fresh.rename(server.data)
    if not server.init_file.exists():
        resumes = server.role is None and server.flavour is Flavour.MARIADB
        server.init_file.write_text(RESUME_MARIADB if resumes else "SELECT 1;\n")
    program = find_mysql(server.flavour)
    server.option_file.write_text(render_options(server, program))


# MariaDB commits a DDL statement and its replication position one after the other. Killed in between, a minion
# would get the statement again and stop. Its own log knows better what it has executed, so that one wins if later.
RESUME_MARIADB = (
    "BEGIN NOT ATOMIC IF CAST(SUBSTRING_INDEX(@@global.gtid_binlog_pos, '-', -1) AS UNSIGNED) > "
    "CAST(SUBSTRING_INDEX(@@global.gtid_slave_pos, '-', -1) AS UNSIGNED) "
    "THEN SET GLOBAL gtid_slave_pos = @@global.gtid_binlog_pos; END IF; END;\n"
)


def wait_ready(
    server: MySQLServer,
    administrator: Node,
    *,
    alive: Callable[[], bool] = lambda: True,
    timeout_s: float = READY_TIMEOUT_S,
) -> None:
    """Returns once the server answers a query. Raises StorageUnavailable when it has ended or is late, and
    AccountRefused.
    """
    deadline = time.monotonic() + timeout_s
    while not _answers(administrator):
        if not alive():
            raise StorageUnavailable(f"server {server.name} ended while starting. Its log: {server.log}", hint=SEE_LOG)
        if time.monotonic() > deadline:
            raise StorageUnavailable(
                f"server {server.name} does not answer after {timeout_s:.0f} s: {server.log}", hint=SEE_LOG
            )
        time.sleep(0.05)


def _answers(administrator: Node) -> bool:
    try:
        with session(administrator) as connected:
            return bool(connected.query("SELECT 1"))
    except AccountRefused as error:
        if administrator.file is not None:
            error.hint = f"write the account's present password into {administrator.file}, and run the command again"
        raise
    except StorageUnavailable:
        return False


def socket_folder(folder: Path) -> Path:
    """Returns `folder` itself, or a short private one elsewhere if a socket's path in it would be too long."""
    if len(os.fsencode(folder / "x10.sock")) <= SOCKET_PATH_BYTES_MAX:
        return folder
    digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]
    short = Path(tempfile.gettempdir()) / f"schemaless-{os.getuid()}-{digest}"
    short.mkdir(mode=0o700, exist_ok=True)
    if short.stat().st_uid != os.getuid():
        raise Misconfigured(f"{short} belongs to somebody else: choose a home folder with a shorter path")
    return short


def verify_socket(folder: Path, name: str) -> None:
    """Raises Misconfigured for a server whose name is too long for its socket's path."""
    if len(os.fsencode(socket_folder(folder) / f"{name}.sock")) > SOCKET_PATH_BYTES_MAX:
        raise Misconfigured(f"the name {name!r} is too long for a server here: take a shorter one")


def _initialise(program: MySQLProgram, data: Path, script: Path) -> None:
    if program.flavour is Flavour.MARIADB:
        argv = [
            find_program("mariadb-install-db"),
            "--no-defaults",
            f"--datadir=./{data.name}",  # relative: this script of MariaDB splits its words at blanks
            "--tmpdir=.",  # in a shared one, each MariaDB that starts deletes the #sql files of all
            "--auth-root-authentication-method=normal",
            "--skip-test-db",
            "--skip-name-resolve",
            "--force",  # even where this machine's own name can't be resolved
            "--innodb-log-file-size=16M",  # grown at the first start, so the copies stay small
            f"--extra-file={os.path.relpath(script, data.parent)}",
        ]
    else:
        argv = [
            *program.argv,
            "--no-defaults",
            *([f"--basedir={program.basedir}"] if program.basedir else []),
            "--initialize-insecure",
            f"--init-file={script}",
            f"--datadir={data}",
            "--secure-file-priv=NULL",
            "--mysqlx=OFF",
            "--innodb-redo-log-capacity=16M",  # grown at the first start, so the copies stay small
        ]
    if os.geteuid() == 0:
        argv.append("--user=root")  # both servers refuse to run as root otherwise
    log = data.with_suffix(".log")
    with log.open("wb") as output:
        done = subprocess.run(
            argv,
            cwd=data.parent,
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            timeout=INITIALISE_TIMEOUT_S,
            check=False,
        )
    if done.returncode:
        raise StorageUnavailable(f"a data folder could not be initialised (exit {done.returncode}): see {log}")
    log.unlink()


@dataclass(frozen=True, slots=True)
class PlannedServer:
    """One server before it has a folder and a port."""

    name: str
    cluster: str
    role: Role | None
    server_id: int
    cluster_id: int

    def server(self, folder: Path, port: int, sockets: Path, flavour: Flavour, log: Path) -> MySQLServer:
        """Returns the server. `folder` is its own, and `sockets` holds the sockets of all."""
        return MySQLServer(
            name=self.name,
            cluster=self.cluster,
            role=self.role,
            flavour=flavour,
            folder=folder,
            port=port,
            server_id=self.server_id,
            socket=sockets / f"{self.name}.sock",
            cluster_id=self.cluster_id,
            log=log,
        )


def planned_servers(clusters: Sequence[str], minions: int, *, controlled: bool = False) -> list[PlannedServer]:
    """Returns the servers of all clusters in a fixed order. Server ids are unique over all of them.

    Without a controller the first of each cluster starts as its master, and the others as its minions.
    """

    def role(n: int) -> Role | None:
        return None if controlled else Role.MINION if n else Role.MASTER

    return [
        PlannedServer(f"{name}{n + 1}", name, role(n), number * 100 + n, number)
        for number, name in enumerate(clusters, 1)
        for n in range(minions + 1)
    ]


# Option files of the storage servers. Owns every setting, and so what the promises ask of a server.
#
# Masters are durable before they answer (I5), minions commit in the master's order (I3), clocks are UTC (I4).

COMMON = """\
bind-address=127.0.0.1
skip-name-resolve
character-set-server=utf8mb4
default-time-zone=+00:00
sql-mode=STRICT_TRANS_TABLES,STRICT_ALL_TABLES,NO_ZERO_DATE,NO_ZERO_IN_DATE,ERROR_FOR_DIVISION_BY_ZERO,NO_ENGINE_SUBSTITUTION
# A batch is 16 MiB as sent; a multi-row INSERT of it fits with room to spare.
max-allowed-packet=64M
# READ COMMITTED: a transaction that waited for a shard's head must see what its predecessor committed (I3).
transaction-isolation=READ-COMMITTED
innodb-lock-wait-timeout=5
max-connections=500
# 4096 shards are 4096 databases of a few tables each.
table-open-cache=8192
table-definition-cache=16384
open-files-limit=32768
performance-schema=OFF
log-bin=binlog
# Deletes from a buffer table carry the key only, not the body.
binlog-row-image=MINIMAL
binlog-cache-size=1M
# Small files, kept a day, so that an idle-looking disk does not fill.
max-binlog-size=128M
binlog-expire-logs-seconds=86400
relay-log=relay
relay-log-recovery=ON
"""

MARIADB = """\
# A master that stopped answering is noticed in seconds, not in a minute.
slave-net-timeout=3
master-retry-count=0
binlog-format=ROW
# Else the text of every statement goes into the binary log too: two thirds of what a put writes there.
binlog-annotate-row-events=OFF
log-slave-updates=ON
gtid-strict-mode=ON
gtid-domain-id={cluster_id}
# In the master's commit order (I3): conservative runs together what the master committed together.
slave-parallel-threads=4
slave-parallel-mode=conservative
# The init file starts replication: see local.py.
skip-slave-start
innodb-log-file-size={redo_log}
"""

MYSQL = """\
# A master that stopped answering is noticed in seconds, not in a minute.
replica-net-timeout=3
mysqlx=OFF
# Nobody imports or exports files, whatever rights an account has.
secure-file-priv=NULL
gtid-mode=ON
enforce-gtid-consistency=ON
log-replica-updates=ON
replica-parallel-workers=4
# In the master's commit order (I3).
replica-preserve-commit-order=ON
innodb-redo-log-capacity={redo_log}
"""

MASTER = """\
# "stored" means durable (I5).
innodb-flush-log-at-trx-commit=1
sync-binlog=1
innodb-buffer-pool-size=256M
"""

MINION = """\
read-only=ON
# A minion that loses its last second reads it again from the master.
innodb-flush-log-at-trx-commit=2
sync-binlog=0
innodb-buffer-pool-size=128M
"""

CONTROLLED = """\
# A controller opens the master. A minion that loses its last second reads it again from the master.
read-only=ON
innodb-flush-log-at-trx-commit=2
sync-binlog=0
innodb-buffer-pool-size=256M
"""
NO_START_MYSQL = """\
# A controller says from whom it receives.
skip-replica-start=ON
"""

_FLAVOURED = {Flavour.MARIADB: MARIADB, Flavour.MYSQL: MYSQL}
_REDO_LOG = {Role.MASTER: "256M", Role.MINION: "128M", None: "256M"}
_OF_ROLE = {Role.MASTER: MASTER, Role.MINION: MINION, None: CONTROLLED}


def render_options(server: MySQLServer, program: MySQLProgram) -> str:
    """The whole option file of a server."""
    own = {
        "datadir": server.data,
        "tmpdir": server.folder,  # a MariaDB that starts deletes all #sql files there, also those of other servers
        "socket": server.socket,
        "pid-file": server.folder / "server.pid",
        "init-file": server.init_file,
        "port": server.port,
        "server-id": server.server_id,
    }
    if program.basedir:
        own["basedir"] = program.basedir
    if os.geteuid() == 0:
        own["user"] = "root"  # both refuse to run as root unless told
    lines = "".join(f"{name}={value}\n" for name, value in own.items())
    flavoured = _FLAVOURED[server.flavour].format(cluster_id=server.cluster_id, redo_log=_REDO_LOG[server.role])
    if server.role is None and server.flavour is Flavour.MYSQL:
        flavoured += NO_START_MYSQL
    return f"[mysqld]\n{lines}{COMMON}{flavoured}{_OF_ROLE[server.role]}"
