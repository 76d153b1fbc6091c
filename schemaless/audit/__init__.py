"""The independent checker: MySQL, topic, checkpoints and indexes side by side. It knows the promises and nothing else.

report             what was found, bounded
stored_cells       the cells of a shard in MySQL: density, order (I2 to I4)
shard_comparison   those cells beside the shard's records in the topic: pure (I7)
partition_audit    the records of a partition (I7, I8, I13)
consumer_audit     checkpoints (I9, I10)
index_audit        index entries (I11)
patience           how long tailers and consumers are waited for
run                all of it
"""
