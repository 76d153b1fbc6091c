"""Ctrl-C ends a command without a traceback, also while it loads what it needs."""

import signal
import subprocess
import sys

import pytest

CHILD = """
import signal, sys

signal.signal(signal.SIGINT, signal.default_int_handler)


class Holds:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            print("it loads", flush=True)
            sys.stdin.read()


sys.meta_path.insert(0, Holds())
sys.argv = ["schemaless", "audit"]
from schemaless.command import main

main()
"""


@pytest.mark.parametrize(
    ("module", "status"),
    [
        ("schemaless.cli.examples", -signal.SIGINT),  # before any command is known
        ("schemaless.audit.run", 130),  # by the command itself
    ],
)
def test_ctrl_c_while_a_command_loads_leaves_no_traceback(module, status):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", CHILD.format(module=module)], text=True, **pipes) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "it loads\n"
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=120)
    assert (errors, child.returncode) == ("", status)


FINALIZED = """
import io, os, signal
from schemaless.cli.interrupts import until_interrupted

class Answer(io.RawIOBase):
    def close(self):
        os.kill(os.getpid(), signal.SIGINT)

before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGALRM)
with until_interrupted():
    Answer()
    print("the interrupt is lost", flush=True)
    signal.pause()
print("heard", (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGALRM)) == before)
"""


def test_an_interrupt_that_is_lost_comes_again():
    """CPython drops it where it is raised while an `io` object is finalized."""
    done = subprocess.run([sys.executable, "-c", FINALIZED], capture_output=True, text=True, check=False, timeout=120)
    assert (done.stdout, done.stderr) == ("the interrupt is lost\nheard True\n", "")


def test_a_command_in_the_background_ignores_ctrl_c_of_the_foreground():
    """A shell without job control starts it so. It runs to its end."""
    code = "import signal, os, schemaless.command, schemaless.__main__ as m\n"
    code += "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    code += "m.main = lambda: (os.kill(os.getpid(), signal.SIGINT), print('done'))\n"
    done = subprocess.run(
        [sys.executable, "-c", code + "schemaless.command.main()"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
