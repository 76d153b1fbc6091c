"""One MySQL or MariaDB server on this machine: its data folder, option file and command line.

Its settings are in server_options.py. Starting and stopping the process is somebody else's: local.py without a
supervisor, supervision.py with one.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from schemaless.errors import Misconfigured, StorageUnavailable
from schemaless.stack.accounts import SERVICE_USER, Accounts, account_statements
from schemaless.stack.admin import ServerAddress, answers
from schemaless.stack.programs import Flavour, MySQLProgram, find_mysql, find_program
from schemaless.stack.server_options import render_options
from schemaless.topology import Node, Role

INITIALISE_TIMEOUT_S = 120
READY_TIMEOUT_S = 60.0
SOCKET_PATH_BYTES_MAX = 100  # the kernel's limit is 108; MySQL adds a suffix for its lock file


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
        """Command line that runs the server in the foreground, its log on stderr."""
        return [*find_mysql(self.flavour).argv, f"--defaults-file={self.option_file}"]

    def node(self, accounts: Accounts) -> Node:
        """The server as the services see it."""
        password = accounts.service_password
        socket = str(self.socket)
        return Node(self.name, self.cluster, self.role, "127.0.0.1", self.port, SERVICE_USER, password, socket)

    def address(self, accounts: Accounts) -> ServerAddress:
        return ServerAddress(str(self.socket), SERVICE_USER, accounts.service_password)


def make_template(folder: Path, flavour: Flavour, accounts: Accounts) -> None:
    """Initialise one data folder that `prepare` copies for every server: quicker than initialising each."""
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
    """Make folder, data and option file. A copy that was cut off carries another name and is made again."""
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
    """Return once the server answers a query. Raises StorageUnavailable when it has ended or is late."""
    deadline = time.monotonic() + timeout_s
    while not answers(server.address(accounts)):
        if not alive():
            raise StorageUnavailable(f"server {server.name} ended while starting; its log: {server.log}")
        if time.monotonic() > deadline:
            raise StorageUnavailable(f"server {server.name} does not answer after {timeout_s:.0f} s: {server.log}")
        time.sleep(0.05)


def socket_folder(folder: Path) -> Path:
    """`folder` itself, or a short private one elsewhere when a socket's path in it would be too long."""
    if len(os.fsencode(folder / "x-minion-00.sock")) <= SOCKET_PATH_BYTES_MAX:
        return folder
    digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]
    short = Path(tempfile.gettempdir()) / f"schemaless-{os.getuid()}-{digest}"
    short.mkdir(mode=0o700, exist_ok=True)
    if short.stat().st_uid != os.getuid():
        raise Misconfigured(f"{short} belongs to somebody else; choose a home folder with a shorter path")
    return short


def _initialise(program: MySQLProgram, data: Path, script: Path) -> None:
    log = data.with_suffix(".log")
    argv = _mariadb_initialise(data, script) if program.flavour is Flavour.MARIADB else None
    argv = argv or _mysql_initialise(program, data, script)
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


def _mariadb_initialise(data: Path, script: Path) -> list[str]:
    return [
        find_program("mariadb-install-db"),
        "--no-defaults",
        f"--datadir={data}",
        "--auth-root-authentication-method=normal",
        "--skip-test-db",
        "--skip-name-resolve",
        "--force",  # even where this machine's own name can't be resolved
        "--innodb-log-file-size=16M",  # grown at the first start; the copies stay small
        f"--extra-file={script}",
        *_as_this_user(),
    ]


def _mysql_initialise(program: MySQLProgram, data: Path, script: Path) -> list[str]:
    base = [f"--basedir={program.basedir}"] if program.basedir else []
    return [
        *program.argv,
        "--no-defaults",
        *base,
        "--initialize-insecure",
        f"--init-file={script}",
        f"--datadir={data}",
        "--secure-file-priv=",
        "--mysqlx=OFF",
        "--innodb-redo-log-capacity=16M",  # grown at the first start; the copies stay small
        *_as_this_user(),
    ]


def _as_this_user() -> list[str]:
    """Both servers refuse to run as root unless told."""
    return ["--user=root"] if os.geteuid() == 0 else []
