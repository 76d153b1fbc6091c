"""One seed for the randomness of a test run. It is printed at the end, and SCHEMALESS_TEST_SEED sets it."""

import os
import random

SEED = int(os.environ.get("SCHEMALESS_TEST_SEED") or random.SystemRandom().randrange(2**32))
os.environ["SCHEMALESS_TEST_SEED"] = str(SEED)  # the workers of a parallel run inherit it


def seeded(name: str) -> random.Random:
    """A generator of its own for each name: what one test draws doesn't depend on what others drew before."""
    return random.Random(f"{SEED} {name}")
