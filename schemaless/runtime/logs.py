"""The log of a service process: one format for its own lines and for those of libraries, and a bound on repeats.

Something that goes away is told at once and then ever more seldom, with the number of lines in between. So an outage
of ten minutes is some lines, not megabytes that push out what came before it.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import structlog
from structlog.typing import EventDict, WrappedLogger

from schemaless.config import LogFormat
from schemaless.errors import Misconfigured

if TYPE_CHECKING:
    import stamina.instrumentation

log = structlog.get_logger()

FIRST_PAUSE_S = 60.0
PAUSE_GROWTH = 4
PAUSE_MAX_S = 3600.0
"""A kind of line that comes on and on is written after one minute, five, twenty-one and 81, and then every hour."""
QUIET_S = 60.0
"""A kind that didn't come for so long begins anew. Between two of its pauses it has to be quiet for twice as long."""
KINDS_MAX = 1000
_AT_ONCE = {"info": 5, "debug": 5}
_AT_ONCE_OF_PROBLEMS = 3
"""Lines of one kind that are written before the rest is counted: the first shard, node or datastore isn't all."""
_SUBJECTS = ("cluster", "node", "problem")
"""What else tells kinds of lines apart: a second server or error is news. These have few values in a process."""
_TEMPLATE_CHARACTERS = 60  # of the message of a library, whose end often varies
_AIOKAFKA_AWAY = (
    "Unable connect to ",
    "Unable to request metadata from ",
    "Unable to update metadata from ",
    "Failed fetch messages from ",
    "Error sending ",
    "Group Coordinator Request failed",
    "Marking the coordinator dead",
    "Heartbeat send request failed",
    "Heartbeat session expired",
    "Heartbeat failed for group %s: coordinator",
)
"""How aiokafka's lines begin when a broker is away. They are of one kind, because one is the consequence of another."""
_REFUSALS = {
    re.compile("Authenticat|Authoriz|Sasl"): "a broker of Kafka refuses this process",
    re.compile("SSLCertVerification"): "a broker of Kafka has a certificate that isn't accepted",
}
"""What is said of a broker that answers, by words in the name of the error's class. An outage is the wrong trail."""


class _Kind:
    __slots__ = ("counted", "last_at", "next_at", "pause_s", "written")

    def __init__(self) -> None:
        self.written = self.counted = 0
        self.last_at = self.next_at = 0.0
        self.pause_s = FIRST_PAUSE_S


class RepeatLimiter:
    """Says of each line whether it is written. Lines are of one kind if they have the same level and text.

    Any thread may log. `clock` counts seconds, as time.monotonic does.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kinds: dict[tuple[str, str], _Kind] = {}
        self._lock = threading.Lock()

    def admit(self, level: str, text: str) -> int | None:
        """Returns how many lines of this kind were left out before this one, or None if it is left out, too."""
        now = self._clock()
        with self._lock:
            kind = self._kinds.get((level, text))
            quiet_s = 0.0 if kind is None else now - kind.last_at
            if kind is None or quiet_s >= QUIET_S * (1 if now >= kind.next_at else 2):
                left_out = 0 if kind is None else kind.counted
                if kind is None and len(self._kinds) >= KINDS_MAX:
                    self._kinds.clear()
                kind = self._kinds[level, text] = _Kind()
            else:
                left_out = kind.counted
            kind.last_at = now
            if kind.written < _AT_ONCE.get(level, _AT_ONCE_OF_PROBLEMS):
                kind.written += 1
                kind.next_at = now + kind.pause_s
            elif now >= kind.next_at:
                kind.pause_s = min(kind.pause_s * PAUSE_GROWTH, PAUSE_MAX_S)
                kind.next_at = now + kind.pause_s
            else:
                kind.counted += 1
                return None
            kind.counted = 0
            return left_out


class LogLimit:
    """Applies one limiter to the lines of structlog and to those of the standard library's loggers."""

    def __init__(self, limiter: RepeatLimiter) -> None:
        self._limiter = limiter

    def __call__(self, logger: WrappedLogger, method: str, line: EventDict) -> EventDict:
        """Is a processor of structlog. A line with `each=True` is always written."""
        if line.pop("each", False):
            return line
        told_apart = [str(line[name]) for name in _SUBJECTS if name in line]
        text = " ".join([str(line["event"]), *told_apart, _error_class(line.get("exc_info"))])
        left_out = self._limiter.admit(line.get("level", method), text)
        if left_out is None:
            raise structlog.DropEvent
        return {**line, "left_out": left_out} if left_out else line

    def filter(self, record: logging.LogRecord) -> bool:
        """Is a filter of a handler."""
        template = str(record.msg)[:_TEMPLATE_CHARACTERS]
        level, text = record.levelname.lower(), f"{record.name} {template} {_error_class(record.exc_info)}"
        if record.name.startswith("aiokafka") and template.startswith(_AIOKAFKA_AWAY):
            happens = _refusal(record) or "a broker of Kafka doesn't answer"
            level, text = "error", happens
            record.msg = f"{happens}: {record.msg}"  # its values are put in later
        left_out = self._limiter.admit(level, text)
        if left_out and isinstance(record.msg, str):
            record.msg = f"{record.msg} ({left_out} such lines were left out)"
        return left_out is not None


def _refusal(record: logging.LogRecord) -> str | None:
    """Returns what is wrong between a broker and this process, if a value of aiokafka's line is such an error."""
    values = record.args if isinstance(record.args, tuple) else ()
    names = [type(value).__name__ for value in values if isinstance(value, Exception)]
    return next((happens for words, happens in _REFUSALS.items() if any(map(words.search, names))), None)


def _error_class(exc_info: Any) -> str:
    """Returns the name of the class of a line's error, given in one of the forms that logging takes."""
    error = sys.exc_info()[1] if exc_info is True else exc_info[1] if isinstance(exc_info, tuple) else exc_info
    return type(error).__name__ if isinstance(error, BaseException) else ""


def configure_logging(
    level: str,
    service: str | None = None,
    log_format: LogFormat = LogFormat.TEXT,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Lets the log show `level` and above: debug, info, warning, error, critical. Raises Misconfigured for another."""
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise Misconfigured(f"the log level {level!r} is not known: it is debug, info, warning, error or critical")

    def name_service(logger: WrappedLogger, method: str, line: EventDict) -> EventDict:
        return line if service is None else {"service": service, **line}

    limit = LogLimit(RepeatLimiter(clock))
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper("iso", utc=True),
        name_service,
    ]
    renderers: list[Any] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
        if log_format is LogFormat.JSON
        else [structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)]
    )
    structlog.configure(
        processors=[*shared, limit, *renderers],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(sys.stdout),
    )
    handler = logging.StreamHandler(sys.stdout)
    handler.addFilter(limit.filter)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, _name_library],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderers],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    # What libraries say below a warning is of use to their authors, and at debug level it fills a disk.
    root.setLevel(logging.INFO if number < logging.INFO else max(number, logging.WARNING))
    from stamina.instrumentation import set_on_retry_hooks  # comes with the extra mysql, which services have

    set_on_retry_hooks([_tell_retry])


def limit_repeats(libraries: Collection[str]) -> None:
    """Bounds the repeats of some libraries' lines in a program that has a log of its own. It may be called again.

    A filter of a logger doesn't count for those below it, so each has it.
    """
    names = [*libraries, *(n for n in list(logging.root.manager.loggerDict) if n.partition(".")[0] in libraries)]
    for name in names:
        if _of_programs.filter not in (logger := logging.getLogger(name)).filters:
            logger.addFilter(_of_programs.filter)


_of_programs = LogLimit(RepeatLimiter())


def _name_library(logger: WrappedLogger, method: str, line: EventDict) -> EventDict:
    record: logging.LogRecord = line["_record"]
    return {**line, "logger": record.name}


def _tell_retry(details: stamina.instrumentation.RetryDetails) -> None:
    """Replaces the hook of stamina, which shows the call with its arguments and the error as nested quotes."""
    log.debug("tried again", attempt=details.retry_num, why=str(details.caused_by))
