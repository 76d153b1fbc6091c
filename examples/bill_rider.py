"""bill_rider: the trigger of the source texts, as it stands there, with a card processor to call.

    SCHEMALESS_HOSTS=http://127.0.0.1:8000 schemaless triggers run examples.bill_rider --datastore mezzanine

It is idempotent because it looks for STATUS first. A kill between charge and STATUS charges again, if the processor
doesn't know the key. `examples/billing.py` closes that gap.

    CARD_PROCESSOR   where examples/card_processor.py listens
"""

from __future__ import annotations

import os

import httpx

from schemaless import SchemalessClient, trigger


class CouldNotBillRider(Exception):
    """Raised to be called again later."""


def call_to_credit_card_processor_for_billing_trip(trip):
    processor = os.environ.get("CARD_PROCESSOR", "http://127.0.0.1:8200")
    key = {"idempotency-key": str(trip.row_key)}
    return httpx.post(f"{processor}/charges/{trip.row_key}", headers=key, trust_env=False).json()["result"]


# fmt: off
# We instantiate a client for talking with the Schemaless instance.
schemaless_client = SchemalessClient(datastore='mezzanine')

# We register the bill_rider function for the BASE column.
@trigger(column='BASE')

def bill_rider(row_key):
   # row_key is the UUID of the trip    
   status = schemaless_client.get_cell_latest(row_key, 'STATUS')

   if status.is_completed:
       # This means we have already billed the rider.
       return

   # Otherwise we try to bill.

   # We fetch the base trip information from the BASE column
   trip_info = schemaless_client.get_cell_latest(row_key, 'BASE')  

   # We bill the the rider
   result = call_to_credit_card_processor_for_billing_trip(trip_info)

   if result != 'SUCCESS':
       # By raising an exception we let Schemaless triggers retry later
       raise CouldNotBillRider()

   # We billed the rider successfully and write it back to Mezzanine
   schemaless_client.put(row_key, status, body={'is_completed': True, 'result': result})
