"""Shards to Kafka: every cell exactly once and in order (I7). ARCHITECTURE.md, "The log".

shard_queue       the shards of a partition, in the order of their passes, and how far each is. Pure
cluster_reader    reads one cluster's log, from its master or from a minion, and finds which heads moved
partition_tail    reads and publishes one partition
datastore_tailer  one datastore: partitions come and go as the group decides
metrics           what a process publishes, and how far it is behind
service           all datastores of the catalogue
"""
