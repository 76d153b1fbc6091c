"""The Python client. A pure core says what to ask and how to read it (requests, answers, hosts, attempts); two thin
drivers, `Client` and `AsyncClient`, move the bytes. Nothing in here knows MySQL or Kafka.
"""
