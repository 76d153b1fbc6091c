"""Makes a storage server of a stack anew, as a copy of a minion of its cluster. Both are down meanwhile.

Run by a controller as `python -m schemaless.stack.remake HOME SERVER DONOR`. The copy is whole before it takes the
place of the server's data. Afterwards a controller lets the server follow its master. A controller may have been late
when it ran this, so nothing is replaced before both servers are down and the master, asked then, counts on neither.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from schemaless.errors import Misconfigured, NotFound, SchemalessError
from schemaless.stack import mysql_server, supervision
from schemaless.stack.embedded import START_BYTES, DiskFull, one_at_a_time
from schemaless.stack.endpoints import present_masters
from schemaless.stack.mysql_server import MySQLServer
from schemaless.stack.plan import StackPlan, require_plan
from schemaless.stack.supervision import ProcessState
from schemaless.storage import appointment_table
from schemaless.storage.pymysql_driver import SyncStorage
from schemaless.topology import load_topology


def remake(home: Path, name: str, donor_name: str) -> None:
    """Raises Misconfigured for a donor that can't be copied, DiskFull, and what the supervisor raises."""
    plan = require_plan(home)
    with one_at_a_time(home, print):  # `up` and `down` wait meanwhile
        server, donor = _servers(plan, name, donor_name)
        fresh, before = server.folder / "data.new", server.folder / "data.old"
        for folder in (fresh, before):
            shutil.rmtree(folder, ignore_errors=True)
        verify_room(plan, donor)
        _require_unused(plan, server)
        with _down(plan, donor, server):
            _require_unused(plan, server)
            copy_data(donor, fresh)
            server.data.rename(before)
            fresh.rename(server.data)
        shutil.rmtree(before)


def copy_data(donor: MySQLServer, fresh: Path) -> None:
    """Copies the data of a server that is down."""
    shutil.copytree(donor.data, fresh)
    (fresh / "auto.cnf").unlink(missing_ok=True)  # MySQL's server_uuid: every copy makes its own
    os.sync()


@contextmanager
def _down(plan: StackPlan, *servers: MySQLServer) -> Iterator[None]:
    """Holds servers down. A process of its own starts them again in this order, also when this one is killed."""
    names = [server.name for server in servers]
    starts = "from schemaless.stack.remake import start_at_the_end; start_at_the_end()"
    argv = [sys.executable, "-c", starts, str(plan.home), *names]
    try:
        with subprocess.Popen(argv, stdin=subprocess.PIPE, start_new_session=True):  # no signal to our group ends it
            supervision.stop_all(plan.home, names)
            yield
    finally:
        for server in servers:
            mysql_server.wait_ready(server, plan.administrator(server))


def start_at_the_end() -> None:
    """Waits for the end of the process that started this one, or for its word, and starts servers."""
    home, names = Path(sys.argv[1]), sys.argv[2:]
    sys.stdin.read()
    stopped = set(ProcessState) - {ProcessState.STOPPING}  # one that is stopping can't be started
    supervision.wait_for(home, names, stopped, timeout_s=supervision.STOPPED_TIMEOUT_S)
    for name in names:
        supervision.start(home, name)


def _servers(plan: StackPlan, name: str, donor: str) -> tuple[MySQLServer, MySQLServer]:
    servers = {server.name: server for server in plan.servers()}
    if missing := {name, donor} - servers.keys():
        raise NotFound(f"the stack has no server {', '.join(sorted(missing))}: it has {', '.join(servers)}")
    if name == donor or servers[name].cluster != servers[donor].cluster:
        raise Misconfigured(f"{name} can't be made from {donor}: take another server of the same cluster")
    if masters := {name, donor} & present_masters(load_topology(plan.topology_file)):
        raise Misconfigured(f"{masters.pop()} is a master, and a master isn't stopped for a copy")
    return servers[name], servers[donor]


def _require_unused(plan: StackPlan, server: MySQLServer) -> None:
    """Raises Misconfigured for a server that votes or is master, and StorageUnavailable where the master is away.

    What a server is, its present master knows before it is so. One that is down becomes nothing else.
    """
    with SyncStorage(load_topology(plan.topology_file)) as storage:
        storage.look()
        storage.learn(storage.master(server.cluster).run(appointment_table.appointments))
        known = storage.appointments.get(server.cluster)
    if known is not None and server.name in (known.master, *known.voters):
        raise Misconfigured(f"{server.name} is master or votes, so it may have what others lack: it isn't made anew")


def verify_room(plan: StackPlan, donor: MySQLServer) -> None:
    needed = sum(path.lstat().st_size for path in donor.data.rglob("*")) + START_BYTES
    free = shutil.disk_usage(plan.home).free
    if free < needed:
        raise DiskFull(f"a copy of {donor.name} needs {needed >> 20} MiB, and {plan.home} has {free >> 20} MiB free")


def main() -> None:
    try:
        remake(Path(sys.argv[1]), *sys.argv[2:])
    except (SchemalessError, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
