"""How a put becomes durable: the buffer row on a secondary, the entity row at home, and the outcome of both."""
