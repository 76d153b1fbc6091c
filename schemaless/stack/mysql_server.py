"""MySQL and MariaDB servers on this machine: the roles of a stack's servers, and each one's data folder, options and
command line.

Their settings are in server_options.py. local.py starts and stops the processes without a supervisor, supervision.py
with one. Owns the naming `CLUSTER-master`, `CLUSTER-minion-N`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from schemaless.errors import Misconfigured, StorageUnavailable
from schemaless.stack.admin import ADMIN_USER, SERVICE_USER, Accounts, ServerAddress, account_statements, answers
from schemaless.stack.programs import SEE_LOG, Flavour, MySQLProgram, find_mysql, find_program
from schemaless.stack.server_options import render_options
from schemaless.topology import Node, Role

INITIALISE_TIMEOUT_S = 120
READY_TIMEOUT_S = 60.0
SOCKET_PATH_BYTES_MAX = 100  # the kernel's limit is 108, and MySQL adds a suffix for its lock file


@dataclass(frozen=True, slots=True)
class MySQLServer:
    """Description of one server. `folder` holds everything of it but the socket."""

    name: str
    cluster: str
    role: Role
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
        return Node(self.name, self.cluster, self.role, "127.0.0.1", self.port, SERVICE_USER, password, socket)

    def address(self, accounts: Accounts) -> ServerAddress:
        """Returns the server as administrators reach it."""
        return ServerAddress(str(self.socket), ADMIN_USER, accounts.admin_password)


def make_template(folder: Path, flavour: Flavour, accounts: Accounts) -> None:
    """Initialises one data folder, which `prepare` copies for every server. That is faster than initialising each."""
    if folder.is_dir():
        return
    fresh = folder.with_name(folder.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.parent.mkdir(parents=True, exist_ok=True)
    script = folder.with_name(folder.name + ".sql")
    script.touch(mode=0o600)
    script.write_text("".join(f"{statement};\n" for statement in account_statements(flavour, accounts)))
    try:
        _initialise(find_mysql(flavour), fresh, script)
    finally:
        script.unlink()
    (fresh / "auto.cnf").unlink(missing_ok=True)  # MySQL's server_uuid: every copy makes its own
    fresh.rename(folder)


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
        server.init_file.write_text("SELECT 1;\n")
    program = find_mysql(server.flavour)
    server.option_file.write_text(render_options(server, program))


def wait_ready(
    server: MySQLServer,
    accounts: Accounts,
    *,
    alive: Callable[[], bool] = lambda: True,
    timeout_s: float = READY_TIMEOUT_S,
) -> None:
    """Returns once the server answers a query. Raises StorageUnavailable when it has ended or is late."""
    deadline = time.monotonic() + timeout_s
    while not answers(server.address(accounts)):
        if not alive():
            raise StorageUnavailable(f"server {server.name} ended while starting. Its log: {server.log}", hint=SEE_LOG)
        if time.monotonic() > deadline:
            raise StorageUnavailable(
                f"server {server.name} does not answer after {timeout_s:.0f} s: {server.log}", hint=SEE_LOG
            )
        time.sleep(0.05)


def socket_folder(folder: Path) -> Path:
    """Returns `folder` itself, or a short private one elsewhere if a socket's path in it would be too long."""
    if len(os.fsencode(folder / "x-minion-00.sock")) <= SOCKET_PATH_BYTES_MAX:
        return folder
    digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]
    short = Path(tempfile.gettempdir()) / f"schemaless-{os.getuid()}-{digest}"
    short.mkdir(mode=0o700, exist_ok=True)
    if short.stat().st_uid != os.getuid():
        raise Misconfigured(f"{short} belongs to somebody else: choose a home folder with a shorter path")
    return short


def _initialise(program: MySQLProgram, data: Path, script: Path) -> None:
    if program.flavour is Flavour.MARIADB:
        argv = [
            find_program("mariadb-install-db"),
            "--no-defaults",
            f"--datadir={data}",
            f"--tmpdir={data.parent}",  # in a shared one, each MariaDB that starts deletes the #sql files of all
            "--auth-root-authentication-method=normal",
            "--skip-test-db",
            "--skip-name-resolve",
            "--force",  # even where this machine's own name can't be resolved
            "--innodb-log-file-size=16M",  # grown at the first start, so the copies stay small
            f"--extra-file={script}",
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
class ServerRole:
    """One server before it has a folder and a port."""

    name: str
    cluster: str
    role: Role
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


def server_roles(clusters: Sequence[str], minions: int) -> list[ServerRole]:
    """Returns masters and minions of all clusters in a fixed order. Server ids are unique over all of them."""
    roles = []
    for number, name in enumerate(clusters, 1):
        roles.append(ServerRole(f"{name}-master", name, Role.MASTER, number * 100, number))
        for n in range(1, minions + 1):
            roles.append(ServerRole(f"{name}-minion-{n}", name, Role.MINION, number * 100 + n, number))
    return roles
