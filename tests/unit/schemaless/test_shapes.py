"""A shape that several threads decode first."""

import subprocess
import sys
import textwrap

FIRST_DECODED = """
    import sys, threading
    import msgspec
    from schemaless.shapes import shape

    sys.setswitchinterval(1e-6)

    def decode(kind, together):
        together.wait()
        assert msgspec.convert({"a": {"b": [{"c": 1}]}}, shape(dict[str, kind]))["a"].b[0].c == 1

    for _ in range(300):
        inner = msgspec.defstruct("Inner", [("c", int)])
        outer = msgspec.defstruct("Outer", [("b", list[inner])])
        together = threading.Barrier(4)
        threads = [threading.Thread(target=decode, args=(outer, together)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
"""


def test_threads_that_meet_a_shape_at_once_end_no_process():
    subprocess.run([sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(FIRST_DECODED)], check=True)
