"""Keeps endpoints.json true: `python -m … HOME`, run by supervisord.

Looks when a supervised process changes its state, and every five seconds for datastores that somebody made.

Speaks supervisord's event protocol on stdin and stdout, so nobody else may print: one foreign line, a library's warning
say, and supervisord never sends an event again. An event whose file can't be written is told on stderr and
passed over: the next one writes the whole file again.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TextIO

from supervisor import childutils

from schemaless.errors import SchemalessError
from schemaless.stack.endpoints import refresh_endpoints


def step(home: Path, events: TextIO, answers: TextIO) -> None:
    """One event."""
    childutils.listener.wait(events, answers)
    try:
        refresh_endpoints(home)
    except (SchemalessError, OSError) as error:
        print(f"endpoints.json was not written: {error}", file=sys.stderr, flush=True)
    childutils.listener.ok(answers)


def main() -> None:
    home = Path(sys.argv[1])
    answers, sys.stdout = sys.stdout, sys.stderr
    while True:
        step(home, sys.stdin, answers)


if __name__ == "__main__":
    main()
