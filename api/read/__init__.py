"""How a read finds the node that answers it."""
