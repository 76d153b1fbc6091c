"""The contract: each call of the API and each shape that crosses HTTP, said once.

Handlers, documentation, clients and commands derive from it. It knows nouns only.
"""
