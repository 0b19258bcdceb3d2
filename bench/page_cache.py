"""How much the system's page cache grows while something runs."""

from __future__ import annotations

import re
import threading
from pathlib import Path

_SAMPLE_SECONDS = 0.2


def read_page_cache() -> int | None:
    """Returns the bytes that the whole system caches of files; None where /proc tells none."""
    try:
        match = re.search(r"^Cached:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) * 1024 if match else None


class PageCacheGrowth:
    """Within this context, samples the page cache from a thread.

    Other programs' files count as well, so that a figure above what a run wrote means nothing.

    Attributes:
        grown_bytes: By how much the cache was larger than at the begin, at most; None where it
            cannot be read.
    """

    def __init__(self) -> None:
        self.grown_bytes: int | None = None
        self._begin = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample_until_ended, daemon=True)

    def __enter__(self) -> PageCacheGrowth:
        begin = read_page_cache()
        if begin is not None:
            self._begin, self.grown_bytes = begin, 0
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.grown_bytes is not None:
            self._ended.set()
            self._thread.join()
            self._sample()

    def _sample_until_ended(self) -> None:
        while not self._ended.wait(_SAMPLE_SECONDS):
            self._sample()

    def _sample(self) -> None:
        now = read_page_cache()
        if now is not None and self.grown_bytes is not None:
            self.grown_bytes = max(self.grown_bytes, now - self._begin)
