"""How an index is queried over HTTP."""
