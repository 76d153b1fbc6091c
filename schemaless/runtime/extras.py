"""The extras of the wheel: what each one brings, and the check that names a missing one in a single line."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from enum import Enum
from importlib.util import find_spec
from typing import ParamSpec, TypeVar

from schemaless.errors import MissingExtra

DISTRIBUTION = "schemaless-store"
"""Its name for pip, as pyproject.toml has it."""

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


class Extra(Enum):
    """An extra of pyproject.toml: its name, what people call it, and the packages that prove it is installed."""

    KAFKA = ("kafka", "Kafka", ("confluent_kafka",))
    MYSQL = ("mysql", "MySQL", ("pymysql", "asyncmy"))
    FAUST = ("faust", "Faust", ("faust",))
    TRIGGERS = (
        "triggers", "Kafka, MySQL and Faust",
        ("confluent_kafka", "pymysql", "asyncmy", "faust", "uvloop", "httpx"),
    )  # fmt: skip
    TRACES = ("traces", "OpenTelemetry's SDK", ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"))
    SERVER = ("server", "the server's packages", ("supervisor", "fastapi", "confluent_kafka", "pymysql"))

    def __init__(self, extra: str, title: str, packages: tuple[str, ...]) -> None:
        self.extra = extra
        self.title = title
        self.packages = packages

    def is_installed(self) -> bool:
        return all(package in sys.modules or find_spec(package) is not None for package in self.packages)


def require(user: str, *extras: Extra) -> None:
    """Raises MissingExtra when one of the extras that `user` (a command, a name) needs is not installed."""
    if not all(extra.is_installed() for extra in extras):
        if Extra.SERVER in extras:  # the wheel hasn't the services, whatever is installed with it
            raise MissingExtra(f"{user} is for the embedded stack, which `make up` starts in a clone of the project")
        titles = " and ".join(extra.title for extra in extras)
        names = ",".join(extra.extra for extra in extras)
        raise MissingExtra(f"{user} needs {titles}: pip install '{DISTRIBUTION}[{names}]'")


def needs(command: str, *extras: Extra) -> Callable[[Callable[Arguments, Answer]], Callable[Arguments, Answer]]:
    """Decorates the function of a command: it raises MissingExtra before it does anything.

    Such a function imports the modules of its extras itself, so that the other commands start without them.
    """

    def decorate(function: Callable[Arguments, Answer]) -> Callable[Arguments, Answer]:
        @functools.wraps(function)
        def checked(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Answer:
            require(f"`schemaless {command}`", *extras)
            return function(*args, **kwargs)

        return checked

    return decorate
