"""Trigger programs over HTTP: their control, their parked cells, and what is reported of them."""
