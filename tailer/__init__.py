"""Shards to Kafka: every cell exactly once and in order (I7). ARCHITECTURE.md, "The log".

shard_progress    one shard: its state, how far it is published, and the proof of its next cells. Pure
shard_queue       the shards of a partition, in the order of their passes, and how a pass is shared among them
cluster_reader    reads one cluster's log, from its master or from a minion
head_watch        finds which heads moved
slots             how many transactions and openings are in flight
partition_tail    reads and publishes one partition
owned_partition   a partition from its assignment to its revocation
group_member      a membership in the group that assigns partitions
datastore_tailer  one datastore: partitions come and go as the group decides
service           all datastores of the catalogue
"""
