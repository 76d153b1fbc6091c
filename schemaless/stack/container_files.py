"""Settings files of the servers in containers: the embedded stack's settings, with a container's addresses.

They are kept under deploy/docker, so that docker-compose.yml needs no Python. Run this module after a change of
mysql_server.py or kafka_broker.py. A test compares.
"""

from __future__ import annotations

import sys
from pathlib import Path

from schemaless.stack.kafka_broker import ACCOUNTS, PROPERTIES, with_settings
from schemaless.stack.mysql_server import COMMON, CONTROLLED, MYSQL, NO_START_MYSQL

HEADING = "# Made by `python -m schemaless.stack.container_files deploy/docker`: change it there.\n"

# Of two equal options the later one counts.
CONTAINER = """\
# Other containers connect; nothing is published to other machines.
bind-address=*
"""

KAFKA = """\
# Kafka's own: on a starved machine a shorter session ends while the broker is alive, and with it the only broker.
broker.session.timeout.ms=9000
broker.heartbeat.interval.ms=2000
controller.quorum.voters=1@localhost:9093
listeners=CLIENT://:9092,CONTROLLER://localhost:9093
advertised.listeners=CLIENT://kafka:9092
log.dirs=/var/lib/kafka/data
# The password of the broker's own account isn't written down here.
config.providers=env
config.providers.env.class=org.apache.kafka.common.config.provider.EnvVarConfigProvider
"""


def settings_files() -> dict[str, str]:
    """Content by path under deploy/docker."""
    accounts = ACCOUNTS.format(
        port=9092, controller_port=9093, protocol="SASL_PLAINTEXT", admin="${env:SCHEMALESS_KAFKA_PASSWORD}"
    )
    embedded = with_settings(PROPERTIES, accounts)
    settings = "".join(f"{line}\n" for line in embedded.splitlines() if not line.startswith("#"))  # reasons stand there
    return {
        "mysql/server.cnf": mysql_option_file(NO_START_MYSQL + CONTROLLED),
        "kafka/server.properties": HEADING + with_settings(settings, KAFKA),
    }


def mysql_option_file(role_options: str) -> str:
    """Returns the options of a MySQL server in a container, all but its server_id."""
    return f"{HEADING}[mysqld]\n{COMMON}{MYSQL.format(redo_log='256M')}{role_options}{CONTAINER}"


def main(folder: Path) -> None:
    for path, content in settings_files().items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(content)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
