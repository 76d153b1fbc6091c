"""Progress records, read by the audit itself: how far each shard of a partition is promised to be published (I7)."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from schemaless.audit.report import FindingKind, Findings
from schemaless.bus.reader import PartitionReader
from schemaless.bus.topics import topic_id
from schemaless.errors import TopicMissing
from schemaless.position import Position
from schemaless.topology import Datastore

_TIMEOUT_S = 10.0


class _ProgressRecord(msgspec.Struct, frozen=True, gc=False):
    """Value of a progress record. Members that a later version adds are passed over. `topic` is an id, not a name."""

    shard: int
    generation: int
    added_id: int
    topic: str = ""
    digest: int | None = None


_decode = msgspec.msgpack.Decoder(_ProgressRecord).decode


class ProgressRecords:
    """Reads the progress of a datastore's partitions. A datastore without a progress topic has none."""

    def __init__(self, bootstrap: str, reader: PartitionReader, datastore: Datastore) -> None:
        self._reader = reader
        self._datastore = datastore
        self._topic_id = topic_id(bootstrap, datastore.topic, timeout_s=_TIMEOUT_S)
        try:
            topic_id(bootstrap, datastore.progress_topic, timeout_s=_TIMEOUT_S)
            self._exists = True
        except TopicMissing:
            self._exists = False

    def read(self, partition: int, findings: Findings) -> Mapping[int, Position]:
        """Returns the last recorded position of each shard that was published to the present cells topic.

        A record that is not ours is a finding: tailers skip such a partition.
        """
        topic, found = self._datastore.progress_topic, {}
        if not self._exists:
            return {}
        span = self._reader.committed_span(topic, partition)
        for records in self._reader.read(topic, partition, span):
            for record in records:
                try:
                    entry = _decode(record.value)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    detail = f"{topic} [{partition}] offset {record.offset} is not ours: {error}"
                    findings.add(FindingKind.PROGRESS_WRONG, -1, detail)
                    continue
                found[entry.shard] = entry
        return {
            shard: Position(shard, entry.generation, entry.added_id, digest=entry.digest)
            for shard, entry in found.items()
            if entry.topic in ("", self._topic_id) and shard in self._datastore.shards_of_partition(partition)
        }
