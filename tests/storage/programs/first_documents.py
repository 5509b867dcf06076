"""Threads read the first documents of a class at once, of one new class after the other."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass, field
from typing import Any

from ranktape.storage.format.documents import Count, converted

NUM_CLASSES = 250
NUM_THREADS = 8


def new_class() -> type:
    """A class that nobody has read a document as."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Document:
        number: Count
        first: dict[Count, dict[str, str]] = field(default_factory=dict)
        second: dict[Count, dict[str, str]] = field(default_factory=dict)
        third: dict[Count, list[Count]] = field(default_factory=dict)
        fourth: tuple[Count, ...] = ()
        fifth: dict[str, Count | None] = field(default_factory=dict)
        sixth: dict[str, dict[str, Count]] = field(default_factory=dict)

    return Document


def read(kind: type, ready: threading.Barrier) -> None:
    ready.wait()
    document: Any = converted({"number": 7, "fourth": [1, 2]}, kind, place="here")
    assert (document.number, document.fourth) == (7, (1, 2))


sys.setswitchinterval(1e-6)
for _ in range(NUM_CLASSES):
    barrier = threading.Barrier(NUM_THREADS)
    kind = new_class()
    threads = [threading.Thread(target=read, args=(kind, barrier)) for _ in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
sys.stdout.write("read\n")
