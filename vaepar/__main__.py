"""The command ``vaepar`` and ``python -m vaepar``."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command line and end the process with its exit code."""
    from vaepar.cli.main import run
    from vaepar.cli.streams import guard_streams

    guard_streams()
    code = run(sys.argv[1:])
    # Everything is written, flushed and closed. Python's own end would take threads of PyTorch with it in an order
    # that now and then aborts the process, and with it the exit code.
    os._exit(code)


if __name__ == "__main__":
    main()
