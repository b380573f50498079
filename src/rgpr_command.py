"""Where the command ``rgpr`` starts: outside of the library, whose import takes the first second.

Ctrl-C in that second ends as it does later, by exit code 130 and without a traceback.
"""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> int:
    """Import the library and run the command; returns the exit status."""
    done = "before anything was done"
    try:
        from rgpr.cli import main as run

        done = "once more; what was finished is kept"
        return run()
    except KeyboardInterrupt:
        print(f"\ninterrupted {done}", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
