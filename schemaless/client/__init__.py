"""The Python client. Its pure core builds requests and reads responses (requests, answers, tail, exchange, attempts).

Two thin drivers, `Client` and `AsyncClient`, move the bytes. A script writes client.py from
async_client.py. Nothing in here knows MySQL or Kafka.
"""
