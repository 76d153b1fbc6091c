"""The indexer: keeps index tables current (I11), and tells the API about definitions and entries."""
