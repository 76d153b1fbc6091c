"""Writes the tables of docs/metrics.md from the tables of the code: `.venv/bin/python deploy/write_metrics_page.py`.

Names, labels and what a metric is are the code's. The last column is the page's own, and stays.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from prometheus_client.core import CounterMetricFamily

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import api.metrics  # noqa: E402 (the checkout is on the path only now)
import cleaner.metrics  # noqa: E402
import schemaless.consume.metrics  # noqa: E402
import schemaless.runtime.service_metrics  # noqa: E402
import tailer.metrics  # noqa: E402
from schemaless.runtime.service_metrics import Times  # noqa: E402

PAGE = ROOT / "docs" / "metrics.md"
SECTIONS = {
    "Every process": schemaless.runtime.service_metrics,
    "API": api.metrics,
    "Tailer": tailer.metrics,
    "Indexers and trigger programs": schemaless.consume.metrics,
    "Cleaner": cleaner.metrics,
}
HEAD = "| metric | is | more |\n|---|---|---|\n"


def metrics_of(module: ModuleType) -> Iterator[tuple[str, str]]:
    """Yields each metric of a module as it is shown, and what it is."""
    for table in vars(module).values():
        if isinstance(table, Times):
            yield f"{table.name}{{{', '.join(table.labels)}}}", f"Histogram. {table.what}"
        elif isinstance(table, dict):
            for shown, row in table.items():
                if str(shown).startswith("schemaless_"):
                    name, brace, labels = shown.partition("{")
                    yield f"{name}_total{brace}{labels}" if row.kind is CounterMetricFamily else shown, row.what


def written(page: str) -> str:
    """Returns the page with the tables of all sections as the code has them."""
    for title, module in SECTIONS.items():
        before, heading, rest = page.partition(f"\n## {title}\n")
        text, _, table = rest.partition(HEAD)
        old, _, after = table.partition("\n\n")
        cells = [[cell.strip() for cell in row.split("|")] for row in old.splitlines()]
        more = {shown: own for _, shown, _, own, _ in cells}
        rows = [f"| `{shown}` | {what} | {more.get(f'`{shown}`', '')} |" for shown, what in metrics_of(module)]
        page = f"{before}{heading}{text}{HEAD}" + "\n".join(rows) + f"\n\n{after}"
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
