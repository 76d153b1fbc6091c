"""`python -m consumers.probe --datastore D [--trigger]`: probes one datastore. Runs only where started.

Without SCHEMALESS_TOPOLOGY and SCHEMALESS_KAFKA it is the embedded stack's.
"""

from __future__ import annotations

import argparse

from consumers.probe.service import ProbeService
from schemaless.client.transport import local_stack
from schemaless.config import OperatorSettings, ProbeSettings
from schemaless.runtime.lifecycle import cancelled_at, run_service


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m consumers.probe", description="Measures latencies end to end.")
    parser.add_argument("--datastore", required=True)
    parser.add_argument("--trigger", action="store_true", help="also wait for a call of a trigger in this process")
    arguments = parser.parse_args()
    named, stack = OperatorSettings(), local_stack()
    given: dict[str, object] = {}
    if stack is not None and named.topology is None and named.kafka is None:
        given = {"topology": stack.topology_file, "kafka": stack.kafka}
    run_service(
        "probe",
        ProbeSettings,
        lambda parts: cancelled_at(
            parts.stop,
            ProbeService(parts.settings, parts.storage, parts.metrics.registry).run(
                arguments.datastore, triggered=arguments.trigger
            ),
        ),
        given=given,
    )


if __name__ == "__main__":
    main()
