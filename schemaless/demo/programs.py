"""What hangs on the flights' log: one index, two trigger programs, and the card processor that billing calls.

All are supervised with the stack and go on over down and up. Their logs of calls stay in the stack's folder, so what
the report counts survives every kill.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from schemaless.client.client import Client
from schemaless.demo.flight import BILLED_CARRIER
from schemaless.names import index_consumer, trigger_consumer
from schemaless.stack import supervision
from schemaless.stack.endpoints import refresh_endpoints
from schemaless.stack.plan import StackPlan
from schemaless.stack.ports import free_ports
from schemaless.stack.program import ProcessRole
from schemaless.stack.services import checkout_folder, service_environment

INDEX_FILE = "examples/flights_by_tailnum.yaml"
INDEX = index_consumer("flights_by_tailnum")
CENSUS = trigger_consumer("census")
BILLING = trigger_consumer("billing")
CONSUMERS = {INDEX: "index", CENSUS: "census", BILLING: "billing"}
_PROCESSOR = "card-processor"


@dataclass(frozen=True, slots=True)
class CallLog:
    """`census`: calls by the location of the cell. `charges`: successful ones by row key. `bills`: the cells that
    billing put and that were acknowledged, as (row key, ref_key)."""

    census: Counter[str]
    charges: Counter[str]
    bills: frozenset[tuple[str, str]]


def define_index(client: Client) -> None:
    """Harmless when it is there."""
    document = yaml.safe_load((checkout_folder() / INDEX_FILE).read_text())
    client.index(document["name"]).define(document)


def start_programs(plan: StackPlan, datastore: str) -> None:
    """Put those under the embedded stack's supervisor that aren't there yet, and into endpoints.json."""
    there = {process.name for process in supervision.processes(plan.home)}
    for name, (arguments, env) in _programs(plan, datastore).items():
        if name not in there:
            argv = [sys.executable, "-m", *arguments]
            supervision.add_program(plan.home, name, ProcessRole.CONSUMERS, argv, service_environment(plan) | env)
    refresh_endpoints(plan.home)


def read_calls(folder: Path) -> CallLog:
    census = Counter(line[2] for line in _lines(folder / "census"))
    charges = Counter(line[0] for line in _lines(folder / "charges"))
    bills = frozenset((line[0], line[1]) for line in _lines(folder / "bills"))
    return CallLog(census, charges, bills)


def _programs(plan: StackPlan, datastore: str) -> Mapping[str, tuple[list[str], dict[str, str]]]:
    """By name: arguments of Python, and what it needs in its environment."""
    folder = calls_folder(plan.home)
    (port,) = free_ports(1)
    billing = {
        "BILLING_DIR": str(folder / "bills"),
        "BILLING_CARRIER": BILLED_CARRIER,
        "CARD_PROCESSOR": f"http://127.0.0.1:{port}",
        "SCHEMALESS_DATASTORE": datastore,
    }
    processor = ["examples.card_processor", "--port", str(port), "--charges", str(folder / "charges")]
    return {
        _PROCESSOR: (processor, {}),
        f"{datastore}-census": (_consumer("examples.census", datastore), {"CENSUS_DIR": str(folder / "census")}),
        f"{datastore}-billing": (_consumer("examples.billing", datastore), billing),
    }


def _consumer(module: str, datastore: str) -> list[str]:
    return ["consumers", module, "--datastore", datastore]


def calls_folder(home: Path) -> Path:
    """Where the programs of a stack with this home note their calls."""
    return home / "demo"


def _lines(folder: Path) -> Iterator[list[str]]:
    """Fields of the whole lines; the last one of a killed process may be torn."""
    for path in sorted(folder.glob("*.tsv")):
        with path.open() as lines:
            yield from (line.rstrip("\n").split("\t") for line in lines if line.endswith("\n"))
