"""Cuts the text of a rule into its condition and its selection: `absmax > 448 where tensor_name == 'input'`.

Both are expressions in the grammar of `ranktape.storage.query.where`: the condition is about metrics, the selection
about the fields of records.
"""

from __future__ import annotations

import re

from ranktape.errors import UsageError

_WORDS = re.compile(
    r"""'(?:[^'\\]|\\.)*' | "(?:[^"\\]|\\.)*" | (?<![\w.])(?P<where>where)(?![\w.])""", re.VERBOSE | re.IGNORECASE
)


def split_rule(text: str) -> tuple[str, str | None]:
    """The condition, and what selects the records that it is about; None for all of them.

    Raises:
        UsageError: there are several selections.
    """
    places = [found for found in _WORDS.finditer(text) if found["where"]]
    if len(places) > 1:
        raise UsageError(f"rule {text!r} has 'where' {len(places)} times: give it once, and 'and'")
    if not places:
        return text.strip(), None
    return text[: places[0].start()].strip(), text[places[0].end() :].strip()
