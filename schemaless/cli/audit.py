"""`schemaless audit`: runs an audit, and shows it to people or as JSON. Exit status 1: a promise is broken."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from schemaless.audit.report import FINDINGS_MAX, STALL_S, AuditReport
from schemaless.cli.output import print_json
from schemaless.cli.targets import JsonOption, servers
from schemaless.errors import BusUnavailable, StorageUnavailable
from schemaless.names import index_consumer
from schemaless.quantity import quantity
from schemaless.runtime.extras import Extra, needs


def register(app: typer.Typer) -> None:
    app.command("audit")(audit_datastores)


@needs("audit", Extra.KAFKA, Extra.MYSQL)
def audit_datastores(
    datastore: Annotated[str, typer.Argument(help="name of a datastore; default: all")] = "",
    as_json: JsonOption = False,
    wait: Annotated[
        float, typer.Option(help="how many seconds without progress to wait for tailers and consumers")
    ] = STALL_S,
    name_all: Annotated[
        bool, typer.Option("--all", help=f"print all findings, not only the first {FINDINGS_MAX} of a datastore")
    ] = False,
) -> None:
    """Compare MySQL, topic, indexes and checkpoints, and name each cell that is missing, extra or different."""
    from schemaless.audit.run import audit
    from schemaless.ops.ownership import require_proven

    reached = servers()
    findings_max = None if name_all else FINDINGS_MAX
    reports = []
    for found in reached.datastores(datastore):
        with suppress(StorageUnavailable, BusUnavailable):  # the audit itself says what is away
            require_proven(reached.topology, reached.kafka, found)
        reports.append(audit(reached.topology, reached.kafka, found, stall_s=wait, findings_max=findings_max))
    clean = all(report.clean for report in reports)
    if as_json:
        print_json({"clean": clean, "datastores": [report.document() for report in reports]})
    else:
        for report in reports:
            print_report(report)
    raise typer.Exit(0 if clean else 1)


def print_report(report: AuditReport) -> None:
    """Prints the compared counts as a table, with warnings and findings below."""
    console = Console()
    cells = report.cells()
    in_topic = cells["head"] - cells["not_held"] - cells["waiting"]
    lines = [
        ("cells in MySQL", cells["head"], cells["mysql"]),
        ("cells in Kafka", in_topic, cells["topic"]),
        ("the same in both", in_topic, cells["matched"]),
        *(
            (f"entries of {index_consumer(index.name, index.number)}", index.expected, index.found)
            for index in report.indexes
        ),
        *((f"cells finished by {consumer.name}", consumer.cells, consumer.finished) for consumer in report.consumers),
        *(
            (f"cells that wait or are parked in {consumer.name}", consumer.parked.counted, consumer.parked.found)
            for consumer in report.consumers
            if consumer.parked is not None
        ),
    ]
    table = Table("", "expected", "found", "", title=f"audit of {report.datastore}", title_justify="left")
    waits = {f"cells finished by {consumer.name}" for consumer in report.consumers if consumer.waits}
    for name, expected, found in lines:
        verdict = "ok" if expected == found else "waits" if name in waits else "differs"
        table.add_row(name, f"{expected:,}", f"{found:,}", verdict)
    console.print(table)
    for warning in report.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False)
    print_findings(report, console)


def print_findings(report: AuditReport, console: Console) -> None:
    """Prints each finding, and the verdict on the datastore."""
    for finding in report.findings.named:
        where = "" if finding.shard < 0 else f"shard {finding.shard}: "
        console.print(f"{finding.kind}: {where}{finding.detail}", style="red", markup=False)
    if report.findings.unnamed:
        console.print(f"and {report.findings.unnamed} more, which --all names", style="red")
    verdict = "clean" if report.clean else quantity(report.findings.total, "finding")
    console.print(f"{report.datastore}: {verdict} ({report.seconds:.1f} s)", style="green" if report.clean else "red")
