"""Site: the stack that the demo runs on: the embedded one, brought up for it, or one that runs already."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from schemaless.cli.targets import servers
from schemaless.config import ClientSettings, StackSettings
from schemaless.demo.programs import calls_folder, start_programs
from schemaless.errors import Misconfigured
from schemaless.stack import embedded
from schemaless.stack.plan import home_folder, require_plan

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Site:
    """`calls`: where the demo's programs note their calls. `start_programs` is given the datastore's name."""

    hosts: Sequence[str]
    topology: Path
    kafka: str
    calls: Path
    start_programs: Callable[[str], None]


def embedded_site(settings: StackSettings, say: Say) -> Site:
    """Brings the embedded stack up. Raises what `embedded.up` raises."""
    embedded.up(settings, say=say)
    plan = require_plan(home_folder(settings))
    calls = calls_folder(plan.home)
    return Site(plan.api_urls(), plan.topology_file, plan.broker().bootstrap, calls, partial(start_programs, plan))


def running_site(settings: StackSettings, say: Say) -> Site:
    """What the environment names; whoever runs it runs the programs too. Raises Misconfigured."""
    reached = servers()
    hosts = ClientSettings().hosts
    if not hosts:
        raise Misconfigured("no API is known: set SCHEMALESS_HOSTS")
    say(f"on the stack at {', '.join(hosts)}")
    return Site(
        hosts, reached.topology_file, reached.kafka, calls_folder(home_folder(settings)), lambda datastore: None
    )
