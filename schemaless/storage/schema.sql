-- Tables of the database `schemaless`, one on every server, and of each shard's own database.
-- A statement ends with ';' at the end of a line. %(…)s are filled in by schemaless/storage/schema.py.

-- name: server
CREATE DATABASE IF NOT EXISTS schemaless CHARACTER SET utf8mb4;

CREATE TABLE IF NOT EXISTS schemaless.format (
    version INT UNSIGNED NOT NULL PRIMARY KEY
) ENGINE=InnoDB;

-- The id that all servers of an installation have, and what it has published says (I20).
CREATE TABLE IF NOT EXISTS schemaless.installation (
    one TINYINT UNSIGNED NOT NULL DEFAULT 1 PRIMARY KEY,
    id VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL
) ENGINE=InnoDB;

CREATE TABLE IF NOT EXISTS schemaless.datastore (
    name VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL PRIMARY KEY,
    shards INT UNSIGNED NOT NULL,
    partitions INT UNSIGNED NOT NULL,
    placement TEXT NOT NULL COMMENT 'JSON list of cluster names: shard n lives on the (n mod length)th',
    ready TINYINT NOT NULL COMMENT '0 while its shard databases are being made',
    created_at DATETIME(6) NOT NULL
) ENGINE=InnoDB;

-- One row for each shard whose home is this cluster, or was. Its lock orders the inserts of the shard (I3, I4).
CREATE TABLE IF NOT EXISTS schemaless.shard_head (
    datastore VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    shard INT UNSIGNED NOT NULL,
    generation INT UNSIGNED NOT NULL,
    head BIGINT UNSIGNED NOT NULL,
    last_created_at DATETIME(6) NOT NULL,
    epoch BIGINT UNSIGNED NOT NULL DEFAULT 0 COMMENT 'of the master that was opened last: puts name it',
    moved_to VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NULL COMMENT 'the cluster that the shard went to: puts are refused here',
    PRIMARY KEY (datastore, shard)
) ENGINE=InnoDB;

-- Where each generation of a shard begins (I13). Generation 1 begins at 1.
CREATE TABLE IF NOT EXISTS schemaless.shard_generation (
    datastore VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    shard INT UNSIGNED NOT NULL,
    generation INT UNSIGNED NOT NULL,
    starts_at BIGINT UNSIGNED NOT NULL,
    opened_at DATETIME(6) NOT NULL,
    PRIMARY KEY (datastore, shard, generation)
) ENGINE=InnoDB;

-- Cells that await confirmation on a minion of their home (I6). `owner` names the put that inserted the row, and `claim`
-- the put that relies on it last. The key `home` covers what the cleaner skips and what is counted.
CREATE TABLE IF NOT EXISTS schemaless.buffer (
    buffer_id BIGINT UNSIGNED NOT NULL AUTO_INCREMENT PRIMARY KEY,
    datastore VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    home VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    shard INT UNSIGNED NOT NULL,
    row_key BINARY(16) NOT NULL,
    column_name VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    ref_key BIGINT NOT NULL,
    body MEDIUMBLOB NOT NULL,
    digest BINARY(32) NOT NULL COMMENT 'SHA-256 of body',
    size INT UNSIGNED NOT NULL COMMENT 'bytes of body',
    owner BIGINT UNSIGNED NOT NULL,
    claim BIGINT UNSIGNED NOT NULL,
    buffered_at DATETIME(6) NOT NULL,
    cause VARCHAR(300) CHARACTER SET ascii COLLATE ascii_bin NULL,
    idempotency_key VARBINARY(800) NULL COMMENT 'of the POST that wrote the cell',
    UNIQUE KEY cell (datastore, row_key, column_name, ref_key),
    KEY home (home, buffer_id, size, buffered_at, datastore)
) ENGINE=InnoDB;

-- Why the home refuses a buffered cell, and since when. It goes when the home takes the cell.
CREATE TABLE IF NOT EXISTS schemaless.refusal (
    buffer_id BIGINT UNSIGNED NOT NULL PRIMARY KEY,
    reason VARCHAR(300) NOT NULL,
    refused_since DATETIME(6) NOT NULL
) ENGINE=InnoDB;

-- Buffered cells that met another body at home (I6). Written in the transaction that deletes the buffer row.
CREATE TABLE IF NOT EXISTS schemaless.conflict (
    conflict_id BIGINT UNSIGNED NOT NULL AUTO_INCREMENT PRIMARY KEY,
    datastore VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    row_key BINARY(16) NOT NULL,
    column_name VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    ref_key BIGINT NOT NULL,
    stored_body MEDIUMBLOB NOT NULL,
    buffered_body MEDIUMBLOB NOT NULL,
    detected_at DATETIME(6) NOT NULL,
    KEY datastore (datastore, conflict_id)
) ENGINE=InnoDB;

-- Answers of POST with an Idempotency-Key, on the home of the shard, written with the cell.
CREATE TABLE IF NOT EXISTS schemaless.idempotency (
    datastore VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    row_key BINARY(16) NOT NULL,
    column_name VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    idempotency_key VARBINARY(800) NOT NULL,
    ref_key BIGINT NOT NULL,
    created_at DATETIME(6) NOT NULL,
    PRIMARY KEY (datastore, row_key, column_name, idempotency_key),
    KEY created_at (created_at)
) ENGINE=InnoDB;

-- How far a consumer has finished a shard: added_id is the last one finished (I9, I10). Whoever moves a row names the
-- version that it read, and adds one. A trigger program keeps its rows on the shard's home; an index on every cluster,
-- in its entries' own transactions.
CREATE TABLE IF NOT EXISTS schemaless.checkpoint (
    datastore VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    consumer VARCHAR(128) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    shard INT UNSIGNED NOT NULL,
    generation INT UNSIGNED NOT NULL,
    added_id BIGINT UNSIGNED NOT NULL,
    digest BIGINT UNSIGNED NULL COMMENT 'of the cell at added_id (I16), NULL: not known',
    counted_from BIGINT UNSIGNED NOT NULL COMMENT 'the added_id after which finished counts',
    finished BIGINT UNSIGNED NULL COMMENT 'cells finished since then, NULL for an index. The sum of the next five',
    called BIGINT NOT NULL DEFAULT 0,
    filtered BIGINT NOT NULL DEFAULT 0,
    skipped BIGINT NOT NULL DEFAULT 0,
    parked BIGINT NOT NULL DEFAULT 0,
    waiting BIGINT NOT NULL DEFAULT 0,
    version BIGINT UNSIGNED NOT NULL DEFAULT 0,
    state VARCHAR(16) CHARACTER SET ascii NOT NULL DEFAULT 'running',
    reason TEXT NULL COMMENT 'why the shard stopped',
    worker BIGINT UNSIGNED NULL COMMENT 'the process that moved it last, NULL: an index, or that process gave the shard away',
    begun TINYINT NOT NULL DEFAULT 0 COMMENT '1: that process began the call of the next cell',
    kills INT UNSIGNED NOT NULL DEFAULT 0 COMMENT 'how many processes the call of the next cell has ended before',
    updated_at DATETIME(6) NOT NULL,
    PRIMARY KEY (datastore, consumer, shard),
    KEY shard (datastore, shard)
) ENGINE=InnoDB;

-- Parked cells of trigger programs, on the shard's home (I12). A row that is held has one record, of its first parked cell:
-- what waits behind it is read from the entity table. Only the owner of the shard writes records, in the transaction that
-- moves the checkpoint. Others write no more than the four columns of an order.
CREATE TABLE IF NOT EXISTS schemaless.parked (
    datastore VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    consumer VARCHAR(128) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    shard INT UNSIGNED NOT NULL,
    added_id BIGINT UNSIGNED NOT NULL,
    generation INT UNSIGNED NOT NULL,
    row_key BINARY(16) NOT NULL,
    column_name VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    ref_key BIGINT NOT NULL,
    function_name VARCHAR(100) NOT NULL COMMENT 'it and the later functions of the column have not finished the cell',
    cause VARCHAR(8) CHARACTER SET ascii NOT NULL,
    holds_row TINYINT NOT NULL COMMENT '1: later cells of the row wait behind it',
    error MEDIUMTEXT NOT NULL COMMENT 'the last error with its chain',
    attempts INT UNSIGNED NOT NULL COMMENT 'calls that failed',
    attempted_at TEXT NOT NULL COMMENT 'JSON list: when the last ones did, in microseconds',
    version VARCHAR(64) NOT NULL COMMENT 'of the program, when the last call failed',
    parked_at DATETIME(6) NOT NULL,
    begun TINYINT NOT NULL DEFAULT 0 COMMENT '1: a process began to call it again',
    kills INT UNSIGNED NOT NULL DEFAULT 0 COMMENT 'how many processes its call has ended',
    again_at DATETIME(6) NULL COMMENT 'when its next attempt is due, NULL: at once',
    ordered VARCHAR(8) CHARACTER SET ascii NULL COMMENT 'retry or discard, until it is done',
    due_at DATETIME(6) NULL COMMENT 'when the order is to be carried out',
    job BIGINT UNSIGNED NULL COMMENT 'the latest job that ordered something',
    order_reason VARCHAR(300) NULL,
    uncopied TINYINT NOT NULL DEFAULT 0 COMMENT '1: parked, and not yet copied to the topic of parked cells',
    PRIMARY KEY (datastore, consumer, shard, added_id),
    KEY shard (datastore, shard),
    KEY uncopied (datastore, consumer, uncopied, shard, added_id),
    KEY row_key (datastore, consumer, row_key),
    KEY ordered (datastore, consumer, ordered, due_at),
    KEY cause (datastore, consumer, cause, parked_at),
    KEY job (job)
) ENGINE=InnoDB;

-- What became of cells that were parked, for people: the last 100,000 of a server, for 30 days.
CREATE TABLE IF NOT EXISTS schemaless.parked_history (
    number BIGINT UNSIGNED NOT NULL AUTO_INCREMENT COMMENT 'only what is kept is decided by it',
    datastore VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    consumer VARCHAR(128) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    row_key BINARY(16) NOT NULL,
    shard INT UNSIGNED NOT NULL,
    added_id BIGINT UNSIGNED NOT NULL,
    generation INT UNSIGNED NOT NULL,
    column_name VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    ref_key BIGINT NOT NULL,
    function_name VARCHAR(100) NOT NULL,
    cause VARCHAR(8) CHARACTER SET ascii NOT NULL,
    holds_row TINYINT NOT NULL,
    error VARCHAR(500) NOT NULL COMMENT 'the end of the last error',
    attempts INT UNSIGNED NOT NULL,
    attempted_at TEXT NOT NULL,
    version VARCHAR(64) NOT NULL,
    parked_at DATETIME(6) NOT NULL,
    job BIGINT UNSIGNED NULL,
    order_reason VARCHAR(300) NULL,
    ending VARCHAR(10) CHARACTER SET ascii NOT NULL COMMENT 'finished, discarded, erased, sought, superseded or failed',
    ended_at DATETIME(6) NOT NULL,
    PRIMARY KEY (datastore, consumer, row_key, added_id, ended_at),
    KEY shard (datastore, shard),
    UNIQUE KEY number (number),
    KEY ended_at (ended_at)
) ENGINE=InnoDB;

-- What people ordered for many parked cells at once, on the clusters where a record was ordered, or a check of an index.
-- What became of it is counted from the records, or from the parts of the check.
CREATE TABLE IF NOT EXISTS schemaless.job (
    job BIGINT UNSIGNED NOT NULL PRIMARY KEY,
    datastore VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    consumer VARCHAR(128) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    kind VARCHAR(8) CHARACTER SET ascii NOT NULL COMMENT 'retry, discard, verify or repair',
    matched INT UNSIGNED NOT NULL COMMENT 'records or parts of this cluster',
    replaced INT UNSIGNED NOT NULL DEFAULT 0 COMMENT 'records that a later job took before their order was carried out',
    reason VARCHAR(300) NULL,
    who VARCHAR(96) NOT NULL,
    made_at DATETIME(6) NOT NULL,
    KEY made_at (made_at),
    KEY consumer (datastore, consumer)
) ENGINE=InnoDB;

-- What people ordered for a trigger program: pauses and seeks. The row of the whole program, shard -1, is on every cluster,
-- and the latest counts. The row of a shard is on its home. The owner of the shard carries a seek out.
CREATE TABLE IF NOT EXISTS schemaless.trigger_order (
    datastore VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    consumer VARCHAR(128) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    shard INT NOT NULL COMMENT '-1: all shards',
    paused TINYINT NOT NULL DEFAULT 0 COMMENT '1: nothing is called',
    reason VARCHAR(300) NULL COMMENT 'why it is paused',
    seek BIGINT UNSIGNED NOT NULL DEFAULT 0 COMMENT 'number of the seek that is to be carried out, 0: none',
    generation INT UNSIGNED NOT NULL DEFAULT 0 COMMENT 'with the next two: where the checkpoint goes',
    added_id BIGINT UNSIGNED NOT NULL DEFAULT 0,
    digest BIGINT UNSIGNED NULL,
    changed_at DATETIME(6) NOT NULL COMMENT 'by the clock of whoever ordered it',
    PRIMARY KEY (datastore, consumer, shard)
) ENGINE=InnoDB;

-- The functions of a trigger program, as the worker that started last has them. On every cluster: the latest row counts.
CREATE TABLE IF NOT EXISTS schemaless.trigger_program (
    datastore VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    consumer VARCHAR(128) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    functions TEXT NOT NULL COMMENT 'JSON: names of functions by column',
    version VARCHAR(64) NOT NULL,
    origin VARCHAR(500) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL DEFAULT '' COMMENT 'its module or file: which program owns the name',
    changed_at DATETIME(6) NOT NULL,
    PRIMARY KEY (datastore, consumer)
) ENGINE=InnoDB;

-- One row for each process that runs a trigger program, on every cluster. A clean stop deletes it. So the row of a process
-- that died is still there, and whoever takes its shards over is careful with the cells that it may have died of.
CREATE TABLE IF NOT EXISTS schemaless.worker (
    datastore VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    consumer VARCHAR(128) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    worker BIGINT UNSIGNED NOT NULL,
    report MEDIUMTEXT NOT NULL COMMENT 'JSON: what it is, and what waits there',
    seen_at DATETIME(6) NOT NULL,
    PRIMARY KEY (datastore, consumer, worker)
) ENGINE=InnoDB;

-- What an operator told the tailers of a datastore. On every cluster: the latest row counts.
CREATE TABLE IF NOT EXISTS schemaless.tailer_order (
    datastore VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL PRIMARY KEY,
    paused TINYINT NOT NULL COMMENT '1: nothing more is published',
    seeks INT UNSIGNED NOT NULL COMMENT 'grows whenever progress was moved by hand',
    changed_at DATETIME(6) NOT NULL COMMENT 'by the clock of whoever said it'
) ENGINE=InnoDB;

-- What processes ask before they join a group: tailers of the same databases answer it in Kafka (I20). On every cluster.
CREATE TABLE IF NOT EXISTS schemaless.challenge (
    datastore VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    nonce VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    made_at DATETIME(6) NOT NULL,
    PRIMARY KEY (datastore, nonce)
) ENGINE=InnoDB;

-- One row for each version of an index, on every cluster. A row only moves forward: to a later stage, and to the order of
-- a higher revision. A version that is gone keeps its row until a later one exists, so no number is used twice.
CREATE TABLE IF NOT EXISTS schemaless.index_definition (
    datastore VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    name VARCHAR(48) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    number INT UNSIGNED NOT NULL COMMENT 'of the version: its tables and its consumer are named after it',
    definition MEDIUMTEXT NOT NULL COMMENT 'JSON, as docs/indexes.md has it, empty once the version is gone',
    stage VARCHAR(16) CHARACTER SET ascii NOT NULL COMMENT 'defined, building, active, deleting, gone',
    run_state VARCHAR(16) CHARACTER SET ascii NOT NULL COMMENT 'running, paused, failed',
    reason TEXT NULL COMMENT 'why it failed',
    limits VARCHAR(255) CHARACTER SET ascii NOT NULL COMMENT 'JSON: what a process may take of the servers for it',
    revision BIGINT UNSIGNED NOT NULL COMMENT 'of the order: run_state, reason and limits',
    switch_number BIGINT UNSIGNED NOT NULL COMMENT 'the version with the highest answers, 0: a change that never did',
    switched_at DATETIME(6) NULL COMMENT 'when the first master let it answer, NULL: since it was made',
    keep_s INT UNSIGNED NOT NULL COMMENT 'how long the version that answered before it is kept',
    switch_by_hand BOOLEAN NOT NULL COMMENT 'a change waits for an order before it answers',
    homes MEDIUMTEXT NOT NULL COMMENT 'JSON: by shard that had moved its home when the version was made: its entries stay there',
    created_at DATETIME(6) NOT NULL,
    PRIMARY KEY (datastore, name, number)
) ENGINE=InnoDB;

-- While an index is built: the added_id that the checkpoint of each shard must reach before the index is active.
CREATE TABLE IF NOT EXISTS schemaless.index_build (
    datastore VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    name VARCHAR(48) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    number INT UNSIGNED NOT NULL,
    shard INT UNSIGNED NOT NULL,
    added_id BIGINT UNSIGNED NOT NULL,
    PRIMARY KEY (datastore, name, number, shard)
) ENGINE=InnoDB;

-- How far the walk over the rows of a source shard has written an index here. It ends with the checkpoint of the shard
-- at `until`. The row stays for as long as the version: what supersedes cells up to `until` begins a new walk.
CREATE TABLE IF NOT EXISTS schemaless.index_walk (
    datastore VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    name VARCHAR(48) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    number INT UNSIGNED NOT NULL,
    shard INT UNSIGNED NOT NULL,
    generation INT UNSIGNED NOT NULL COMMENT 'of the shard when the walk began',
    until BIGINT UNSIGNED NOT NULL COMMENT 'the fixed head: later cells come from the log',
    row_key VARBINARY(16) NOT NULL COMMENT 'rows up to it are written, empty: none',
    walked BIGINT UNSIGNED NOT NULL COMMENT 'cells of these rows up to the head',
    superseded TINYINT NOT NULL COMMENT '1: what an earlier walk wrote is being taken back',
    PRIMARY KEY (datastore, name, number, shard)
) ENGINE=InnoDB;

-- Up to which cells of a source shard an index has lost tombstones here. A generation that starts at or below makes the
-- indexer evaluate the whole shard.
CREATE TABLE IF NOT EXISTS schemaless.index_forgotten (
    datastore VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    name VARCHAR(48) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    number INT UNSIGNED NOT NULL,
    shard INT UNSIGNED NOT NULL,
    added_id BIGINT UNSIGNED NOT NULL,
    PRIMARY KEY (datastore, name, number, shard)
) ENGINE=InnoDB;

-- What doesn't fit the types of an index, one row for each row of cells that has or had something, on the cluster that was
-- home to the cells' shard when the version was made. Only a greater version (generation and added_id of the cell)
-- overwrites. The key `counted` covers sums.
CREATE TABLE IF NOT EXISTS schemaless.index_problem (
    datastore VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    name VARCHAR(48) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    number INT UNSIGNED NOT NULL,
    shard INT UNSIGNED NOT NULL,
    row_key BINARY(16) NOT NULL,
    generation INT UNSIGNED NOT NULL,
    added_id BIGINT UNSIGNED NOT NULL,
    misfits INT UNSIGNED NOT NULL COMMENT 'values that do not fit, 0: none any more',
    details MEDIUMTEXT NOT NULL COMMENT 'JSON: by field what does not fit, and why',
    PRIMARY KEY (datastore, name, number, shard, row_key),
    KEY counted (datastore, name, number, misfits)
) ENGINE=InnoDB;

-- What the last comparison of an index with its cells came to, one row for each range of row keys, on the home of the shard
-- with the range's number. Minions are compared apart, and each has rows of its own. The totals are of all comparisons.
CREATE TABLE IF NOT EXISTS schemaless.index_pass (
    datastore VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    name VARCHAR(48) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    number INT UNSIGNED NOT NULL,
    range_number INT UNSIGNED NOT NULL,
    node VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL COMMENT 'the minion that was compared, empty: the masters',
    compared_at DATETIME(6) NOT NULL,
    cell_rows BIGINT UNSIGNED NOT NULL,
    entries BIGINT UNSIGNED NOT NULL,
    missing BIGINT UNSIGNED NOT NULL,
    stale BIGINT UNSIGNED NOT NULL,
    ghost BIGINT UNSIGNED NOT NULL,
    repaired BIGINT UNSIGNED NOT NULL,
    unsettled BIGINT UNSIGNED NOT NULL COMMENT 'rows that changed all the time and were not judged',
    missing_total BIGINT UNSIGNED NOT NULL,
    stale_total BIGINT UNSIGNED NOT NULL,
    ghost_total BIGINT UNSIGNED NOT NULL,
    repaired_total BIGINT UNSIGNED NOT NULL,
    PRIMARY KEY (datastore, name, number, node, range_number)
) ENGINE=InnoDB;

-- How many entries were written here to a version of an index while it was kept, by a shard of their cells.
CREATE TABLE IF NOT EXISTS schemaless.index_write (
    datastore VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    name VARCHAR(48) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    number INT UNSIGNED NOT NULL,
    shard INT UNSIGNED NOT NULL,
    entries BIGINT UNSIGNED NOT NULL,
    PRIMARY KEY (datastore, name, number, shard)
) ENGINE=InnoDB;

-- The parts of a job that compares an index with its cells, one for each shard, on the shard's home. The indexer that has
-- the shard carries its part out.
CREATE TABLE IF NOT EXISTS schemaless.index_check (
    job BIGINT UNSIGNED NOT NULL,
    shard INT UNSIGNED NOT NULL,
    datastore VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    name VARCHAR(48) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    number INT UNSIGNED NOT NULL,
    request TEXT NOT NULL COMMENT 'JSON: which rows, how fast, and whether it repairs',
    made_at DATETIME(6) NOT NULL,
    done_at DATETIME(6) NULL,
    error VARCHAR(300) NULL COMMENT 'why it cannot be done now',
    result TEXT NULL COMMENT 'JSON: what it counted',
    faults MEDIUMTEXT NULL COMMENT 'JSON: the first faults',
    PRIMARY KEY (job, shard),
    KEY due (datastore, done_at, made_at, job, shard),
    KEY shard (datastore, shard),
    KEY version (datastore, name, number),
    KEY made_at (made_at)
) ENGINE=InnoDB;

-- Tokens (I17), on every cluster. Only revoked_at of a row changes, and it only becomes earlier.
CREATE TABLE IF NOT EXISTS schemaless.token (
    digest BINARY(32) NOT NULL PRIMARY KEY COMMENT 'SHA-256 of the token',
    name VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    datastores TEXT NOT NULL COMMENT 'JSON list of names, * for all',
    scope VARCHAR(8) CHARACTER SET ascii NOT NULL,
    created_at DATETIME(6) NOT NULL,
    expires_at DATETIME(6) NOT NULL,
    revoked_at DATETIME(6) NULL
) ENGINE=InnoDB;

-- What administrators did, on whichever cluster could be reached.
CREATE TABLE IF NOT EXISTS schemaless.admin_action (
    action_id BIGINT UNSIGNED NOT NULL AUTO_INCREMENT PRIMARY KEY,
    at DATETIME(6) NOT NULL,
    who VARCHAR(96) NOT NULL,
    what VARCHAR(255) NOT NULL,
    peer VARCHAR(64) NOT NULL,
    outcome VARCHAR(64) NOT NULL,
    KEY at (at)
) ENGINE=InnoDB;

-- Who is master of a cluster. Controllers write it on every server, unlogged. The higher (epoch, controller,
-- revision) counts.
CREATE TABLE IF NOT EXISTS schemaless.appointment (
    cluster VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL PRIMARY KEY,
    epoch BIGINT UNSIGNED NOT NULL,
    controller VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    revision INT UNSIGNED NOT NULL COMMENT 'counts changes under one ballot',
    master VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL COMMENT 'a node of the topology file',
    is_open TINYINT NOT NULL COMMENT '0 while the master changes',
    voters TEXT NOT NULL COMMENT 'JSON list of the minions that must be heard before another master is opened',
    generation INT UNSIGNED NOT NULL COMMENT 'begins in each shard at the opening, 0 for none',
    changed_at DATETIME(6) NOT NULL
) ENGINE=InnoDB;

-- Where shards live that were moved, or are about to be. On every cluster: the highest number counts.
CREATE TABLE IF NOT EXISTS schemaless.placement (
    datastore VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    shard INT UNSIGNED NOT NULL,
    number INT UNSIGNED NOT NULL COMMENT 'counts the changes of this row',
    home VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    coming VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NULL COMMENT 'the cluster that may become its home at any moment',
    changed_at DATETIME(6) NOT NULL,
    PRIMARY KEY (datastore, shard)
) ENGINE=InnoDB;

-- One row for each shard that comes to this cluster, or came, on its master: whether the switch counts is decided here.
CREATE TABLE IF NOT EXISTS schemaless.shard_move (
    datastore VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    shard INT UNSIGNED NOT NULL,
    source VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL COMMENT 'the cluster that it comes from',
    target VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL COMMENT 'this cluster',
    state VARCHAR(16) CHARACTER SET ascii COLLATE ascii_bin NOT NULL COMMENT 'copying, ready, closing, open or complete',
    is_back TINYINT NOT NULL COMMENT '1: the shard lived here, and follows its present home so that a switch can be reversed',
    attempt INT UNSIGNED NOT NULL COMMENT 'of a switch: a process that is late names an earlier one',
    epoch BIGINT UNSIGNED NOT NULL COMMENT 'of the source when it was to be closed: in another one it may have lost cells',
    generation INT UNSIGNED NOT NULL COMMENT 'of the source when the cells were compared',
    copied BIGINT UNSIGNED NOT NULL COMMENT 'cells up to it are here, and were compared with the source',
    digest CHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL COMMENT 'of these cells, as they are here',
    head BIGINT UNSIGNED NOT NULL COMMENT 'of the source, as it was seen last',
    cells_s INT UNSIGNED NOT NULL COMMENT 'how many cells a second were copied lately',
    lag_max_ms INT UNSIGNED NOT NULL COMMENT 'copying waits while a minion is further behind',
    commit_max_ms INT UNSIGNED NOT NULL COMMENT 'copying waits while a commit takes longer',
    pause_us BIGINT UNSIGNED NULL COMMENT 'for how long the switch kept the shard closed, NULL: not switched',
    told VARCHAR(300) CHARACTER SET utf8mb4 NOT NULL COMMENT 'why it is not further',
    begun_at DATETIME(6) NOT NULL,
    changed_at DATETIME(6) NOT NULL,
    PRIMARY KEY (datastore, shard)
) ENGINE=InnoDB;

-- What this server promised: it obeys no controller of a lower (epoch, controller). Unlogged, and it counts only under
-- the server's own id.
CREATE TABLE IF NOT EXISTS schemaless.promise (
    server_id INT UNSIGNED NOT NULL PRIMARY KEY,
    epoch BIGINT UNSIGNED NOT NULL,
    controller VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    promised_at DATETIME(6) NOT NULL
) ENGINE=InnoDB;

-- What operators want of a cluster's controller. Written to every master. The latest counts.
CREATE TABLE IF NOT EXISTS schemaless.topology_order (
    cluster VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL PRIMARY KEY,
    kind VARCHAR(16) CHARACTER SET ascii COLLATE ascii_bin NOT NULL COMMENT 'switch, promote, open, acknowledge, rejoin, add-cluster, add-node or remove-node',
    node VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NULL,
    without_nodes TEXT NOT NULL COMMENT 'JSON list of servers that may stay unheard, because somebody fenced them',
    actor VARCHAR(200) CHARACTER SET utf8mb4 NOT NULL,
    state VARCHAR(16) CHARACTER SET ascii COLLATE ascii_bin NOT NULL COMMENT 'open, done, refused or failed',
    told TEXT NOT NULL,
    job VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    changed_at DATETIME(6) NOT NULL,
    step VARCHAR(16) CHARACTER SET ascii COLLATE ascii_bin NOT NULL COMMENT 'how far a rejoin is: begun or made anew',
    epoch BIGINT UNSIGNED NOT NULL COMMENT 'that the server of a rejoin promised when it was begun'
) ENGINE=InnoDB;

-- What controllers did, step by step. Unlogged, on every server that they reached.
CREATE TABLE IF NOT EXISTS schemaless.topology_step (
    cluster VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    epoch BIGINT UNSIGNED NOT NULL,
    controller VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    step VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    told TEXT NOT NULL,
    at DATETIME(6) NOT NULL,
    PRIMARY KEY (cluster, at, step)
) ENGINE=InnoDB;

-- What the controller makes of a cluster now. It says so again every ten seconds. Unlogged, on every server.
CREATE TABLE IF NOT EXISTS schemaless.topology_state (
    cluster VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL PRIMARY KEY,
    state VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL COMMENT 'healthy, silent, dead and so on',
    why TEXT NOT NULL,
    nodes TEXT NOT NULL COMMENT 'JSON list of the servers with their states',
    controller VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    changed_at DATETIME(6) NOT NULL
) ENGINE=InnoDB;

-- What a server had and its cluster's master never got: the tail of a former master, kept before the server is made anew.
-- Each cell is put again through the ordinary path. Rows are never deleted.
CREATE TABLE IF NOT EXISTS schemaless.diverged (
    number BIGINT UNSIGNED NOT NULL AUTO_INCREMENT PRIMARY KEY,
    server VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL COMMENT 'a node of the topology file',
    epoch BIGINT UNSIGNED NOT NULL COMMENT 'of its own heads, under which it wrote the last of them',
    kind VARCHAR(8) CHARACTER SET ascii COLLATE ascii_bin NOT NULL COMMENT 'cell, buffer or conflict: the table that it was in',
    datastore VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    shard INT UNSIGNED NOT NULL,
    row_key BINARY(16) NOT NULL,
    column_name VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    ref_key BIGINT NOT NULL,
    body MEDIUMBLOB NOT NULL,
    digest BINARY(32) NOT NULL COMMENT 'SHA-256 of body',
    cause VARCHAR(300) CHARACTER SET ascii COLLATE ascii_bin NULL,
    idempotency_key VARCHAR(200) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NULL COMMENT 'of the POST that wrote the cell',
    generation INT UNSIGNED NOT NULL COMMENT 'with added_id: where the server had it, 0 for one that had no place',
    added_id BIGINT UNSIGNED NOT NULL,
    outcome VARCHAR(16) CHARACTER SET ascii COLLATE ascii_bin NULL COMMENT 'stored, already_stored or conflict, NULL: not put again yet',
    home_generation INT UNSIGNED NULL COMMENT 'with home_added_id: where its home has the cell under its key',
    home_added_id BIGINT UNSIGNED NULL,
    kept_at DATETIME(6) NOT NULL,
    UNIQUE KEY cell (server, epoch, kind, datastore, row_key, column_name, ref_key, digest),
    KEY row_key (datastore, row_key),
    KEY waiting (server, epoch, outcome, number)
) ENGINE=InnoDB;

-- What is to be erased: bodies of cells of one row (I19). Each erasure has a row on every master, which says what was done
-- on that cluster. Whoever finds a master without it writes it there. Rows are never deleted.
CREATE TABLE IF NOT EXISTS schemaless.erasure (
    erasure BIGINT UNSIGNED NOT NULL PRIMARY KEY,
    datastore VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    shard INT UNSIGNED NOT NULL,
    row_key BINARY(16) NOT NULL,
    column_name VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NULL COMMENT 'NULL: all columns',
    ref_key BIGINT NULL COMMENT 'NULL: all versions',
    reason TEXT CHARACTER SET utf8mb4 NOT NULL,
    who VARCHAR(96) NOT NULL,
    ordered_at DATETIME(6) NOT NULL COMMENT 'by the clock of the home, and not before its last cell: later cells are not meant',
    here_at DATETIME(6) NOT NULL COMMENT 'the same by the clock of this master: what was buffered here later is not meant',
    until BIGINT UNSIGNED NULL COMMENT 'on the home: cells up to this added_id are meant, NULL: nothing was erased yet',
    entry BIGINT UNSIGNED NULL COMMENT 'on the home: the added_id of its last entry in the log',
    places MEDIUMTEXT NOT NULL COMMENT 'JSON: what was found and removed on this cluster, by place',
    done_at DATETIME(6) NULL COMMENT 'when this cluster was searched to the end',
    KEY row_key (datastore, row_key),
    KEY due (done_at, ordered_at)
) ENGINE=InnoDB;

-- name: entity
CREATE DATABASE IF NOT EXISTS %(database)s CHARACTER SET utf8mb4;

CREATE TABLE IF NOT EXISTS %(database)s.entity (
    added_id BIGINT UNSIGNED NOT NULL PRIMARY KEY COMMENT 'dense, given under the shard_head lock',
    generation INT UNSIGNED NOT NULL,
    row_key BINARY(16) NOT NULL,
    column_name VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    ref_key BIGINT NOT NULL,
    body MEDIUMBLOB NOT NULL COMMENT 'zlib over MessagePack',
    created_at DATETIME(6) NOT NULL,
    cause VARCHAR(300) CHARACTER SET ascii COLLATE ascii_bin NULL COMMENT 'who wrote it, and for which cell',
    erased BIGINT UNSIGNED NULL COMMENT 'the erasure that emptied the body',
    erased_at DATETIME(6) NULL,
    UNIQUE KEY cell (row_key, column_name, ref_key)
) ENGINE=InnoDB;

-- name: shard
INSERT IGNORE INTO schemaless.shard_generation VALUES (%(datastore)s, %(shard)s, 1, 1, UTC_TIMESTAMP(6));

-- Last: a head means that the shard is whole. Its epoch is the one that this master was appointed with by now.
INSERT IGNORE INTO schemaless.shard_head VALUES (%(datastore)s, %(shard)s, 1, 0, '1970-01-01',
    (SELECT COALESCE(MAX(epoch), 0) FROM schemaless.appointment WHERE cluster = %(cluster)s), NULL);
