"""The independent checker: compares MySQL, topic, checkpoints and indexes. It knows the promises and nothing else.

report           findings, bounded, and how long an audit waits
shard_audit      the cells of a shard in MySQL (I2 to I4), beside the shard's records in the topic (I7)
partition_audit  the records of a partition (I7, I8, I13)
consumer_audit   checkpoints (I9, I10)
index_audit      index entries (I11)
run              all of it
"""
