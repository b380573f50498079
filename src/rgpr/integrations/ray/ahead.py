"""Reading ahead: while the caller works on one item, a thread makes the next."""

from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["ahead"]

T = TypeVar("T")


def ahead(items: Generator[T, None, None]) -> Generator[T, None, None]:
    """The items of a generator, of which a thread makes the next while the caller has one.

    At most two items exist at a time. An error of the generator is raised where its item would have
    come. If the caller stops early, such as by an error of its own or by Ctrl-C, the item that is
    being made is finished and dropped, and the generator is closed before the caller goes on.

    Args:
        items: The generator. All of it runs in one thread other than the caller's.
    """
    end = object()
    with ThreadPoolExecutor(1, "rgpr-reads-ahead") as thread:
        try:
            coming = thread.submit(next, items, end)
            while (item := coming.result()) is not end:
                coming = thread.submit(next, items, end)
                yield item  # type: ignore[misc]
        finally:
            thread.submit(items.close).result()
