"""`schemaless tail` on a real broker: what it shows, where it begins and ends, what it says of a topic gone wrong."""

import json
import os
import signal
import subprocess
import sys

import msgpack
import pytest
from typer.testing import CliRunner

from schemaless.__main__ import app
from schemaless.errors import Invalid, NotFound
from schemaless.location import GenerationStart
from tests.topic_harness import announce, delete_before, new_topic, produce_foreign, publish, stored_cell
from tests.waiting import LIMIT_S


@pytest.fixture
def tail(kafka):
    def run(datastore, *options):
        return CliRunner().invoke(app, ["tail", datastore.name, "--kafka", kafka, "--no-follow", *options])

    return run


@pytest.fixture(scope="module")
def whole(kafka):
    """Two partitions, each with cells 1 to 6 of two shards; the last transaction announces a generation."""
    datastore = new_topic(kafka, shards=4, partitions=2)
    publish(kafka, datastore, [stored_cell(shard, n) for n in range(1, 7) for shard in range(4)])
    announce(kafka, datastore, 0, GenerationStart(2, 7))
    return datastore


def added_ids(result, shard=0):
    return [found["added_id"] for found in map(json.loads, result.stdout.splitlines()) if found["shard"] == shard]


def test_a_whole_topic_is_read_and_verified(tail, whole):
    """All partitions, each in order; a generation is told; exit status 0."""
    result = tail(whole, "--from", "beginning", "--json")
    assert result.exit_code == 0, result.output
    assert [added_ids(result, shard) for shard in range(4)] == [[1, 2, 3, 4, 5, 6]] * 4
    assert result.stderr.splitlines() == [
        "shard 0: generation 2 starts at 7",
        "25 records verified: no hole, no repeat, no disorder",
    ]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--from", "end"], []),
        (["--from", "beginning", "--limit", "3", "--partition", "0"], [1, 2]),
        (["--from", "1970-01-01T00:00:04Z"], [4, 5, 6]),
        (["--from", "2200-01-01T00:00:00Z"], []),
        (["--offset", "0:4"], [3, 4, 5, 6]),
        (["--from", "beginning", "--shard", "1"], []),
        (["--from", "beginning", "--column", "OTHER"], []),
    ],
)
def test_it_begins_and_ends_where_it_is_told(tail, whole, options, expected):
    """End, time, offset; a limit; filters."""
    result = tail(whole, "--json", *options)
    assert (result.exit_code, added_ids(result)) == (0, expected), result.output


def test_messagepack_is_what_lies_in_the_topic(tail, whole):
    """One value after the other."""
    unpacker = msgpack.Unpacker()
    unpacker.feed(tail(whole, "--from", "beginning", "--partition", "1", "--msgpack").stdout_bytes)
    assert sorted((value["shard"], value["added_id"]) for value in unpacker) == [
        (s, n) for s in (1, 3) for n in range(1, 7)
    ]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (["--offset", "0:9999"], "holds offsets 0 to"),
        (["--offset", "7:0"], "partition 7 is not read"),
        (["--offset", "x"], "PARTITION:OFFSET"),
        (["--partition", "2"], "must be from 0 to 1"),
        (["--from", "yesterday"], "RFC 3339"),
    ],
)
def test_a_place_that_the_topic_has_not_is_refused(tail, whole, options, field):
    """One line that says what it holds."""
    error = tail(whole, *options).exception
    assert isinstance(error, Invalid)
    assert field in str(error)


def test_a_topic_that_is_not_there_is_told(kafka):
    """Nothing is made by asking for it."""
    result = CliRunner().invoke(app, ["tail", "nothing_of_that_name", "--kafka", kafka])
    assert isinstance(result.exception, NotFound)


def test_a_hole_is_named_and_ends_with_status_1(kafka):
    """So are a repeat, and records that are not ours; those are no fault."""
    datastore = new_topic(kafka)
    publish(kafka, datastore, [stored_cell(0, n) for n in (1, 2, 5, 6)])
    produce_foreign(kafka, datastore, [b"", b"not ours"])
    publish(kafka, datastore, [stored_cell(0, 6), stored_cell(1, 1)])
    command = [sys.executable, "-m", "schemaless", "tail", datastore.name, "--kafka", kafka, "--no-follow"]
    done = subprocess.run(
        [*command, "--from", "beginning", "--shard", "1"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert len(done.stdout.splitlines()) == 1
    told = done.stderr.splitlines()
    assert told[0] == "HOLE in shard 0: cells 3 to 4 are missing before 1:5 (partition 0, offset 2)"
    assert [line.split(":")[0] for line in told[1:3]] == ["not ours", "not ours"]
    assert told[3].startswith("REPEAT in shard 0: 1:6 comes again after 1:6")
    assert told[4] == "8 records verified: 2 FAULTS, 2 foreign records"


def test_a_beginning_that_was_cut_off_is_no_hole(kafka, tail):
    """The first record that is left says where the check begins."""
    datastore = new_topic(kafka)
    publish(kafka, datastore, [stored_cell(0, n) for n in range(1, 9)])
    delete_before(kafka, datastore, 5)
    result = tail(datastore, "--from", "beginning", "--json")
    assert (result.exit_code, added_ids(result)) == (0, [6, 7, 8]), result.output


def test_it_follows_until_it_is_interrupted(kafka):
    """What comes is shown at once; Ctrl-C is quiet, and the verdict comes last."""
    datastore = new_topic(kafka)
    command = [sys.executable, "-m", "schemaless", "tail", datastore.name, "--kafka", kafka, "--from", "beginning"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            publish(kafka, datastore, [stored_cell(0, 1)])
            assert process.stdout.readline().startswith("0:1:1 ")
            publish(kafka, datastore, [stored_cell(0, 2)])
            assert process.stdout.readline().startswith("0:1:2 ")
            process.send_signal(signal.SIGINT)
            assert process.wait(LIMIT_S) == 0
        finally:
            process.kill()
        assert process.stderr.read() == "2 records verified: no hole, no repeat, no disorder\n"


def test_a_reader_that_has_enough_ends_it_quietly(kafka, whole):
    """A broken pipe is no error."""
    read, write = os.pipe()
    command = [sys.executable, "-m", "schemaless", "tail", whole.name, "--kafka", kafka, "--from", "beginning"]
    with subprocess.Popen(command, stdout=write, stderr=subprocess.PIPE, text=True) as process:
        os.close(write)
        os.close(read)
        assert process.wait(60) == 0
        assert "Traceback" not in process.stderr.read()
