"""`python -m bench`: starts its own servers, measures, prints one Markdown report.

Exits 0 whatever the figures are, for speed is no test; with --strict it exits 1 when a floor was not met.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from pathlib import Path

from bench.report import Section, heading, shortfalls, summary
from bench.scale import FULL, QUICK
from bench.suites import SUITES


def main() -> int:
    options = _options().parse_args()
    page = Page()
    page.add(heading(shlex.join(["python", "-m", "bench", *sys.argv[1:]])))
    sections: list[Section] = []
    for name in options.only or SUITES:
        print(f"measuring {name} …", file=sys.stderr)
        with tempfile.TemporaryDirectory(prefix="schemaless-bench-") as folder:
            measured = SUITES[name](Path(folder), QUICK if options.quick else FULL, options.beside)
        for section in measured:
            page.add(section.text())
        sections += measured
    page.add(summary(sections))
    if options.report:
        options.report.write_text(page.text)
    return 1 if options.strict and shortfalls(sections) else 0


class Page:
    """The report so far. It prints each part as soon as it is known."""

    def __init__(self) -> None:
        self.text = ""

    def add(self, part: str) -> None:
        print(part, flush=True)
        self.text += part if not self.text else f"\n{part}"


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="about 14 minutes, noisier figures")
    parser.add_argument("--only", action="append", choices=SUITES, metavar="NAME", help=f"one of {', '.join(SUITES)}")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the report there too")
    parser.add_argument(
        "--beside", type=Path, metavar="FOLDER", help="a checkout: `stack` measures it in turns with this one"
    )
    parser.add_argument("--strict", action="store_true", help="exit 1 when a floor was not met")
    return parser


if __name__ == "__main__":
    sys.exit(main())
