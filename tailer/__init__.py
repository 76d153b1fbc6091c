"""Shards to Kafka: every cell exactly once and in order (I7). ARCHITECTURE.md, "The log".

turn              how many cells of each shard one transaction takes: pure
shard_tail        how far one shard has been published, and what proves its next cells: pure
shard_tails       the shards of a partition: which wait for a turn, which are put aside or refused
source            one cluster's log, from its master or from a minion
head_watch        which heads moved
tail              one partition
datastore_tailer  one datastore: partitions come and go as the group decides
service           all datastores of the catalogue
"""
