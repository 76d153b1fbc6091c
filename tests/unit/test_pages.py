"""What the pages name exists, and every route is on a page: calls, metrics and tables."""

import re
from pathlib import Path

from api.http.asgi import Route, Router
from api.routes import PREFIX, ROUTES

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMED_CALL = re.compile(r"\b(GET|PUT|POST|DELETE) (/[^\s`?'\"]*)")
OF_FASTAPI = ("/docs", "/openapi.json")
METRIC = re.compile(r"\bschemaless_[a-z]+_[a-z_]+\b(?=[`{])")
CODE_METRIC = re.compile(
    r'"(schemaless_(?:api|build|cleaner|consumer|probe|service|tailer)_[a-z_]+)(?:\{[a-z_, ]+\})?"'
)
SERVICES = ("schemaless", "api", "cleaner", "tailer", "consumers", "indexer")
TABLE = re.compile(r"`schemaless\.([a-z]+(?:_[a-z]+)*)`")
NO_TABLES = {"decode_record", "probe", "testing", "pytest_plugin"}  # a function of the package, and a column


def filled(path: str) -> str:
    """Returns a path as a caller sends it, with a value for each part that varies."""
    return re.sub(r"\{[^}]*\}|…|\b[A-Z]{4,}\b", "x", path).rstrip(".,)")


def calls(text: str) -> list[tuple[str, str]]:
    return [(method, filled(path)) for method, path in NAMED_CALL.findall(text)]


def test_every_call_that_a_page_names_has_a_route() -> None:
    """With the prefix of a datastore or without it. A route that is renamed is renamed on the pages, too."""
    router = Router(ROUTES)
    missing = [
        f"{page.name}: {method} {path}"
        for page, (method, path) in ((page, call) for page in PAGES for call in calls(page.read_text()))
        if path not in OF_FASTAPI and not any(router.find(method, top + path) for top in ("", "/v1/x"))
    ]
    assert not missing


def test_every_route_is_on_a_page() -> None:
    """A line names its method and path. Calls that differ in the last word may share a line."""
    lines = [line for page in PAGES for line in page.read_text().splitlines()]
    assert [f"{route.method} {route.path}" for route in ROUTES if not any(shows(line, route) for line in lines)] == []


def shows(line: str, route: Route) -> bool:
    path = filled(route.path.removeprefix(PREFIX))
    parent, _, last = path.rpartition("/")
    named = [(route.method, named.removeprefix("/v1/x")) for _, named in calls(line)]
    said = re.search(rf"\b{route.method}\b", line) is not None
    siblings = any(beside.rpartition("/")[0] == parent for _, beside in named) and f"`{last}`" in line
    return said and ((route.method, path) in named or siblings)


def test_every_metric_that_a_page_names_is_one_of_the_code() -> None:
    """Counters are shown with `_total`."""
    named = {metric for page in PAGES for metric in METRIC.findall(page.read_text())}
    assert len(named) > 5
    assert {metric.removesuffix("_total") for metric in named} - metrics_of_the_code() == set()


def test_every_metric_is_on_the_page_of_metrics() -> None:
    shown = {metric.removesuffix("_total") for metric in METRIC.findall((ROOT / "docs" / "metrics.md").read_text())}
    assert metrics_of_the_code() - shown == set()


def metrics_of_the_code() -> set[str]:
    """The names of all metrics that some service serves, without `_total`."""
    code = " ".join(path.read_text() for name in SERVICES for path in (ROOT / name).rglob("*.py"))
    return set(CODE_METRIC.findall(code))


def test_every_table_that_a_page_names_is_in_the_schema() -> None:
    """As `schemaless.parked`."""
    schema = (ROOT / "schemaless" / "storage" / "schema.sql").read_text()
    tables = set(re.findall(r"CREATE TABLE IF NOT EXISTS schemaless\.(\w+)", schema))
    named = {table for page in PAGES for table in TABLE.findall(page.read_text())}
    assert named & tables
    assert named - tables - NO_TABLES == set()


def test_the_way_of_a_cell_names_functions_of_the_files() -> None:
    """Each function of a stop is defined in the stop's file, and stops follow one another."""
    rows = re.findall(r"^\| (\d+) \| [^|]+ \| `([^|`]+)` \| ([^|]+) \|", (ROOT / "ARCHITECTURE.md").read_text(), re.M)
    assert sorted({int(number) for number, *_ in rows}) == list(range(1, 11))
    defined = {path: re.findall(r"(?:class|def) (\w+)", (ROOT / path).read_text()) for _, path, _ in rows}
    named = [
        (path, name)
        for _, path, names in rows
        for called in re.findall(r"`(.+?)`", names)
        for name in called.split(".")
    ]
    assert [(path, name) for path, name in named if name not in defined[path]] == []
