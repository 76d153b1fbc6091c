"""Puts through boto3 into DynamoDB Local. A script for the Python of a virtual environment that has only boto3.

Reads {"host", "at_a_time", "warm_up", "puts"} with [key, body] for each put, and writes what bench/client_load.py does.
"""

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import boto3
from botocore.config import Config

TABLE = "bench"
KEYS = {"row_key": "HASH", "cell": "RANGE"}


def main() -> None:
    plan = json.load(sys.stdin)
    dynamodb = boto3.client(
        "dynamodb",
        endpoint_url=plan["host"],
        region_name="local",
        aws_access_key_id="bench",
        aws_secret_access_key="bench",
        config=Config(max_pool_connections=plan["at_a_time"], proxies={}),
    )

    def put(trip: list[str]) -> None:
        key, body = trip
        dynamodb.put_item(
            TableName=TABLE,
            Item={"row_key": {"S": key}, "cell": {"S": "BASE.1"}, "body": {"S": body}},
            ConditionExpression="attribute_not_exists(row_key)",
        )

    dynamodb.create_table(
        TableName=TABLE,
        KeySchema=[{"AttributeName": key, "KeyType": kind} for key, kind in KEYS.items()],
        AttributeDefinitions=[{"AttributeName": key, "AttributeType": "S"} for key in KEYS],
        BillingMode="PAY_PER_REQUEST",
    )
    with ThreadPoolExecutor(plan["at_a_time"]) as threads:
        list(threads.map(put, plan["warm_up"]))
        wall, cpu = time.perf_counter(), time.process_time()
        list(threads.map(put, plan["puts"]))
        seconds, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    dynamodb.delete_table(TableName=TABLE)
    json.dump({"puts": len(plan["puts"]), "seconds": seconds, "cpu_s": cpu_s}, sys.stdout)


if __name__ == "__main__":
    main()
