"""`python -m consumers MODULE --datastore D [--from beginning|end]`: one worker of a trigger program.

Any number of workers share the partitions. --from counts for shards that have no checkpoint yet.
"""

from __future__ import annotations

import argparse
import sys

from schemaless.config import ConsumerSettings
from schemaless.consume.checkpoints import StartAt
from schemaless.consume.process import run_consumer_process
from schemaless.consume.trigger_program import load_program
from schemaless.consume.trigger_worker import ProgramService
from schemaless.errors import SchemalessError


def main() -> None:
    arguments = _arguments()
    try:
        program = load_program(arguments.module)
    except SchemalessError as error:
        print(f"error: {error} ({error.hint})", file=sys.stderr)
        sys.exit(1)
    settings = ConsumerSettings()  # type: ignore[call-arg]  # from the environment
    start_at = StartAt(arguments.start)
    run_consumer_process(
        program.consumer,
        settings,
        lambda storage: ProgramService(settings, storage, program, start_at).run(arguments.datastore),
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m consumers", description="One worker of a trigger program.")
    parser.add_argument("module", help="dotted module, or a .py file")
    parser.add_argument("--datastore", required=True)
    parser.add_argument("--from", dest="start", choices=[start.value for start in StartAt], default="beginning")
    return parser.parse_args()


if __name__ == "__main__":
    main()
