"""A process that moves shards, and is killed where it is told, or gets another signal there: TOPOLOGY DATASTORE SHARDS
CLUSTER STEP [SIGNAL].
"""

import os
import signal
import sys
from pathlib import Path

from schemaless.ops.datastores import list_datastores
from schemaless.ops.move_orders import move_shards, parse_shards, plan_move
from schemaless.storage.pymysql_driver import SyncStorage
from schemaless.topology import load_topology


def main(file, name, shards, cluster, step, number="SIGKILL"):
    topology = load_topology(Path(file))
    datastore = list_datastores(topology)[name]

    def told(passed, move):
        if passed == step:
            os.kill(os.getpid(), signal.Signals[number])

    with SyncStorage(topology) as storage:
        plan = plan_move(storage, datastore, parse_shards(shards, datastore), cluster)
        move_shards(storage, datastore, plan, cluster, told)


if __name__ == "__main__":
    main(*sys.argv[1:])
