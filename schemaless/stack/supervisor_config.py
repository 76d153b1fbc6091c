"""supervisord.conf of a stack: a private socket, a file for each program, the listener that writes endpoints.json."""

from __future__ import annotations

import os
import sys

from schemaless.stack.plan import StackPlan
from schemaless.stack.program import ending_with_supervisor

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


def render_config(plan: StackPlan) -> str:
    listener = ending_with_supervisor(
        [sys.executable, "-m", "schemaless.stack.endpoints_listener", str(plan.home)],
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
