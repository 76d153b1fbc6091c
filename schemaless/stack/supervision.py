"""The supervisor of a stack, spoken to by its XML-RPC socket: which processes there are; start, stop, add, remove.

supervisord (the library `supervisor`) does the supervising. A process that was stopped here stays down until it is
started here; any other that ends is started again.
"""

from __future__ import annotations

import http.client
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
from schemaless.stack.program import ProcessRole, SupervisedProgram, forget_program, load_programs, save_program
from schemaless.stack.supervisor_config import render_config

SUPERVISOR_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 90.0  # above every program's own, after which it is killed


class _Faults(IntEnum):
    """Those of supervisor.xmlrpc.Faults that are met here."""

    SHUTDOWN_STATE = 6
    BAD_NAME = 10
    ALREADY_STARTED = 60
    NOT_RUNNING = 70


class StackDown(Unavailable):
    hint = "start it with `schemaless up`"


class ProcessState(StrEnum):
    """supervisord's states; the names are its own."""

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
    """One supervised process now. `pid` is None while it isn't alive."""

    name: str
    role: ProcessRole
    state: ProcessState
    pid: int | None
    uptime_s: int
    log: Path
    started: bool  # ever, by this supervisor

    @property
    def held_down(self) -> bool:
        """Stopped on purpose, and not just not started yet."""
        return self.started and self.state is ProcessState.STOPPED


def processes(home: Path) -> list[ProcessStatus]:
    """All supervised processes, by name. Raises StackDown."""
    plan = require_plan(home)
    programs = load_programs(plan.programs_folder)
    infos = _call(plan, "getAllProcessInfo")
    return sorted(
        (_status(plan, programs[info["name"]], info) for info in infos if info["name"] in programs),
        key=lambda process: process.name,
    )


def is_up(plan: StackPlan) -> bool:
    """Whether this stack's supervisor runs."""
    try:
        return bool(_call(plan, "getState"))
    except StackDown:
        return False


def start(home: Path, name: str) -> None:
    """Let a process run; returns at once. Raises NotFound, StackDown. Running: nothing to do."""
    _accepting(home, name, "startProcess", _Faults.ALREADY_STARTED)


def stop(home: Path, name: str) -> None:
    """Hold a process down, and return when it is. Raises NotFound, StackDown. Down: nothing to do."""
    stop_all(home, [name])


def stop_all(home: Path, names: Iterable[str]) -> None:
    """As `stop`, several at the same time. Raises Unavailable when one doesn't end."""
    wanted = set(names)
    for name in wanted:
        _begin_stop(home, name)
    wait_for(home, wanted, {ProcessState.STOPPED}, timeout_s=STOP_TIMEOUT_S, otherwise=_stop_restarted)


def _stop_restarted(home: Path, process: ProcessStatus) -> None:
    """One that had just ended by itself took no order to stop, and is started again in this moment."""
    if process.state is not ProcessState.STOPPING:
        _begin_stop(home, process.name)


def _begin_stop(home: Path, name: str) -> None:
    plan = require_plan(home)
    with suppress(Fault):  # a process that hangs (SIGSTOP) takes no SIGTERM; one that is down takes no signal
        _call(plan, "signalProcess", name, "CONT")
    _accepting(home, name, "stopProcess", _Faults.NOT_RUNNING)


def wait_for(
    home: Path,
    names: Iterable[str],
    states: Iterable[ProcessState],
    *,
    timeout_s: float,
    otherwise: Callable[[Path, ProcessStatus], None] = lambda home, process: None,
) -> None:
    """Return when all of them are in one of the states. Raises Unavailable with the first that isn't in time."""
    wanted, allowed = set(names), set(states)
    deadline = time.monotonic() + timeout_s
    while True:
        late = [process for process in processes(home) if process.name in wanted and process.state not in allowed]
        if not late:
            return
        for process in late:
            otherwise(home, process)
        if time.monotonic() > deadline:
            first = late[0]
            raise Unavailable(f"{first.name} is {first.state} after {timeout_s:.0f} s; its log: {first.log}")
        time.sleep(0.1)


def add_program(home: Path, name: str, role: ProcessRole, argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Put one more program under the supervisor and start it; kept over down and up until it is removed."""
    plan = require_plan(home)
    if name in load_programs(plan.programs_folder):
        raise Misconfigured(f"a process {name!r} is supervised already")
    program = SupervisedProgram(name, role, argv, str(Path.cwd()), env)
    save_program(plan.programs_folder, program, log=plan.log(name))
    _call(plan, "reloadConfig")
    _call(plan, "addProcessGroup", name)
    start(home, name)


def remove_program(home: Path, name: str) -> None:
    """Stop a program and forget it. Raises NotFound."""
    plan = require_plan(home)
    stop(home, name)
    _call(plan, "removeProcessGroup", name)
    forget_program(plan.programs_folder, name)
    _call(plan, "reloadConfig")


def start_supervisor(plan: StackPlan) -> None:
    """Start supervisord in the background with all programs down. Raises Unavailable when it doesn't come up."""
    for folder in (plan.run, plan.home / "logs", plan.supervisor_socket.parent):
        folder.mkdir(parents=True, exist_ok=True)
    plan.supervisor_config.write_text(render_config(plan))
    argv = [sys.executable, "-m", "supervisor.supervisord", "-c", str(plan.supervisor_config)]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"the supervisor did not start: {(done.stderr or done.stdout).strip()[-500:]}")
    _until(lambda: is_up(plan), "the supervisor does not answer")


def stop_supervisor(plan: StackPlan) -> None:
    """End supervisord, and with it whatever still runs."""
    with suppress(StackDown):
        _call(plan, "shutdown")
    _until(lambda: not plan.supervisor_pid_file.exists(), "the supervisor does not end")


def _until(done: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + SUPERVISOR_TIMEOUT_S
    while not done():
        if time.monotonic() > deadline:
            raise Unavailable(otherwise)
        time.sleep(0.05)


def _status(plan: StackPlan, program: SupervisedProgram, info: Mapping[str, Any]) -> ProcessStatus:
    state = ProcessState(info["statename"])
    alive = state in ALIVE
    return ProcessStatus(
        name=program.name,
        role=program.role,
        state=state,
        pid=info["pid"] or None,
        uptime_s=max(0, info["now"] - info["start"]) if alive else 0,
        log=plan.log(program.name),
        started=info["start"] > 0,
    )


def _accepting(home: Path, name: str, method: str, harmless: int) -> None:
    try:
        _call(require_plan(home), method, name, False)  # False: don't wait
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
