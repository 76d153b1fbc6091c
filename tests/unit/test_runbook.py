"""The runbook's symptoms are messages of the code."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
RUNBOOK = ROOT / "docs" / "operating-the-log.md"
VARIES = re.compile(r"…|\bN\b")  # where a message has a value


def messages() -> Iterator[str]:
    """Every text in the packages that an operator of the log hears from, with … for the values of an f-string."""
    for path in (path for name in ("schemaless", "tailer") for path in (ROOT / name).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)


def test_every_symptom_is_a_message_of_the_code():
    """Whoever rewords a message corrects the line of the runbook that operators search for."""
    table = RUNBOOK.read_text().partition("\n## ")[0]
    rows = re.findall(r"^\|(.*?)\|.*?\|.*?\|$", table, re.MULTILINE)
    symptoms = [symptom for row in rows for symptom in re.findall(r"`(.+?)`", row)]
    assert len(symptoms) > 10, symptoms
    known = "\n".join(text.replace("\n", " ") for text in messages())
    patterns = {symptom: ".*".join(map(re.escape, VARIES.split(symptom))) for symptom in symptoms}
    assert [symptom for symptom, pattern in patterns.items() if not re.search(pattern, known)] == []
