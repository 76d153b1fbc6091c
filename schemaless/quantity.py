"""Quantities in sentences for people: a number with its noun in the singular or the plural."""

from __future__ import annotations


def quantity(count: int, noun: str) -> str:
    """Returns a count and its noun, as "1 cell", "0 cells", "2 entries" or "3 indexes"."""
    return f"{count} {noun_for(count, noun)}"


def noun_for(count: int, noun: str) -> str:
    """Returns the noun as it stands behind a count."""
    return noun if count == 1 else plural(noun)


def plural(noun: str) -> str:
    """Returns the plural of a noun of ours. Of several words the last one changes."""
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{noun[:-1]}ies"
    return f"{noun}es" if noun.endswith(("s", "x", "ch", "sh")) else f"{noun}s"
