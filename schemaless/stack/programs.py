"""Where the server programs are that deploy/install-servers put on this machine. Owns their paths."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path

from schemaless.config import StackSettings
from schemaless.errors import Misconfigured

KAFKA_FOLDER = "kafka-4.3.1"
MYSQL_FOLDER = "mysql-9.7"
SEE_LOG = "the log that is named says why"
"""Hint of an error about a process that doesn't start."""
SYSTEM_FOLDERS = (
    "/usr/sbin",
    "/usr/bin",
    "/usr/local/sbin",
    "/usr/local/bin",
)  # sbin is not on everybody's path


class Flavour(StrEnum):
    """The kind of MySQL server."""

    MARIADB = "mariadb"
    MYSQL = "mysql"


class ServerProgramMissing(Misconfigured):
    hint = "run `make servers` (for MySQL: `deploy/install-servers mysql`) in a checkout of this project"


@dataclass(frozen=True, slots=True)
class MySQLProgram:
    """How to run one kind of server: the words before its own options, and its base folder."""

    flavour: Flavour
    argv: tuple[str, ...]
    basedir: Path | None = None


def find_mysql(flavour: Flavour) -> MySQLProgram:
    """Raises ServerProgramMissing."""
    if flavour is Flavour.MARIADB:
        return MySQLProgram(flavour, (find_program("mariadbd"),))
    return _unpacked_mysql(cache_folder() / MYSQL_FOLDER) or _installed_mysql()


def find_program(name: str) -> str:
    """Path of a program. Raises ServerProgramMissing."""
    path = shutil.which(name) or shutil.which(name, path=":".join(SYSTEM_FOLDERS))
    if path is None:
        raise ServerProgramMissing(f"the program {name} is not on this machine")
    return path


def find_kafka_jars() -> Path:
    """Folder with the jars of the broker. Raises ServerProgramMissing."""
    folder = cache_folder() / KAFKA_FOLDER
    if not folder.is_dir():
        raise ServerProgramMissing(f"Apache Kafka is not in {folder}")
    return folder


def cache_folder() -> Path:
    return StackSettings().cache.expanduser().resolve()


def _unpacked_mysql(root: Path) -> MySQLProgram | None:
    """Debian's packages, unpacked: run by their own loader with their own libraries, on any host system."""
    if not root.is_dir():
        return None
    loader = next(root.glob("usr/lib*/ld-linux*.so*"), None) or next(root.glob("usr/lib/*/ld-linux*.so*"))
    libraries = ":".join(str(folder) for folder in root.glob("usr/lib/*-linux-gnu*"))
    argv = (str(loader), "--library-path", libraries, str(root / "usr/sbin/mysqld"))
    return MySQLProgram(Flavour.MYSQL, argv, root / "usr")


@cache
def _installed_mysql() -> MySQLProgram:
    program = find_program("mysqld")
    version = subprocess.run([program, "--no-defaults", "--version"], capture_output=True, text=True, check=False)
    if "mariadb" in version.stdout.lower():  # Debian's mysqld is a link to mariadbd
        raise ServerProgramMissing("MySQL is not on this machine (mysqld is MariaDB here)")
    return MySQLProgram(Flavour.MYSQL, (program,))
