"""The supervisor of a stack: its configuration, and its commands over XML-RPC (list, start, stop, add and remove).

supervisord (the library `supervisor`) does the supervising. A process that was stopped here stays down until it is
started here. Any other process that ends is started again.
"""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Any
from xmlrpc.client import Fault, ServerProxy

from schemaless.errors import Misconfigured, NotFound, Unavailable
from schemaless.stack.plan import StackPlan, require_plan
from schemaless.stack.ports import free_ports
from schemaless.stack.processes import (
    ProcessRole,
    SupervisedProgram,
    ending_with_supervisor,
    forget_program,
    load_programs,
    metrics_port,
    save_program,
    with_metrics_port,
)
from schemaless.stack.programs import SEE_LOG

SUPERVISOR_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 90.0  # above every program's own, after which it is killed


class _Faults(IntEnum):
    """The faults of supervisor.xmlrpc.Faults that are handled here."""

    SHUTDOWN_STATE = 6
    BAD_NAME = 10
    ALREADY_STARTED = 60
    NOT_RUNNING = 70


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
    wait_for(home, wanted, {ProcessState.STOPPED}, timeout_s=STOP_TIMEOUT_S, otherwise=stop_again)


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
    save_program(plan.programs_folder, program, log=plan.log(name))
    _call(plan, "reloadConfig")
    _call(plan, "addProcessGroup", name)
    start(home, name)


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
    plan.supervisor_config.write_text(_render_config(plan))
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


def _render_config(plan: StackPlan) -> str:
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
        "programs": plan.programs_folder,
    }
    return CONFIG.format(**{name: str(value).replace("%", "%%") for name, value in values.items()})
