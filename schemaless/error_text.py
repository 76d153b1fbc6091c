"""The text of a failure: the traceback that is stored, and the one line that stands for it in lists and logs."""

from __future__ import annotations

import re
import traceback

_CHAINED = re.compile(
    r"\n(?:The above exception was the direct cause of the following exception|"
    r"During handling of the above exception, another exception occurred):\n\n"
)
_GROUP_MARGIN = re.compile(r"^ *[|+] ?")
_HEADER = re.compile(r"^Traceback\b|Traceback \(most recent call last\):$")


def error_text(error: BaseException, characters_max: int) -> str:
    """Returns the traceback of an error. A long one loses its outer frames, and a long message its end."""
    text = "".join(traceback.format_exception(error))
    if len(text) <= characters_max:
        return text
    own = "".join(traceback.format_exception_only(error))
    frames = text.removesuffix(own) if text.endswith(own) else ""
    own = own[: characters_max if not frames else characters_max // 2]
    _, _, whole_lines = frames[-(characters_max - len(own)) :].partition("\n")
    return whole_lines + own


def error_summary(text: str, characters_max: int = 300) -> str:
    """Returns the first line of the error that a text of `error_text` tells: its class and how its message begins.

    The last line would be the end of the message, such as a link to documentation.
    """
    lines = [_GROUP_MARGIN.sub("", line) for line in _CHAINED.split(text.rstrip().lstrip("\n"))[-1].split("\n")]
    frames = [number for number, line in enumerate(lines) if line.startswith('  File "')]
    own = [line for line in lines[frames[0] if frames else 0 :] if line.strip() and not line.startswith(" ")]
    return next((line for line in own if not _HEADER.search(line)), lines[0])[:characters_max]
