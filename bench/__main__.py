"""`python -m bench`: starts its own servers, measures, prints one Markdown report.

Exits 0 whatever the figures are, for speed is no test; with --strict it exits 1 when a floor was not met.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from pathlib import Path

from bench.report import Section, render, shortfalls
from bench.scale import FULL, QUICK
from bench.suites import SUITES


def main() -> int:
    options = _options().parse_args()
    names = options.only or list(SUITES)
    sections: list[Section] = []
    for name in names:
        with tempfile.TemporaryDirectory(prefix="schemaless-bench-") as folder:
            print(f"measuring {name} …", file=sys.stderr)
            sections += SUITES[name](Path(folder), QUICK if options.quick else FULL)
    report = render(shlex.join(["python", "-m", "bench", *sys.argv[1:]]), sections)
    print(report)
    if options.report:
        options.report.write_text(report)
    return 1 if options.strict and shortfalls(sections) else 0


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="about 2 minutes, noisier figures")
    parser.add_argument("--only", action="append", choices=SUITES, metavar="NAME", help=f"one of {', '.join(SUITES)}")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the report there too")
    parser.add_argument("--strict", action="store_true", help="exit 1 when a floor was not met")
    return parser


if __name__ == "__main__":
    sys.exit(main())
