"""The Python client. Its pure core builds requests and reads responses (requests, put_batch, tail, exchange, attempts).

Two thin drivers, `Client` and `AsyncClient`, move the bytes. Nothing in here knows MySQL or Kafka.
"""
