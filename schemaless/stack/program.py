"""A program that the stack's supervisor runs: description, its file in the home folder, its section for supervisord.

Owns how a process is started, restarted and stopped: it is started again for ever, and it ends with the supervisor.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

from schemaless.errors import Misconfigured
from schemaless.stack.topology_file import write_private_json

RESTARTS_MAX = 10**9  # a supervisor that gives up is of no use at night
STARTED_AFTER_S = 1  # alive that long: started; dead earlier: tried again, a second later each time

_BEGINS_COMMENT = re.compile(r"[\r\n]|\s[;#]")


class ProcessRole(StrEnum):
    API = "api"
    TAILER = "tailer"
    INDEXER = "indexer"
    CONSUMERS = "consumers"
    CLEANER = "cleaner"
    MYSQL = "mysql"
    KAFKA = "kafka"


@dataclass(frozen=True, slots=True)
class SupervisedProgram:
    """`directory`: where it runs. `stop_timeout_s`: how long SIGTERM may take before SIGKILL."""

    name: str
    role: ProcessRole
    argv: Sequence[str]
    directory: str
    env: Mapping[str, str] = field(default_factory=dict)
    stop_timeout_s: int = 15


def save_program(folder: Path, program: SupervisedProgram, *, log: Path) -> None:
    """Write the description and, from it, supervisord's section. Raises Misconfigured for words it can't take."""
    section = _section(program, log)
    write_private_json(folder / f"{program.name}.json", asdict(program))
    (folder / f"{program.name}.conf").write_text(section)


def load_programs(folder: Path) -> dict[str, SupervisedProgram]:
    """By name, in the order of names."""
    return {path.stem: _load(path) for path in sorted(folder.glob("[!.]*.json"))}


def forget_program(folder: Path, name: str) -> None:
    for suffix in (".conf", ".json"):
        (folder / f"{name}{suffix}").unlink(missing_ok=True)


def _load(path: Path) -> SupervisedProgram:
    document = json.loads(path.read_bytes())
    return SupervisedProgram(**{**document, "role": ProcessRole(document["role"])})


def _section(program: SupervisedProgram, log: Path) -> str:
    # supervisord's own `environment=` can't take every value; env(1) can.
    variables = [f"{name}={value}" for name, value in program.env.items()]
    argv = ending_with_supervisor(["/usr/bin/env", *variables, *program.argv])
    lines = {
        "command": " ".join(_quoted(word) for word in argv),
        "directory": _escaped(program.directory),
        "autostart": "false",
        "autorestart": "true",
        "startsecs": STARTED_AFTER_S,
        "startretries": RESTARTS_MAX,
        "stopsignal": "TERM",
        "stopwaitsecs": program.stop_timeout_s,
        "redirect_stderr": "true",
        "stdout_logfile": _escaped(str(log)),
        "stdout_logfile_maxbytes": "20MB",
        "stdout_logfile_backups": 3,
    }
    return f"[program:{program.name}]\n" + "".join(f"{key}={value}\n" for key, value in lines.items())


def ending_with_supervisor(argv: Sequence[str]) -> list[str]:
    """The kernel asks the process to end when a supervisor was killed: no orphan keeps ports and data folders."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "TERM", *argv] if setpriv else list(argv)


def _quoted(word: str) -> str:
    return '"' + _escaped(word).replace("\\", "\\\\").replace('"', '\\"') + '"'


def _escaped(word: str) -> str:
    if _BEGINS_COMMENT.search(word):
        raise Misconfigured(f"supervisord's file can't hold {word!r}: a line break, or ; or # after a blank")
    return word.replace("%", "%%")  # supervisord expands %(name)s
