"""Writes schemaless/client/client.py, the sync client, from async_client.py: `python deploy/write_sync_client.py`.

It drops `async` and `await` and replaces whole words and a few phrases by the tables below. ruff sorts the imports and
formats. Nothing else differs, so a call is written once.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ASYNC_FILE = ROOT / "schemaless" / "client" / "async_client.py"
SYNC_FILE = ROOT / "schemaless" / "client" / "client.py"

OPENING = "Client, the sync driver of the client's core. deploy/write_sync_client.py writes it from async_client.py."
ENDING = '''

SchemalessClient = Client
"""The name of the source texts."""
'''

PHRASES = {
    "Tasks of one loop may share it. Close it, or use `async with`.": (
        "Threads may share it. Close it, or use it in a `with`."
    ),
    "One task at a time may wait for its next cell.": "`next` waits for a cell. Threads can't share it.",
}
"""What docstrings say about tasks, and what they say about threads. They are replaced before the words."""

WORDS = {
    "AiohttpTransport": "Urllib3Transport",
    "AsyncBaseTransport": "BaseTransport",
    "AsyncClient": "Client",
    "AsyncEntryIterator": "EntryIterator",
    "AsyncHttpxTransport": "HttpxTransport",
    "AsyncIndex": "Index",
    "AsyncIterator": "Iterator",
    "AsyncProgram": "Program",
    "AsyncTail": "CellIterator",
    "AsyncTransport": "SyncTransport",
    "StopAsyncIteration": "StopIteration",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__anext__": "__next__",
    "aiohttp_transport": "urllib3_transport",
    "asyncio": "time",
}


def sync_source(async_source: str) -> str:
    """Returns the text of client.py for a text of async_client.py."""
    text = re.sub(r'\A""".*?"""', f'"""{OPENING}"""', async_source, flags=re.DOTALL)
    if gone := [each for each in (*PHRASES, *WORDS) if each not in text]:
        sys.exit(f"{ASYNC_FILE.name} no longer has {gone}: correct the tables of {Path(__file__).name}")
    for phrase, other in PHRASES.items():
        text = text.replace(phrase, other)
    text = re.sub(r"\b(async|await) ", "", text)
    text = re.sub(r"\w+", lambda word: WORDS.get(word[0], word[0]), text)
    sorted_text = _ruff("check", "--select", "I", "--fix", "--quiet", text=text + ENDING)
    return _ruff("format", text=sorted_text)


def _ruff(*command: str, text: str) -> str:
    """Returns what ruff makes of a text, by the rules that client.py is checked by."""
    command = (sys.executable, "-m", "ruff", *command, "--stdin-filename", str(SYNC_FILE), "-")
    return subprocess.run(command, cwd=ROOT, input=text, stdout=subprocess.PIPE, text=True, check=True).stdout


if __name__ == "__main__":
    SYNC_FILE.write_text(sync_source(ASYNC_FILE.read_text()))
