"""Index definitions and what they make of a row: pure functions, no I/O. An index is a function of cells (I11).

values      what a field may hold, and its forms: JSON, SQL parameters of a query, the shard field's text
definition  the declared index, parsed and validated
entry       the entry of a row from the newest cell of each column
transition  what an event of the log changes in which shard's index table
"""
