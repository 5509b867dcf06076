"""What does a rule such as `layer_type=attention every=100 where="call > 0"` say, word by word?

    rules  = rule { ";" rule }
    rule   = item { white-space item }
    item   = name "=" value
    value  = bare | quoted
    bare   = characters other than white-space, quotes and ";"
    quoted = characters in single or double quotes, with a backslash before a quote or a backslash

Names are a record's fields, `where`, `every`, `samples` and `keep`; a hyphen in a name is an underscore. Values are
those of the options of the same names. The text is data: it is read by the expression below, and nothing of it is
ever run.
"""

from __future__ import annotations

import re

from ranktape.errors import UsageError

MAX_LENGTH = 20_000
"""Characters of a text."""

_ITEM = re.compile(
    r"""\s*(?:
      (?P<end>\Z)
    | (?P<next>;)
    | (?P<name>[A-Za-z][\w.-]*)=(?:'(?P<single>(?:[^'\\]|\\.)*)'|"(?P<double>(?:[^"\\]|\\.)*)"|(?P<bare>[^\s'";]+))
      (?=[\s;]|\Z)
    )""",
    re.VERBOSE | re.DOTALL,
)

_CONTEXT = 30
"""Characters shown from a mistake on."""


def parse_rules(text: str, *, label: str) -> list[dict[str, str]]:
    """The rules of a text, each with the text of every name; `label` is what messages call the text.

    Raises:
        UsageError: it is none; says where, and what was expected there.
    """
    if len(text) > MAX_LENGTH:
        raise UsageError(f"{label} has {len(text)} characters: give at most {MAX_LENGTH}")
    rules: list[dict[str, str]] = [{}]
    start = 0
    while True:
        match = _ITEM.match(text, start)
        if match is None:
            rest = text[start:].lstrip()
            raise UsageError(
                f"{label}: expected NAME=VALUE at character {len(text) - len(rest) + 1}, found {rest[:_CONTEXT]!r}: "
                f"write a rule as in \"layer_type=attention every=100 where='call > 0'\""
            )
        start = match.end()
        if match["end"] is not None:
            break
        if match["next"] is not None:
            rules.append({})
            continue
        name = match["name"].replace("-", "_")
        if name in rules[-1]:
            raise UsageError(f"{label} says {name} twice in one rule: separate alternatives with commas")
        quoted = match["single"] if match["single"] is not None else match["double"]
        rules[-1][name] = match["bare"] if quoted is None else re.sub(r"\\(.)", r"\1", quoted, flags=re.DOTALL)
    if not all(rules):
        raise UsageError(f"{label} {text[:_CONTEXT]!r} has a rule that says nothing: write NAME=VALUE, or leave it out")
    return rules
