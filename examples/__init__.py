"""Programs that use the store."""
