"""The supervisor of a stack: its configuration, and its commands over XML-RPC (list, start, stop, add and remove).

supervisord (the library `supervisor`) does the supervising. A process that was stopped here stays down until it is
started here. Any other process that ends is started again.
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Any
from xmlrpc.client import Fault, ServerProxy

from schemaless.bus.kafka_accounts import KafkaUser
from schemaless.config import ControllerMode
from schemaless.errors import Misconfigured, NotFound, Unavailable
from schemaless.stack.mysql_server import MySQLServer
from schemaless.stack.plan import (
    DEFAULT_DATASTORE,
    StackPlan,
    api_names,
    free_ports,
    is_free,
    require_plan,
    write_private_json,
)
from schemaless.stack.programs import SEE_LOG

# The processes of a stack: which servers and services it runs, and how supervisord learns of each.
#
# Owns command lines and environments. A process is started again without end, and it ends with the supervisor.

RESTARTS_MAX = 10**9  # a supervisor must not give up at night
STARTED_AFTER_S = 1  # a server that ends sooner is started again, a second later each time
SERVICE_STARTED_AFTER_S = 10
"""The same of services. One that can't start, because its module or its group refuses, may need seconds to say so."""

_BEGINS_COMMENT = re.compile(r"[\r\n]|\s[;#]")

STOP_TIMEOUT_S = 30  # a process whose end hangs cuts itself off after 25 s, a tailer after 35 s, and says where
MYSQL_STOP_TIMEOUT_S = 60
TAILER_STOP_TIMEOUT_S = 40
"""Longer than a tailer takes for its last transactions (tailer/__main__.py)."""


CONTROLLER = "controller-0"


class ProcessRole(StrEnum):
    API = "api"
    TAILER = "tailer"
    INDEXER = "indexer"
    CONSUMERS = "consumers"
    CLEANER = "cleaner"
    CONTROLLER = "controller"
    MYSQL = "mysql"
    KAFKA = "kafka"


_SERVERS = (ProcessRole.MYSQL, ProcessRole.KAFKA)


@dataclass(frozen=True, slots=True)
class SupervisedProgram:
    """A program of the supervisor. `stop_timeout_s` is the time from its signal to SIGKILL."""

    name: str
    role: ProcessRole
    argv: Sequence[str]
    directory: str
    env: Mapping[str, str] = field(default_factory=dict)
    stop_timeout_s: int = STOP_TIMEOUT_S


def save_program(folder: Path, program: SupervisedProgram, *, log: Path) -> None:
    """Writes the description, and supervisord's section of it. Raises Misconfigured for words it can't hold."""
    # supervisord's own `environment=` can't take every value, but env(1) can.
    variables = [f"{name}={value}" for name, value in program.env.items()]
    argv = ending_with_supervisor(["/usr/bin/env", *variables, *program.argv])
    lines = {
        "command": " ".join(_quoted(word) for word in argv),
        "directory": _escaped(program.directory),
        "autostart": "false",
        "autorestart": "true",
        "startsecs": STARTED_AFTER_S if program.role in _SERVERS else SERVICE_STARTED_AFTER_S,
        "startretries": RESTARTS_MAX,
        "stopsignal": "INT" if program.role is ProcessRole.API else "TERM",  # no load balancer is waited for
        "stopwaitsecs": program.stop_timeout_s,
        "redirect_stderr": "true",
        "stdout_logfile": _escaped(str(log)),
        "stdout_logfile_maxbytes": "20MB",
        "stdout_logfile_backups": 3,
    }
    section = f"[program:{program.name}]\n" + "".join(f"{key}={value}\n" for key, value in lines.items())
    write_private_json(folder / f"{program.name}.json", asdict(program))
    (folder / f"{program.name}.conf").write_text(section)


def load_programs(folder: Path) -> dict[str, SupervisedProgram]:
    """Returns all programs, by name and in the order of names."""
    programs = {}
    for path in sorted(folder.glob("[!.]*.json")):
        document = json.loads(path.read_bytes())
        programs[path.stem] = SupervisedProgram(**{**document, "role": ProcessRole(document["role"])})
    return programs


def forget_program(folder: Path, name: str) -> None:
    for suffix in (".conf", ".json"):
        (folder / f"{name}{suffix}").unlink(missing_ok=True)


def ending_with_supervisor(argv: Sequence[str]) -> list[str]:
    """Returns a command whose process ends with the supervisor, so that no orphan keeps ports and data folders."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "TERM", *argv] if setpriv else list(argv)


def _quoted(word: str) -> str:
    return '"' + _escaped(word).replace("\\", "\\\\").replace('"', '\\"') + '"'


def _escaped(word: str) -> str:
    if _BEGINS_COMMENT.search(word):
        raise Misconfigured(f"supervisord's file can't hold {word!r}: a line break, or ; or # after a blank")
    return word.replace("%", "%%")  # supervisord expands %(name)s


DEFAULT_CONSUMER = "examples.census"


class NoCheckout(Misconfigured):
    hint = "run it in a checkout of the project, after `make venv`, or in its image"


def checkout_folder() -> Path:
    """Returns the folder of the services. Raises NoCheckout when only the wheel is installed."""
    found = importlib.util.find_spec("api")
    if found is None or found.origin is None:
        raise NoCheckout("the services are not part of the installed package, so there is nothing to start")
    return Path(found.origin).parent.parent


def server_program(plan: StackPlan, server: MySQLServer) -> SupervisedProgram:
    return SupervisedProgram(
        server.name, ProcessRole.MYSQL, server.argv(), str(plan.home), stop_timeout_s=MYSQL_STOP_TIMEOUT_S
    )


def server_programs(plan: StackPlan) -> list[SupervisedProgram]:
    return [
        *(server_program(plan, server) for server in plan.servers()),
        SupervisedProgram("kafka", ProcessRole.KAFKA, plan.broker().argv(), str(plan.home), stop_timeout_s=30),
    ]


def service_programs(plan: StackPlan) -> list[SupervisedProgram]:
    """Returns the services that every stack has, without programs that were added later."""
    shared, tailing = service_environment(plan), service_environment(plan, KafkaUser.TAILER)
    apis = [
        _python(name, ProcessRole.API, ["api"], {**shared, "SCHEMALESS_API_PORT": str(plan.ports[name])})
        for name in api_names()
    ]
    consume = ["consumers", DEFAULT_CONSUMER, "--datastore", DEFAULT_DATASTORE]
    controlling = {
        **tailing,
        "SCHEMALESS_ADMIN_TOPOLOGY": str(plan.admin_topology_file),
        "SCHEMALESS_CONTROLLER_MODE": ControllerMode.AUTOMATIC,
        "SCHEMALESS_CONTROLLER_REMAKE_COMMAND": shlex.join(
            [sys.executable, "-m", "schemaless.stack.remake", str(plan.home)]
        ),
    }
    services = [
        _python(CONTROLLER, ProcessRole.CONTROLLER, ["controller"], controlling),
        _python("tailer-0", ProcessRole.TAILER, ["tailer"], tailing, stop_timeout_s=TAILER_STOP_TIMEOUT_S),
        _python("indexer-0", ProcessRole.INDEXER, ["indexer"], shared),
        _python("consumers-0", ProcessRole.CONSUMERS, consume, {**shared, "CENSUS_DIR": str(plan.home / "census")}),
        _python("cleaner-0", ProcessRole.CLEANER, ["cleaner"], shared),
    ]
    return [*apis, *(with_metrics_port(service, plan.ports[f"{service.name}-metrics"]) for service in services)]


METRICS_PORT = "SCHEMALESS_METRICS_PORT"


def with_metrics_port(program: SupervisedProgram, port: int) -> SupervisedProgram:
    """Returns a program that serves its metrics at a port of loopback."""
    return replace(program, env={**program.env, METRICS_PORT: str(port)})


def metrics_port(program: SupervisedProgram) -> int | None:
    """Returns the port at which a process serves its metrics, which is the API's own port, or None for a server."""
    port = program.env.get("SCHEMALESS_API_PORT" if program.role is ProcessRole.API else METRICS_PORT)
    return None if port is None else int(port)


def service_environment(plan: StackPlan, kafka_user: KafkaUser = KafkaUser.SERVICE) -> dict[str, str]:
    """Returns the settings by which a service finds the servers of this stack, and is let in."""
    account = {} if plan.kafka_accounts is None else {"SCHEMALESS_KAFKA_ACCOUNT": plan.kafka_account_file(kafka_user)}
    return {
        **{name: str(file) for name, file in account.items()},
        "SCHEMALESS_TOPOLOGY": str(plan.topology_file),
        "SCHEMALESS_KAFKA": plan.broker().bootstrap,
        "SCHEMALESS_HOSTS": ",".join(plan.api_urls()),
        "SCHEMALESS_TOKEN_FILE": str(plan.token_file),
        "SCHEMALESS_API_HOST": "127.0.0.1",
        "PYTHONUNBUFFERED": "1",
    }


def _python(
    name: str, role: ProcessRole, arguments: list[str], env: Mapping[str, str], *, stop_timeout_s: int = STOP_TIMEOUT_S
) -> SupervisedProgram:
    argv = [sys.executable, "-m", *arguments]
    return SupervisedProgram(name, role, argv, str(checkout_folder()), env, stop_timeout_s)


def with_present_settings(program: SupervisedProgram, plan: StackPlan) -> SupervisedProgram:
    """Returns a stored program with the settings that services have now."""
    program = replace(program, env={**program.env, **service_environment(plan)})
    port = metrics_port(program)
    return program if port is not None and is_free(port) else with_metrics_port(program, *free_ports(1))


SUPERVISOR_TIMEOUT_S = 30.0
STOPPED_TIMEOUT_S = 90.0  # above every program's own, after which it is killed


class _Faults(IntEnum):
    """The faults of supervisor.xmlrpc.Faults that are handled here."""

    SHUTDOWN_STATE = 6
    BAD_NAME = 10
    ALREADY_STARTED = 60
    NOT_RUNNING = 70
    ALREADY_ADDED = 90


class StackDown(Unavailable):
    hint = "start it with `schemaless up`"


class ProcessState(StrEnum):
    """The states of supervisord, under its own names."""

    STOPPED = "STOPPED"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    BACKOFF = "BACKOFF"
    STOPPING = "STOPPING"
    EXITED = "EXITED"
    FATAL = "FATAL"
    UNKNOWN = "UNKNOWN"


ALIVE = frozenset({ProcessState.STARTING, ProcessState.RUNNING, ProcessState.STOPPING})


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """The status of one supervised process. `pid` is None while it isn't alive."""

    name: str
    role: ProcessRole
    state: ProcessState
    pid: int | None
    uptime_s: int
    log: Path
    metrics_port: int | None
    started: bool  # ever, by this supervisor

    @property
    def held_down(self) -> bool:
        """True if it was stopped on purpose. A process that was never started is not held down."""
        return self.started and self.state is ProcessState.STOPPED


def processes(home: Path) -> list[ProcessStatus]:
    """Returns all supervised processes, sorted by name. Raises StackDown."""
    plan = require_plan(home)
    programs = load_programs(plan.programs_folder)
    infos = _call(plan, "getAllProcessInfo")
    found = []
    for info in infos:
        program = programs.get(info["name"])
        if program is None:  # the listener that writes endpoints.json
            continue
        state = ProcessState(info["statename"])
        status = ProcessStatus(
            name=program.name,
            role=program.role,
            state=state,
            pid=info["pid"] or None,
            uptime_s=max(0, info["now"] - info["start"]) if state in ALIVE else 0,
            log=plan.log(program.name),
            metrics_port=metrics_port(program),
            started=info["start"] > 0,
        )
        found.append(status)
    return sorted(found, key=lambda process: process.name)


def is_up(plan: StackPlan) -> bool:
    """True if this stack's supervisor runs."""
    try:
        return bool(_call(plan, "getState"))
    except StackDown:
        return False


def start(home: Path, name: str) -> None:
    """Starts a process unless it runs, and returns at once. Raises NotFound, StackDown."""
    _request(home, name, "startProcess", harmless=_Faults.ALREADY_STARTED)


def stop(home: Path, name: str) -> None:
    """Holds a process down, and returns when it is. Raises NotFound, StackDown."""
    stop_all(home, [name])


def stop_all(home: Path, names: Iterable[str]) -> None:
    """Holds several processes down at the same time. Raises Unavailable when one doesn't end."""

    def stop_again(process: ProcessStatus) -> None:
        # A process that had just ended by itself ignored the first request, and is being started again.
        if process.state is not ProcessState.STOPPING:
            _begin_stop(home, process.name)

    wanted = set(names)
    for name in wanted:
        _begin_stop(home, name)
    wait_for(home, wanted, {ProcessState.STOPPED}, timeout_s=STOPPED_TIMEOUT_S, otherwise=stop_again)


def _begin_stop(home: Path, name: str) -> None:
    plan = require_plan(home)
    with suppress(Fault):  # a process that hangs (SIGSTOP) takes no SIGTERM, and one that is down no signal
        _call(plan, "signalProcess", name, "CONT")
    _request(home, name, "stopProcess", harmless=_Faults.NOT_RUNNING)


def wait_for(
    home: Path,
    names: Iterable[str],
    states: Iterable[ProcessState],
    *,
    timeout_s: float,
    otherwise: Callable[[ProcessStatus], None] = lambda process: None,
) -> None:
    """Returns when all processes are in one of the states. Raises Unavailable with the first that is late."""
    wanted, allowed = set(names), set(states)
    deadline = time.monotonic() + timeout_s
    while True:
        late = [process for process in processes(home) if process.name in wanted and process.state not in allowed]
        if not late:
            return
        for process in late:
            otherwise(process)
        if time.monotonic() > deadline:
            first = late[0]
            raise Unavailable(
                f"{first.name} is {first.state} after {timeout_s:.0f} s; its log: {first.log}", hint=SEE_LOG
            )
        time.sleep(0.1)


def add_program(home: Path, name: str, role: ProcessRole, argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Adds a program to the supervisor and starts it. It survives down and up until it is removed."""
    plan = require_plan(home)
    if name in load_programs(plan.programs_folder):
        raise Misconfigured(f"a process {name!r} is supervised already")
    program = with_metrics_port(SupervisedProgram(name, role, argv, str(Path.cwd()), env), *free_ports(1))
    start_new(plan, program)


def start_new(plan: StackPlan, program: SupervisedProgram) -> None:
    """Makes a program known to the supervisor unless it is, and starts it unless it runs."""
    save_program(plan.programs_folder, program, log=plan.log(program.name))
    _call(plan, "reloadConfig")
    try:
        _call(plan, "addProcessGroup", program.name)
    except Fault as fault:
        if fault.faultCode != _Faults.ALREADY_ADDED:
            raise
    start(plan.home, program.name)


def remove_program(home: Path, name: str) -> None:
    """Stops a program and removes it. Raises NotFound."""
    plan = require_plan(home)
    stop(home, name)
    _call(plan, "removeProcessGroup", name)
    forget_program(plan.programs_folder, name)
    _call(plan, "reloadConfig")


def start_supervisor(plan: StackPlan) -> None:
    """Starts supervisord in the background with all programs down. Raises Unavailable when it doesn't answer."""
    for folder in (plan.run, plan.home / "logs", plan.supervisor_socket.parent):
        folder.mkdir(parents=True, exist_ok=True)
    listener = ending_with_supervisor(
        [sys.executable, "-m", "schemaless.stack.endpoints", str(plan.home)],
    )
    values = {
        "log": plan.log("supervisord"),
        "pid_file": plan.supervisor_pid_file,
        "logs": plan.home / "logs",
        "user": "user=root\n" if os.geteuid() == 0 else "",  # said explicitly, or supervisord warns
        "socket": plan.supervisor_socket,
        "listener": " ".join(f'"{word}"' for word in listener),
        "listener_log": plan.log("endpoints"),
        "programs": plan.programs_folder.name,  # beside this file: a blank would separate two patterns
    }
    plan.supervisor_config.write_text(CONFIG.format(**values))
    argv = [sys.executable, "-m", "supervisor.supervisord", "-c", str(plan.supervisor_config)]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"the supervisor did not start: {(done.stderr or done.stdout).strip()[-500:]}", hint="")
    _until(lambda: is_up(plan), "the supervisor does not answer")


def stop_supervisor(plan: StackPlan) -> None:
    """Ends supervisord with every process that still runs."""
    with suppress(StackDown):
        _call(plan, "shutdown")
    _until(lambda: not plan.supervisor_pid_file.exists(), "the supervisor does not end")


def _until(done: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + SUPERVISOR_TIMEOUT_S
    while not done():
        if time.monotonic() > deadline:
            raise Unavailable(otherwise, hint="look into supervisord.log of the stack's folder")
        time.sleep(0.05)


def _request(home: Path, name: str, method: str, *, harmless: int) -> None:
    try:
        _call(require_plan(home), method, name, False)  # False: without waiting
    except Fault as fault:
        if fault.faultCode == _Faults.BAD_NAME:
            raise NotFound(f"no supervised process is called {name!r}") from fault
        if fault.faultCode != harmless:
            raise


def _call(plan: StackPlan, method: str, *arguments: Any) -> Any:
    from supervisor.xmlrpc import SupervisorTransport  # not in the wheel's own dependencies

    transport = SupervisorTransport(None, None, f"unix://{plan.supervisor_socket}")
    try:
        # The address is never used: supervisor's transport goes to its socket.
        proxy = ServerProxy("http://127.0.0.1", transport=transport)
        return getattr(proxy.supervisor, method)(*arguments)
    except Fault as fault:
        if fault.faultCode == _Faults.SHUTDOWN_STATE:
            raise StackDown(f"the stack in {plan.home} is going down") from fault
        raise
    except (OSError, http.client.HTTPException) as error:
        raise StackDown(f"the stack in {plan.home} is not running") from error
    finally:
        transport.close()


CONFIG = """\
[supervisord]
logfile={log}
logfile_maxbytes=5MB
logfile_backups=2
pidfile={pid_file}
identifier=schemaless
childlogdir={logs}
{user}
[unix_http_server]
file={socket}
chmod=0600

[rpcinterface:supervisor]
supervisor.rpcinterface_factory=supervisor.rpcinterface:make_main_rpcinterface

[supervisorctl]
serverurl=unix://{socket}

[eventlistener:endpoints]
command={listener}
events=PROCESS_STATE_STARTING,PROCESS_STATE_RUNNING,PROCESS_STATE_BACKOFF,PROCESS_STATE_STOPPED,PROCESS_STATE_EXITED,PROCESS_GROUP,TICK_5
buffer_size=1000
autorestart=true
startretries=1000000000
stdout_logfile=NONE
stderr_logfile={listener_log}
stderr_logfile_maxbytes=1MB
stderr_logfile_backups=1

[include]
files={programs}/*.conf
"""
