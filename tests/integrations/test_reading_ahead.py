"""One item is made ahead, by a thread that ends with whoever reads."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Generator
from contextlib import closing
from weakref import WeakSet

import pytest

from rgpr.integrations.ray.ahead import ahead

PATIENCE = 60  # seconds after which a thread that never comes fails the test


class Item:
    """Something that can be counted while it is there."""

    def __init__(self, number: int) -> None:
        self.number = number


def readers() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith("rgpr-reads-ahead")]


def test_the_next_item_is_made_while_the_caller_has_one() -> None:
    made = [threading.Event() for _ in range(3)]

    def items() -> Generator[int, None, None]:
        for number, event in enumerate(made):
            event.set()
            yield number

    found = []
    for number in ahead(items()):
        assert all(event.wait(PATIENCE) for event in made[: number + 2])
        found.append(number)
    assert found == [0, 1, 2]
    assert not readers()


def test_at_most_two_items_are_there() -> None:
    asked, there = 0, WeakSet[Item]()
    most = 0

    def items() -> Generator[Item, None, None]:
        nonlocal most
        for number in range(20):
            assert asked >= number  # no further ahead than one
            item = Item(number)
            there.add(item)
            most = max(most, len(there))
            yield item
            del item

    taken = ahead(items())
    for number in range(20):
        asked += 1
        item = next(taken)
        assert item.number == number
        del item
    assert next(taken, None) is None
    assert most <= 2


def test_an_error_comes_in_its_place() -> None:
    def items() -> Generator[int, None, None]:
        yield from range(2)
        raise ValueError("no third")

    found = []
    with pytest.raises(ValueError, match="no third"):  # noqa: PT012
        for number in ahead(items()):
            found.append(number)
    assert found == [0, 1]
    assert not readers()


def test_a_caller_that_stops_early() -> None:
    """What it reads is closed by the time it goes on."""
    closed: list[str] = []

    def items() -> Generator[int, None, None]:
        try:
            yield from range(10)
        finally:
            closed.append(threading.current_thread().name)

    with pytest.raises(ZeroDivisionError), closing(ahead(items())) as found:
        1 / next(found)
    assert len(closed) == 1
    # The thread that reads closes what it read from, so it was not in the middle of an item.
    assert closed[0].startswith("rgpr-reads-ahead")
    assert not readers()


@pytest.mark.skipif(os.name != "posix", reason="sends a signal to a thread")
def test_an_interrupt_while_the_caller_waits() -> None:
    closed, waits = [], threading.Event()

    def items() -> Generator[int, None, None]:
        try:
            yield 0
            assert waits.wait(PATIENCE)
            time.sleep(0.2)  # by then the caller waits for the next item
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            time.sleep(0.2)
            yield 1
        finally:
            closed.append(True)

    # A shell that starts a program in the background has it ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), closing(ahead(items())) as found:  # noqa: PT012
            assert next(found) == 0
            waits.set()
            next(found)
            next(found)
    finally:
        signal.signal(signal.SIGINT, before)
    assert closed == [True]
    assert not readers()
