"""Marks tests of packages that need not be installed, and that take seconds to import."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skip where one of the packages is missing, which the tests import themselves."""
    missing = [package for package in packages if find_spec(package) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)}: not installed")
