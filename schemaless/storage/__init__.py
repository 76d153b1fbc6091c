"""MySQL: the only importer of PyMySQL and asyncmy. ARCHITECTURE.md, "Storage", tells how the files hang together."""
