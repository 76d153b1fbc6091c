"""`schemaless audit`: how an audit is shown, to people or as JSON. Exit status 1: something contradicts a promise."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from schemaless.audit.patience import STALL_S
from schemaless.audit.report import FINDINGS_MAX, AuditReport
from schemaless.cli.targets import JsonOption, servers
from schemaless.errors import NotFound
from schemaless.extras import Extra, needs
from schemaless.topology import load_topology


def register(app: typer.Typer) -> None:
    app.command("audit")(audit_datastores)


@needs("audit", Extra.KAFKA, Extra.MYSQL)
def audit_datastores(
    datastore: Annotated[str, typer.Argument(help="default: every datastore")] = "",
    as_json: JsonOption = False,
    wait: Annotated[
        float, typer.Option(help="seconds without progress that tailers and consumers are waited for")
    ] = STALL_S,
    name_all: Annotated[
        bool, typer.Option("--all", help=f"name every finding, not only the first {FINDINGS_MAX} of a datastore")
    ] = False,
) -> None:
    """Compare MySQL, topic, indexes and checkpoints, and name each cell that is missing, extra or different."""
    from schemaless.audit.run import audit
    from schemaless.ops.datastores import list_datastores

    reached = servers()
    topology = load_topology(reached.topology)
    known = list_datastores(topology)
    if datastore and datastore not in known:
        raise NotFound(f"there is no datastore {datastore!r}")
    reports = [
        audit(topology, reached.kafka, found, stall_s=wait, findings_max=None if name_all else FINDINGS_MAX)
        for name, found in known.items()
        if datastore in ("", name)
    ]
    if as_json:
        print(json.dumps({"clean": _clean(reports), "datastores": [report.document() for report in reports]}, indent=2))
    else:
        for report in reports:
            print_report(report)
    raise typer.Exit(0 if _clean(reports) else 1)


def print_report(report: AuditReport, console: Console | None = None) -> None:
    """As a table, with the findings below."""
    console = console or Console()
    table = Table("", "expected", "found", "", title=f"audit of {report.datastore}", title_justify="left")
    for name, expected, found in _lines(report):
        table.add_row(name, f"{expected:,}", f"{found:,}", "ok" if expected == found else "differs")
    console.print(table)
    for warning in report.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False)
    print_findings(report, console)


def _lines(report: AuditReport) -> Iterator[tuple[str, int, int]]:
    cells = report.cells()
    in_topic = cells["head"] - cells["not_held"]
    yield "cells in MySQL", cells["head"], cells["mysql"]
    yield "cells in Kafka", in_topic, cells["topic"]
    yield "the same in both", in_topic, cells["matched"]
    for index in report.indexes:
        yield f"entries of index {index.name}", index.expected, index.found
    for consumer in report.consumers:
        yield f"cells finished by {consumer.name}", consumer.cells, consumer.finished


def print_findings(report: AuditReport, console: Console) -> None:
    for finding in report.findings.named:
        console.print(f"{finding.kind}: shard {finding.shard}: {finding.detail}", style="red", markup=False)
    if report.findings.unnamed:
        console.print(f"and {report.findings.unnamed} more, which --all names", style="red")
    verdict = "clean" if report.clean else f"{report.findings.total} findings"
    console.print(f"{report.datastore}: {verdict} ({report.seconds:.1f} s)", style="green" if report.clean else "red")


def _clean(reports: Sequence[AuditReport]) -> bool:
    return all(report.clean for report in reports)
