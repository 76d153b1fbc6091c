"""The suites of the benchmark by name: which servers each needs, what it measures there, what the report says of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from bench import (
    backlog,
    batches,
    building,
    calls,
    cell_cost,
    cleaning,
    clients,
    drain,
    idle,
    indexing,
    latency,
    log_latency,
    many_servers,
    peer_drain,
    puts,
    queries,
    reads,
    restart,
    steps,
    tokens,
    waiting,
    whole_stack,
)
from bench.figures import Figure
from bench.report import Section
from bench.scale import MANY_SHARDS, PARTITIONS, PARTITIONS_AT_500, PEER_SHARDS, Scale
from bench.servers import service, storage_stack
from schemaless.stack.local import running_broker

Suite = Callable[[Path, Scale, Path | None], list[Section]]
"""Gets a folder of its own, the scale, and another checkout to measure beside this one, which only `stack` does."""

BOTH = ("a", "b")
_PUTS = (
    "Single puts over HTTP, bodies of about 300 bytes, one API process, masters durable at commit. Beside it: a plain "
    "FastAPI + PyMySQL tier (`bench/plain_tier.py`) under the same uvicorn settings and the same load. Batches: beside "
    "raw multi-row INSERTs by PyMySQL, no HTTP."
)


def one_copy(folder: Path, scale: Scale, _beside: Path | None) -> list[Section]:
    with storage_stack(folder, ("a",)) as stack:
        rows = [*puts.measure(stack, scale, floors=True), *batches.measure(stack, scale, floors=True)]
        read = reads.measure(stack, scale, floors=True)
    return [
        Section("Writes without secondaries", f"One master. {_PUTS}", rows),
        Section("Reads", "Newest version of a column over HTTP, beside the plain tier's SELECT of it.", read),
    ]


def two_copies(folder: Path, scale: Scale, _beside: Path | None) -> list[Section]:
    with storage_stack(folder, BOTH) as stack:
        rows = [*puts.measure(stack, scale, floors=True), *batches.measure(stack, scale, floors=True)]
    return [Section("Writes with one secondary", f"Two masters, both sides write durably to both. {_PUTS}", rows)]


def checked_tokens(folder: Path, scale: Scale, _beside: Path | None) -> list[Section]:
    with storage_stack(folder / "open", BOTH) as open_stack, storage_stack(folder / "checked", BOTH) as checked:
        rows = tokens.measure(checked, open_stack, scale)
    notes = (
        f"Single puts from {tokens.CONNECTIONS} connections with two copies. Each request carries a token, which is "
        "checked. Beside it, in turns: the same on servers that have no token."
    )
    return [Section("Checks of tokens", notes, rows)]


def beside_many_servers(folder: Path, scale: Scale, _beside: Path | None) -> list[Section]:
    notes = (
        f"One API process, idle after {many_servers.PUTS:,} puts. Servers have little memory here, so that many fit."
        " What it holds grows with servers, and not with servers times shards."
    )
    return [Section("Many servers", notes, many_servers.measure(folder, scale))]


def with_minions(folder: Path, scale: Scale, _beside: Path | None) -> list[Section]:
    with storage_stack(folder, BOTH, minions=1) as stack, service(stack, "cleaner", ["cleaner"]):
        rows = [
            *puts.measure(stack, scale, floors=False),
            *batches.measure(stack, scale, floors=False),
            *reads.measure(stack, scale, floors=False),
        ]
    notes = "The same with a minion for each master and the buffer cleaner at work, all on this machine: no floors."
    return [Section("With minions", notes, rows)]


def both_clients(folder: Path, scale: Scale, _beside: Path | None) -> list[Section]:
    with storage_stack(folder, BOTH) as stack:
        rows = clients.measure(stack, scale, folder)
    notes = (
        f"{scale.client_puts:,} puts of bodies of about 300 bytes a round, a quarter of it one at a time, against one "
        "API process and two masters. Each client is a process of its own, whose CPU counts. Client and boto3 put from "
        "threads. Beside them: httpx with the same JSON bodies, and boto3 on DynamoDB Local in memory."
    )
    return [Section("The Python clients", notes, rows)]


def large_backlog(folder: Path, scale: Scale, _beside: Path | None) -> list[Section]:
    with storage_stack(folder, BOTH, minions=1) as stack:
        rows = backlog.measure(stack, scale)
    notes = (
        f"{scale.cells_backlogged:,} buffered cells with stored bodies of about 0.8 MB, and behind them "
        f"{backlog.SMALL_CELLS} small ones of other rows, all with the same home. One minion each. Time counts "
        "from the cleaner's start to the last confirmation."
    )
    return [Section("A backlog goes home", notes, rows)]


def tail_drain(folder: Path, scale: Scale, _beside: Path | None) -> list[Section]:
    with running_broker(folder / "kafka") as kafka, storage_stack(folder, BOTH, kafka=kafka) as stack:
        drained = drain.measure(stack, scale)
    notes = (
        f"{scale.cells_drained:,} cells, stored bodies of about 300 bytes, already in MySQL (two masters, 64 shards, 8 "
        "partitions). Beside it: PyMySQL reads those rows and drops them; librdkafka produces those records."
    )
    return [Section("Tail drain", notes, drained)]


def beside_debezium(folder: Path, scale: Scale, _beside: Path | None) -> list[Section]:
    with (
        running_broker(folder / "kafka") as kafka,
        storage_stack(folder, ("a",), shards=PEER_SHARDS, kafka=kafka) as stack,
    ):
        rows = peer_drain.measure(stack, scale)
    notes = (
        f"{scale.peer_cells:,} cells, stored bodies of about 300 bytes, in {PEER_SHARDS} shards of one server; one "
        "tailer process, one Debezium 3.5.0 connector in a standalone worker with a heap of 2 GiB. The tailer's cells "
        "come exactly once; the connector isn't asked for that. Tuned: batches of 8192, fetches of 10,240, 4 snapshot "
        "threads, a lingering producer."
    )
    return [Section("Beside Debezium", notes, rows)]


def log_beside_debezium(folder: Path, scale: Scale, _beside: Path | None) -> list[Section]:
    with (
        running_broker(folder / "kafka") as kafka,
        storage_stack(folder, ("a",), shards=PEER_SHARDS, partitions=PARTITIONS_AT_500, kafka=kafka) as stack,
    ):
        rows = log_latency.measure(stack, scale)
    notes = (
        f"{log_latency.PUTS_PER_S} puts a second for {scale.latency_s:.0f} s, one server, {PEER_SHARDS} shards, "
        f"{PARTITIONS_AT_500} partitions; in turns one tailer process or one Debezium connector that polls every 10 "
        f"ms, each after {scale.latency_s:.0f} s of the same load, the broker after {scale.warm_up_s:.0f} s more. API, "
        "broker and server on this machine."
    )
    return [Section("From a put to its record", notes, rows)]


def effects(folder: Path, scale: Scale, _beside: Path | None) -> list[Section]:
    rows: list[Figure] = []
    for partitions in latency.PARTITIONS:
        own = folder / str(partitions)
        with (
            running_broker(own / "kafka") as kafka,
            storage_stack(own, BOTH, partitions=partitions, kafka=kafka) as stack,
        ):
            rows += latency.measure(stack, scale)
    rates = " and ".join(map(str, latency.PUTS_PER_S))
    notes = (
        f"{rates} puts a second in rounds of {scale.latency_s:.0f} s, after {scale.warm_up_s:.0f} s of the first rate. "
        "After every fourth put the index is asked. API, tailer, indexer, one trigger program, broker and both masters "
        "on this machine."
    )
    return [Section("From a put to its effects", notes, rows)]


def stack(folder: Path, scale: Scale, beside: Path | None) -> list[Section]:
    rows = whole_stack.measure(folder, scale, beside)
    notes = (
        f"The embedded stack: two clusters with two minions each, both API processes, one index, two trigger programs. "
        f"{whole_stack.CONNECTIONS} connections for {scale.latency_s:.0f} s, after {scale.stack_warm_up_s:.0f} s of "
        "the same. CPU counts until every consumer has caught up."
    )
    if beside:
        notes += f" Beside it: the stack of {beside}, in turns. Both are up, and one has load."
    return [Section("The whole stack", notes, rows)]


def idle_tailer(folder: Path, scale: Scale, _beside: Path | None) -> list[Section]:
    few, many = folder / "few", folder / "many"
    with running_broker(few / "kafka") as kafka, storage_stack(few, BOTH, kafka=kafka) as stack:
        beside = idle.measure_idle(stack, scale)
    with (
        running_broker(many / "kafka") as kafka,
        storage_stack(many, BOTH, shards=MANY_SHARDS, kafka=kafka) as stack,
    ):
        rows = idle.measure(stack, beside, scale)
    notes = f"One tailer process over two masters, {PARTITIONS} partitions, nothing written for {scale.idle_s:.0f} s."
    return [Section("A tailer at rest", notes, rows)]


def trigger_calls(folder: Path, scale: Scale, _beside: Path | None) -> list[Section]:
    with running_broker(folder / "kafka") as kafka, storage_stack(folder, BOTH, kafka=kafka) as stack:
        rows = calls.measure(stack, scale)
    notes = (
        f"One worker process, {scale.cells_called:,} cells a round. Beside it: a stock Faust agent that does nothing "
        "with each event and acknowledges it (`bench/stock_agent.py`)."
    )
    return [Section("Calls of triggers", notes, rows)]


def waiting_rows(folder: Path, scale: Scale, _beside: Path | None) -> list[Section]:
    with running_broker(folder / "kafka") as kafka, storage_stack(folder, BOTH, kafka=kafka) as stack:
        found = waiting.measure(stack, scale)
    notes = (
        f"One worker process, with SCHEMALESS_CONSUMERS_PARALLEL={waiting.PARALLEL} for slow calls. Parked cells in "
        "turns: beside the program that has them, one of the same code without. The outage: every call fails for "
        f"{waiting.OUTAGE_S:.0f} s after the trip, at {waiting.FED_PER_S} new rows a second."
    )
    return [Section("Rows that wait", notes, found)]


def index_maintenance(folder: Path, scale: Scale, _beside: Path | None) -> list[Section]:
    with running_broker(folder / "kafka") as kafka, storage_stack(folder, BOTH, kafka=kafka) as stack:
        rows = indexing.measure(stack, scale)
    notes = (
        f"One indexer process builds indexes of {scale.cells_indexed:,} cells in the order of the log. Beside it: "
        "PyMySQL upserts the same entries, in statements of the same kind and transactions of as many cells."
    )
    return [Section("Maintenance of indexes", notes, rows)]


def index_cleaning(folder: Path, scale: Scale, _beside: Path | None) -> list[Section]:
    with running_broker(folder / "kafka") as kafka, storage_stack(folder, BOTH, kafka=kafka) as stack:
        rows = cleaning.measure(stack, scale)
    notes = (
        f"One pass of the index cleaner over {scale.flights_cleaned:,} flights of the demo and their index, in this "
        "process, at full speed. CPU is scaled to all flights. Nothing is damaged. Then an indexer takes the log for "
        "another index, in turns with the cleaner at its default and without it."
    )
    return [Section("The index cleaner", notes, rows)]


def index_queries(folder: Path, scale: Scale, _beside: Path | None) -> list[Section]:
    with storage_stack(folder, BOTH) as stack:
        rows = queries.measure(stack, scale)
    notes = (
        f"{scale.rows_read:,} entries, one connection. Beside it: the SELECT that `explain=true` shows, by PyMySQL, and"
        " then `GET /healthz` of the same API process."
    )
    return [Section("Queries of an index", notes, rows)]


def index_builds(folder: Path, scale: Scale, _beside: Path | None) -> list[Section]:
    sections = []
    small = building.small_pool_mib(scale)
    for name, pool_mib in (("pool", None), ("small-pool", small)):
        options = "" if pool_mib is None else f"innodb-buffer-pool-size={pool_mib}M\n"
        (here := folder / name).mkdir()
        with (
            running_broker(here / "kafka") as kafka,
            storage_stack(here, BOTH, kafka=kafka, options=options) as stack,
        ):
            rows = building.measure(stack, scale)
        notes = f"One indexer process, {scale.flights_cleaned:,} flights of the demo in two columns, no tailer."
        if pool_mib is None:
            sections.append(Section("Builds of an index", notes, rows))
        else:
            notes += (
                f" Each server has a buffer pool of {pool_mib} MiB: a tenth of its cells, or the least that it takes."
            )
            sections.append(Section("Builds of an index with a small buffer pool", notes, rows))
    return sections


def restarted_indexer(folder: Path, scale: Scale, _beside: Path | None) -> list[Section]:
    with (
        running_broker(folder / "kafka") as kafka,
        storage_stack(folder, BOTH, shards=MANY_SHARDS, kafka=kafka) as stack,
    ):
        rows = restart.measure(stack, scale)
    notes = f"One indexer process over two masters, {PARTITIONS} partitions, checkpoints of all indexes at the heads."
    return [Section("An indexer that starts again", notes, rows)]


def cost_of_a_cell(folder: Path, scale: Scale, _beside: Path | None) -> list[Section]:
    with running_broker(folder / "kafka") as kafka, storage_stack(folder, BOTH, kafka=kafka) as stack:
        rows = cell_cost.measure(stack, scale)
    return [Section("Cost of a published cell", "One tailer process, from its first transaction to its last.", rows)]


def longest_steps(_folder: Path, _scale: Scale, _beside: Path | None) -> list[Section]:
    notes = (
        "CPU time of the longest thing that the event loop does at once for a request of up to 16 MiB, with bodies of "
        "1 MiB that cost much. In between other requests have their turn. No servers."
    )
    return [Section("Longest steps of a request", notes, steps.measure())]


SUITES: Mapping[str, Suite] = {
    "one-copy": one_copy,
    "two-copies": two_copies,
    "clients": both_clients,
    "drain": tail_drain,
    "idle": idle_tailer,
    "restart": restarted_indexer,
    "calls": trigger_calls,
    "waiting": waiting_rows,
    "indexing": index_maintenance,
    "cleaning": index_cleaning,
    "queries": index_queries,
    "building": index_builds,
    "cell-cost": cost_of_a_cell,
    "steps": longest_steps,
    "latency": effects,
    "stack": stack,
    "debezium": beside_debezium,
    "log": log_beside_debezium,
    "with-minions": with_minions,
    "backlog": large_backlog,
    "tokens": checked_tokens,
    "many-servers": beside_many_servers,
}
