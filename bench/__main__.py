"""Entry point of `python -m bench`."""

import signal
import sys

from bench.cli import main

if __name__ == "__main__":
    # As an exception, a termination also ends the worker that is running.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    raise SystemExit(main())
