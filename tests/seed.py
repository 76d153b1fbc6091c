"""One seed for the randomness of a test run. It is printed at the end, and SCHEMALESS_TEST_SEED sets it.

A run repeats what the run before it drew, so that a change fails for its own faults only. `make faults` draws anew.
"""

import os
import random

_DRAWN = random.SystemRandom().randrange(2**32) if "SCHEMALESS_FAULTS_LONG" in os.environ else 0
SEED = int(os.environ.get("SCHEMALESS_TEST_SEED") or _DRAWN)
os.environ["SCHEMALESS_TEST_SEED"] = str(SEED)  # the workers of a parallel run inherit it


def seeded(name: str) -> random.Random:
    """A generator of its own for each name: what one test draws doesn't depend on what others drew before."""
    return random.Random(f"{SEED} {name}")
