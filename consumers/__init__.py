"""Consumers: runs trigger programs. A program is a module with functions marked by @trigger."""
