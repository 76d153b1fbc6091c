"""What the tree may weigh, and which modules stand apart: the tables of test_tidy.py. Their numbers only fall."""

Budget = tuple[int, int] | tuple[int, int, str]

CONSTANTS = "bounds that were settings are constants beside the code that keeps them"

PROMOTION = "a master may change: promotion"
ORDERS = "a master may change: promotion, and orders to a controller"
PUBLISHED = "a silent voter is left out, and a master is compared with what was published before it is opened"
SHOWN = "a minion is made anew by order, and what the controller makes of clusters and servers is shown"
PAGE = "the page for people: its files, who is asking, and what open pages are sent"
SETTLED = "the page follows an order to a controller until it is settled, and knows all grants of a JWT"
MAPPED = "the map of the installation shows generations"
PREVIEWED = "a dry run of an order says what it would touch"
WATCHED = "pages of one index or program share a look, end with their datastore, and are bounded"
TRACES = "a put can be traced from the client to the trigger's call"
KEPT_APART = "no two controllers make servers of a cluster anew, and a late one makes none anew"
REMADE = "servers that are copied start again also when the command that copies is killed"
CHANGES = "a switch is refused before anything closes, and a master that can't be fenced stays open"
REJOINS = "a rejoin by order outlives its controllers, and is done when the server follows"
FOLLOWED = "how far shards were published is followed all the time, not read when a master starts"
MOVES = "a shard moves, and what follows it goes on"
ENDED = "a controller ends the switch of a shard whose mover is gone or stands still"
GROWTH = "clusters and servers come and go while processes run"
ERASURES = "bodies are erased, everywhere and for good"
SAID = "what Kafka said of an account last is told while it stands"
LATE = "a repair waits for a minion that is late"
UNBEGUN = "the audit finds no fault in a version that no indexer has begun, or that is dropped meanwhile"
PROXIES = "loopback is reached without a proxy, and an issuer that can't be asked is told before anything starts"
FORMATS = "each server is asked for its format, and one with another is left out"
CALLS = "a row has one call at a time in a process, and rows that fail leave others' connections and pauses alone"
FORKS = "a process that a function forks ends with its call, and failed calls are told by cause"
HEARD = "an interrupt that CPython loses comes again"
PROVEN = "topics, tailers and databases are proven to belong together before anybody joins a group"
OUTSIDE = "who hangs is ended from outside of what hangs, and nobody waits for who reads the log"
UNREAD = "a shard that can't be read holds up itself only, and it is said when nobody tails"
ROTATED = "passwords are rotated while everything runs, and a refused account is named as one"
WHOLE = "minions prove all that they have, and server ids are compared"
ALTERED = "the settings of topics are asked again while all runs"
RESTED = "what is asked while nothing happens is asked in one round trip, and less often"
UNHEARD = "a POST waits for a buffer that may have the only copy of a version"
STEAD = "an answer in a lost master's stead is completed by buffers at once"
UNKERNELLED = "a call doesn't ask the kernel which process it is in"
UNASKED = "a master that opens itself is closed and compared, and what somebody wrote to a minion is its own"
ANNOUNCED = "generations that a promotion begins are announced in one transaction"
LACKING = "a minion that lacks cells is no next master, and is made anew"
AWAY = "a program of a row whose master is away is said to wait for it"
RESTORED = "a former master that was restored is made anew: replication would leave out what it wrote itself"
SHAPES = "two threads that decode a kind first don't end the process"
TAILS = "a former master comes back: its tail is kept and put again, and the server made anew"

PACKAGES: dict[str, Budget] = {
    "api": (815, 448, ROTATED),
    "api/access": (589, 425, PROXIES),
    "api/explain": (784, 455, ROTATED),
    "api/follow": (867, 566, MOVES),
    "api/http": (2471, 1606, ROTATED),
    "api/index": (1662, 1023),
    "api/read": (743, 444, STEAD),
    "api/routes": (3018, 1670, ROTATED),
    "api/triggers": (623, 402, ERASURES),
    "api/ui": (185, 130, WATCHED),
    "api/write": (1432, 863, UNHEARD),
    "bench": (5055, 3264, PROMOTION),
    "cleaner": (885, 607, ERASURES),
    "consumers": (7, 5),
    "consumers/probe": (281, 189),
    "controller": (2789, 1867, RESTORED),
    "indexer": (1981, 1299, PROVEN),
    "schemaless": (3666, 2137, SHAPES),
    "schemaless/audit": (1640, 1017, WHOLE),
    "schemaless/bus": (3984, 2423, RESTED),
    "schemaless/cli": (3916, 2309, ROTATED),
    "schemaless/client": (2501, 1573, SHAPES),
    "schemaless/consume": (5156, 3470, ROTATED),
    "schemaless/contract": (2167, 1101, PROVEN),
    "schemaless/demo": (1474, 979, "the demo kills a master for good"),
    "schemaless/facts": (726, 433, ROTATED),
    "schemaless/index": (2894, 1725, ROTATED),
    "schemaless/ops": (3172, 2097, ROTATED),
    "schemaless/runtime": (2410, 1608, SHAPES),
    "schemaless/stack": (3161, 1833, ROTATED),
    "schemaless/storage": (10666, 5828, SHAPES),
    "schemaless/subscriber": (715, 508),
    "schemaless/testing": (1443, 937, SHAPES),
    "schemaless/triggers": (895, 562, FORKS),
    "tailer": (1957, 1337, ANNOUNCED),
}
"""Lines and statements of the Python files in each folder, those in its subfolders left out.

Who needs more takes something out, or raises the number and writes the reason as a third member: a new capability is a
reason. Who makes a package smaller by more than 20 of either, and 2 %, lowers its numbers in the same commit.
"""

WRITTEN = {
    "schemaless/client/client.py": "deploy/write_sync_client.py writes it from async_client.py, which is counted"
}
"""Files that no budget counts, each with its reason. Nobody writes them by hand, and a test compares them."""

WALLS = {
    "calls": "one group of calls, registered by api/routes/__init__.py",
    "commands": "one group of commands, registered by schemaless/__main__.py",
    "driver": "a foreign library or server behind a port of ours",
    "face": "what programs of others import, by the face of its package",
    "layer": "its importer is in a package that has no business with what this one does",
    "process entry": "what a process or a tool starts with, which tests import without starting it",
    "pure core": "it decides without I/O, and its importer does the I/O",
    "two stories": "with its importer the file would outgrow FILE_LINES_MAX",
    "to fold": "none: it becomes a section of its importer, or of its neighbour",
}
"""Why a module stays apart although at most one other imports it."""

ONE_IMPORTER = {
    "calls": {"api/routes": "cells erasures index_entries ops ui"},
    "commands": {
        "schemaless/cli": "cells erasures indexes moves parked stack tail tailer tokens topology triggers",
        "schemaless/demo": "command run",
    },
    "driver": {
        "api": "metrics",
        "api/http": "connection server",
        "schemaless/bus": "published turn warm_up",
        "schemaless/client": "aiohttp_transport urllib3_transport",
    },
    "face": {
        "schemaless/bus": "faust_cells",
        "schemaless/subscriber": "subscriber",
        "schemaless/testing": "trigger_kit",
    },
    "layer": {
        "api/index": "entry_reader freshness",
        "api/http": "openapi",
        "api/triggers": "control parked_pages",
        "schemaless/storage": "challenge_table",
    },
    "process entry": {
        "api": "app",
        "cleaner": "service",
        "controller": "moves service",
        "consumers/probe": "service",
        "indexer": "service",
        "schemaless": "command pytest_plugin",
        "schemaless/stack": "container_files containers remake",
    },
    "pure core": {
        "schemaless/audit": "partition_audit",
        "schemaless/demo": "report",
        "schemaless/subscriber": "density",
    },
    "two stories": {
        "api/read": "unsettled",
        "api/write": "queue",
        "controller": "change rejoin tail",
        "indexer": "index_cleaner walker",
        "schemaless/consume": "cell_calls",
        "schemaless/stack": "local",
        "schemaless/testing": "memory_api",
    },
    "to fold": {
        "schemaless/audit": "consumer_audit",
        "schemaless/cli": "examples",
        "tailer": "datastore_tailer",
    },
}
"""The modules of the product that at most one file of the product imports: wall, folder, names. Bench doesn't count."""

TO_FOLD = 3
"""How many have no wall. The number only falls."""
