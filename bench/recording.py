"""`make recording`: runs `make demo` in a terminal, kills each process of its stack with -9, and draws docs/demo.svg.

What the terminal showed is kept as an asciicast (version 2), whose markers are the kills. `--cast FILE` without a run
draws a recording again.
"""

from __future__ import annotations

import argparse
import codecs
import fcntl
import json
import os
import random
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from bench.terminal_picture import draw
from schemaless.config import StackSettings
from schemaless.errors import Unavailable
from schemaless.stack import embedded, supervision

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "demo.svg"
COLUMNS, ROWS = 118, 120  # the whole demo fits, so nothing scrolls out of the recording
BEGUN = "cells loaded"  # the first line that the demo shows of its progress
STARTED_AGAIN_TIMEOUT_S = 120.0
PAUSE_S = (2.0, 8.0)
POLL_S = 0.2


@dataclass
class Recording:
    """An asciicast while it is made. Threads add to it."""

    started: float = field(default_factory=time.monotonic)
    events: list[tuple[float, str, str]] = field(default_factory=list)

    def add(self, code: str, data: str) -> None:
        self.events.append((round(time.monotonic() - self.started, 3), code, data))

    def save(self, file: Path) -> None:
        head = {"version": 2, "width": COLUMNS, "height": ROWS, "title": "make demo"}
        lines = [json.dumps(entry, ensure_ascii=False) for entry in (head, *self.events)]
        file.write_text("\n".join(lines) + "\n")


def kill_each_once(home: Path, dice: random.Random, has_ended: Callable[[], bool], say: Callable[[str], None]) -> None:
    """Kills every process of a stack with SIGKILL, each when the one before it runs again. Raises Unavailable."""

    def until_it_runs(name: str, but: int | None = None) -> int:
        deadline = time.monotonic() + STARTED_AGAIN_TIMEOUT_S
        while time.monotonic() < deadline and not has_ended():
            with suppress(Unavailable):  # the supervisor isn't there yet
                (pid,) = [process.pid for process in supervision.processes(home) if process.name == name]
                if pid not in (None, but):
                    return pid
            time.sleep(POLL_S)
        raise Unavailable(f"{name} doesn't run, or the program that is killed under has ended")

    names = [process.name for process in supervision.processes(home)]
    dice.shuffle(names)
    for name in names:
        pid = until_it_runs(name)
        os.kill(pid, signal.SIGKILL)
        killed_at = time.monotonic()
        say(f"kill -9 {pid:<8}# {name}")
        again = until_it_runs(name, but=pid)
        say(f"  {name} runs again as {again} after {time.monotonic() - killed_at:.1f} s")
        time.sleep(dice.uniform(*PAUSE_S))


def record_demo(home: Path, seed: int) -> tuple[Recording, int]:
    """Returns the recording and the demo's exit status. The stack is down again afterwards."""
    recording = Recording()
    recording.add("o", "$ make demo\r\n")
    ours, its = os.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = {**os.environ, "SCHEMALESS_HOME": str(home), "TERM": "xterm-256color"}  # noqa: TID251
    demo = subprocess.Popen(
        ["make", "--no-print-directory", "demo"], cwd=ROOT, env=environment, stdin=its, stdout=its, stderr=its,
        start_new_session=True,
    )  # fmt: skip
    os.close(its)
    has_begun = threading.Event()

    def read() -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        with suppress(OSError):  # Linux answers EIO once nobody has the other end open
            while chunk := os.read(ours, 65536):
                text = decoder.decode(chunk)
                recording.add("o", text)
                if BEGUN in text:
                    has_begun.set()

    reading = threading.Thread(target=read)
    reading.start()
    try:
        while not has_begun.wait(POLL_S):
            if demo.poll() is not None:
                break
        else:
            kill_each_once(
                home, random.Random(seed), lambda: demo.poll() is not None, lambda text: recording.add("m", text)
            )
        status = demo.wait()
        return recording, status
    finally:
        if demo.poll() is None:
            demo.kill()
            demo.wait()
        embedded.down(StackSettings(home=home))
        reading.join()
        os.close(ours)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.recording", description=__doc__)
    parser.add_argument("--cast", type=Path, help="draw this asciicast, and run nothing")
    parser.add_argument("--keep", type=Path, help="where the asciicast of the run is kept")
    parser.add_argument("--picture", type=Path, default=PICTURE)
    parser.add_argument("--seed", type=int, default=9)
    given = parser.parse_args(arguments)
    if given.cast is None:
        with tempfile.TemporaryDirectory(prefix="schemaless-recording-") as folder:
            recording, status = record_demo(Path(folder) / "home", given.seed)
        given.cast = given.keep or Path(tempfile.gettempdir()) / "schemaless-demo.cast"
        recording.save(given.cast)
        print(f"recorded {given.cast}; the demo ended with {status}")
        if status:
            return status
    given.picture.write_text(draw(given.cast.read_text()))
    print(f"drew {given.picture}, {given.picture.stat().st_size / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
