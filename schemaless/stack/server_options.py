"""Option files of the storage servers. Owns every setting, and so what the promises ask of a server.

Masters are durable before they answer (I5), minions commit in the master's order (I3), clocks are UTC (I4).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from schemaless.stack.programs import Flavour, MySQLProgram
from schemaless.topology import Role

if TYPE_CHECKING:
    from schemaless.stack.mysql_server import MySQLServer

COMMON = """\
bind-address=127.0.0.1
skip-name-resolve
character-set-server=utf8mb4
default-time-zone=+00:00
sql-mode=STRICT_TRANS_TABLES,STRICT_ALL_TABLES,NO_ZERO_DATE,NO_ZERO_IN_DATE,ERROR_FOR_DIVISION_BY_ZERO,NO_ENGINE_SUBSTITUTION
# A batch is 16 MiB as sent; a multi-row INSERT of it fits with room to spare.
max-allowed-packet=64M
# READ COMMITTED: a transaction that waited for a shard's head must see what its predecessor committed (I3).
transaction-isolation=READ-COMMITTED
innodb-lock-wait-timeout=5
max-connections=500
# 4096 shards are 4096 databases of a few tables each.
table-open-cache=8192
table-definition-cache=16384
open-files-limit=32768
performance-schema=OFF
log-bin=binlog
# Deletes from a buffer table carry the key only, not the body.
binlog-row-image=MINIMAL
binlog-cache-size=1M
# Small files, kept a day, so that an idle-looking disk does not fill.
max-binlog-size=128M
binlog-expire-logs-seconds=86400
relay-log=relay
relay-log-recovery=ON
"""

MARIADB = """\
# A master that stopped answering is noticed in seconds, not in a minute.
slave-net-timeout=10
master-retry-count=0
binlog-format=ROW
# Else the text of every statement goes into the binary log too: two thirds of what a put writes there.
binlog-annotate-row-events=OFF
log-slave-updates=ON
gtid-strict-mode=ON
gtid-domain-id={cluster_id}
# In the master's commit order (I3): conservative runs together what the master committed together.
slave-parallel-threads=4
slave-parallel-mode=conservative
# The init file starts replication: see replication.py.
skip-slave-start
innodb-log-file-size={redo_log}
"""

MYSQL = """\
# A master that stopped answering is noticed in seconds, not in a minute.
replica-net-timeout=10
mysqlx=OFF
# Nobody imports or exports files, whatever rights an account has.
secure-file-priv=NULL
gtid-mode=ON
enforce-gtid-consistency=ON
log-replica-updates=ON
replica-parallel-workers=4
# In the master's commit order (I3).
replica-preserve-commit-order=ON
innodb-redo-log-capacity={redo_log}
"""

MASTER = """\
# "stored" means durable (I5).
innodb-flush-log-at-trx-commit=1
sync-binlog=1
innodb-buffer-pool-size=256M
"""

MINION = """\
read-only=ON
# A minion that loses its last second reads it again from the master.
innodb-flush-log-at-trx-commit=2
sync-binlog=0
innodb-buffer-pool-size=128M
"""

SUPER_READ_ONLY = """\
# Binds administrators, too, until they turn it off.
super-read-only=ON
"""

_FLAVOURED = {Flavour.MARIADB: MARIADB, Flavour.MYSQL: MYSQL}
_REDO_LOG = {Role.MASTER: "256M", Role.MINION: "128M"}


def render_options(server: MySQLServer, program: MySQLProgram) -> str:
    """The whole option file of a server."""
    own = {
        "datadir": server.data,
        "tmpdir": server.folder,  # a MariaDB that starts deletes all #sql files there, also those of other servers
        "socket": server.socket,
        "pid-file": server.folder / "server.pid",
        "init-file": server.init_file,
        "port": server.port,
        "server-id": server.server_id,
    }
    if program.basedir:
        own["basedir"] = program.basedir
    if os.geteuid() == 0:
        own["user"] = "root"  # both refuse to run as root unless told
    lines = "".join(f"{name}={value}\n" for name, value in own.items())
    flavoured = _FLAVOURED[server.flavour].format(cluster_id=server.cluster_id, redo_log=_REDO_LOG[server.role])
    role = MASTER if server.role is Role.MASTER else MINION
    if server.role is Role.MINION and server.flavour is Flavour.MYSQL:
        role += SUPER_READ_ONLY
    return f"[mysqld]\n{lines}{COMMON}{flavoured}{role}"
