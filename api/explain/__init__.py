"""The explanation of one row: what happened to it, and what it waits for."""
