"""ride: writes a trip and reads it, and bills every trip that is written. The example of the README.

python examples/ride.py
schemaless triggers run examples/ride.py --datastore mezzanine
"""

from schemaless import Client, TriggerCell, trigger

TRIP = "5b1d5b2e-8d5a-4a3e-9a53-4f0f6a3f2a11"


@trigger(column="BASE")  # called at least once for every cell, in order
def bill_rider(cell: TriggerCell) -> None:  # when it raises, the call is made again later
    print(f"billed {cell.body['fare']['amount']} for trip {cell.row_key}", flush=True)


if __name__ == "__main__":
    with Client(datastore="mezzanine") as client:
        client.put_cell(TRIP, "BASE", 1, {"driver": "d-17", "fare": {"amount": 12.5}})
        print(client.get_cell_latest(TRIP, "BASE").fare["amount"])  # 12.5
        print(client.get_cell_latest(TRIP, "STATUS").is_completed)  # None: a missing cell has no fields
