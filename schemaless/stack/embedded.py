"""Starts and stops the whole stack in order: storage, replication, Kafka, datastore, services, and back.

Every step can be repeated: `up` changes nothing on a running stack, and finishes one that was interrupted.
"""

from __future__ import annotations

import errno
import fcntl
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any

import urllib3

from schemaless.bus import kafka_accounts
from schemaless.bus.kafka_accounts import KafkaUser
from schemaless.config import StackSettings
from schemaless.errors import BusRefuses, Misconfigured, SchemalessError, Unavailable
from schemaless.quantity import quantity
from schemaless.stack import kafka_broker, mysql_server
from schemaless.stack.admin import Accounts
from schemaless.stack.endpoints import await_masters, present_masters, refresh_endpoints, remove_endpoints
from schemaless.stack.mysql_server import MySQLServer
from schemaless.stack.plan import (
    PortInUse,
    StackPlan,
    create_default_datastore,
    home_folder,
    known_datastores,
    load_or_make_plan,
    load_plan,
    require_free,
    require_plan,
    verify_paths,
)
from schemaless.stack.programs import SEE_LOG
from schemaless.stack.supervision import (
    CONTROLLER,
    ProcessRole,
    ProcessState,
    ProcessStatus,
    SupervisedProgram,
    checkout_folder,
    is_up,
    load_programs,
    processes,
    save_program,
    server_programs,
    service_programs,
    start,
    start_supervisor,
    stop_all,
    stop_supervisor,
    wait_for,
    with_present_settings,
)
from schemaless.topology import load_topology

READY_TIMEOUT_S = 180.0
ORPHANS_TIMEOUT_S = 30.0
FIRST_START_BYTES = 2 << 30  # six data folders with their redo logs
START_BYTES = 256 << 20
FULL_BYTES = 16 << 20  # a server asks for more than that at once

Say = Callable[[str], None]


class DiskFull(Misconfigured):
    hint = "make room, or choose another SCHEMALESS_HOME; nothing was lost"


def up(
    settings: StackSettings,
    *,
    say: Say = lambda line: None,
    services: Callable[[StackPlan], list[SupervisedProgram]] = service_programs,
) -> dict[str, Any]:
    """Starts what isn't running, waits until all is ready, and returns the content of endpoints.json.

    Processes that are held down stay down. Raises Misconfigured or Unavailable with the reason.
    """
    home = home_folder(settings)
    verify_paths(home, settings.cache.expanduser().absolute(), checkout_folder(), Path(sys.prefix))
    with _disk_full_reported(home), one_at_a_time(home, say):
        plan = load_or_make_plan(settings)
        if not is_up(plan):
            _prepare(plan, services(plan), say)
            start_supervisor(plan)
        _start_storage(plan, say)
        cold = not any(process.started for process in processes(home) if process.role is ProcessRole.KAFKA)
        topology, administrators = map(load_topology, (plan.topology_file, plan.admin_topology_file))
        if _start(plan, ["kafka"], "Kafka", say):
            _await_kafka(plan)
            _let_into_kafka(plan, known_datastores(topology))
        create_default_datastore(topology, plan.broker().bootstrap, administrators)
        _start_services(plan, say)
        if cold and settings.warm_up_s:
            _warm_broker(plan, settings.warm_up_s, say)
        return refresh_endpoints(home)


def up_process(home: Path, name: str) -> None:
    """Lets one process run again, and returns when it runs. A server also has to answer.

    Raises Misconfigured for a server whose data folder is gone: only the start of the stack makes one.
    """
    plan = require_plan(home)
    servers = {server.name: server for server in plan.servers()}
    folder = plan.broker().data if name == "kafka" else servers[name].data if name in servers else None
    if folder is not None and not folder.is_dir():
        raise Misconfigured(
            f"the data folder of {name} is gone: {folder}",
            hint="bring it back, or let `schemaless down` and `schemaless up` make an empty one. Into an empty Kafka"
            " tailers publish everything again by themselves: docs/operating-the-log.md",
        )
    start(home, name)
    wait_for(home, [name], {ProcessState.RUNNING}, timeout_s=READY_TIMEOUT_S)
    if name == "kafka":
        _await_kafka(plan)
    elif name in servers:
        mysql_server.wait_ready(servers[name], plan.administrator(servers[name]))


def down(settings: StackSettings, *, say: Say = lambda line: None) -> None:
    """Stops everything in order. Data stays. Does nothing if the stack isn't running."""
    home = home_folder(settings)
    plan = load_plan(home)
    if plan is None:
        say(f"there is no stack in {home}")
        return
    with one_at_a_time(home, say):
        if is_up(plan):
            # Users of a server stop before it, and minions before the masters that they read from.
            everything = processes(home)
            masters = present_masters(load_topology(plan.topology_file))
            mysql = {process.name for process in everything if process.role is ProcessRole.MYSQL}
            stages = {
                "services": {process.name for process in everything if _is_service(process)},
                "Kafka": {"kafka"},
                "minions": mysql - masters,
                "masters": masters,
            }
            for stage, names in stages.items():
                say(f"stopping {stage}")
                stop_all(home, names)
            stop_supervisor(plan)
        else:
            say("not running")
        remove_endpoints(plan)


def _prepare(plan: StackPlan, services: Sequence[SupervisedProgram], say: Say) -> None:
    """Makes everything on disk that a start needs, while nothing runs."""
    servers = plan.servers()
    new = [server for server in servers if not server.data.is_dir()]
    needed, free = FIRST_START_BYTES if new else START_BYTES, shutil.disk_usage(plan.home).free
    if free < needed:
        raise DiskFull(f"the disk under {plan.home} is full: {free >> 20} MiB free, {needed >> 20} MiB needed to start")
    _await_ports(plan)
    plan.programs_folder.mkdir(parents=True, exist_ok=True)
    own = {program.name: program for program in [*server_programs(plan), *services]}
    stored = load_programs(plan.programs_folder)
    added = [with_present_settings(program, plan) for name, program in stored.items() if name not in own]
    for program in [*own.values(), *added]:
        save_program(plan.programs_folder, program, log=plan.log(program.name))
    if len(new) == len(servers):  # what these files name is of servers that are gone
        for file in (plan.topology_file, plan.admin_topology_file):
            file.unlink(missing_ok=True)
    if new:
        say(f"initialising {quantity(len(new), f'{plan.flavour} server')}")
    with ThreadPoolExecutor() as pool:
        broker = pool.submit(_prepare_kafka, plan)
        prepare_servers(plan, servers)
        broker.result()


def prepare_servers(plan: StackPlan, servers: Sequence[MySQLServer]) -> None:
    """Makes what servers lack. New ones let in the accounts that the files name now."""
    template = plan.home / "mysql" / ".template"
    made_with: Accounts | None = None
    for server in servers:
        if not server.data.is_dir() and (accounts := plan.accounts_of(server)) != made_with:
            mysql_server.make_template(template, plan.flavour, accounts)
            made_with = accounts
        mysql_server.prepare(server, template)
    shutil.rmtree(template, ignore_errors=True)


def _prepare_kafka(plan: StackPlan) -> None:
    """Makes what Kafka lacks, and the accounts' files, which the controller reads before Kafka runs. A new Kafka knows
    the accounts of the plan. Files of another one stay: whoever rotates a password writes it there.
    """
    broker = plan.broker()
    is_new = not broker.data.is_dir()
    for user in (KafkaUser.TAILER, KafkaUser.SERVICE):
        file = plan.kafka_account_file(user)
        if plan.kafka_accounts is not None and (is_new or not file.exists()):
            kafka_accounts.write_account(file, plan.kafka_accounts.account(user))
    kafka_broker.prepare(broker)


def _start_storage(plan: StackPlan, say: Say) -> None:
    servers = plan.servers()
    running = _start(plan, [server.name for server in servers], "the storage servers", say)
    awaited = [server for server in servers if server.name in running]
    with ThreadPoolExecutor(len(servers)) as pool:
        list(pool.map(lambda server: mysql_server.wait_ready(server, plan.administrator(server)), awaited))
    plan.write_topology(servers)
    plan.write_admin_topology(servers)
    if _start(plan, [CONTROLLER], "the controller", say):
        await_masters(load_topology(plan.topology_file), plan.log(CONTROLLER))


def _await_kafka(plan: StackPlan) -> None:
    try:
        kafka_broker.wait_ready(plan.broker())
    except BusRefuses as error:
        file = plan.home / "stack.json"
        error.hint = f"`schemaless down`, write the account's present password into {file}, and `schemaless up`"
        raise


def _let_into_kafka(plan: StackPlan, datastores: Sequence[str]) -> None:
    """Gives each account its rights."""
    if plan.kafka_accounts is not None:
        kafka_accounts.grant(plan.broker().bootstrap, datastores)


def _start_services(plan: StackPlan, say: Say) -> None:
    services = [process.name for process in processes(plan.home) if _is_service(process)]
    running = _start(plan, services, "the services", say)
    wait_for(plan.home, running, {ProcessState.RUNNING}, timeout_s=READY_TIMEOUT_S)
    for process in processes(plan.home):
        if process.name in running and process.role is ProcessRole.API:
            _await_api(plan, process)


def _warm_broker(plan: StackPlan, at_most_s: float, say: Say) -> None:
    from schemaless.bus.warm_up import warm_up

    say("warming the broker")
    try:
        warm_up(plan.broker().bootstrap, at_most_s=at_most_s)
    except SchemalessError as error:  # a cold broker works, and is slow for a while
        say(f"the broker stays cold: {error}")


def _start(plan: StackPlan, names: Sequence[str], what: str, say: Say) -> set[str]:
    """Starts the processes that were never started, and returns those that are not held down."""
    wanted = [process for process in processes(plan.home) if process.name in names and not process.held_down]
    new = [process for process in wanted if not process.started]
    if new:
        say(f"starting {what}")
    for process in new:
        start(plan.home, process.name)
    return {process.name for process in wanted}


def _await_api(plan: StackPlan, process: ProcessStatus) -> None:
    url = f"http://127.0.0.1:{plan.ports[process.name]}/readyz"
    deadline = time.monotonic() + READY_TIMEOUT_S
    while True:
        with suppress(urllib3.exceptions.HTTPError):
            if urllib3.request("GET", url, timeout=2.0, retries=False).status == HTTPStatus.OK:
                return
        if time.monotonic() > deadline:
            raise Unavailable(
                f"{process.name} is not ready after {READY_TIMEOUT_S:.0f} s; its log: {process.log}", hint=SEE_LOG
            )
        time.sleep(0.1)


def _is_service(process: ProcessStatus) -> bool:
    return process.role not in (ProcessRole.MYSQL, ProcessRole.KAFKA)


def _await_ports(plan: StackPlan) -> None:
    """Waits until the kept ports are free: after a killed supervisor its processes may still be ending."""
    deadline = time.monotonic() + (ORPHANS_TIMEOUT_S if plan.supervisor_pid_file.exists() else 0)
    while True:
        try:
            require_free(plan.ports)
        except PortInUse:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
        else:
            return


@contextmanager
def one_at_a_time(home: Path, say: Say) -> Iterator[None]:
    """Lets only one command work on the folder. A second one waits."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (home / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another command on this stack")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _disk_full_reported(home: Path) -> Iterator[None]:
    """Reports a full disk after a failed write, or after a failed start with hardly any space left."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DiskFull(f"the disk under {home} is full: {error}") from error
    except Unavailable as error:
        free = shutil.disk_usage(home).free
        if free > FULL_BYTES:
            raise
        raise DiskFull(f"the disk under {home} is full ({free >> 20} MiB free): {error}") from error
