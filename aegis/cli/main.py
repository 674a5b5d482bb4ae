"""The command line. Little is imported before Ctrl-C ends it quietly, and nothing heavy before a command runs.

Exit codes: 0; 1 where a running server refuses; 2 for everything a user can mend, told in one line; 130 at Ctrl-C.
"""

from __future__ import annotations

import sys

from aegis.cli.interrupt import ended_by_interrupt
from aegis.cli.standard_streams import prepare_streams


def main() -> None:
    """The `aegis` command."""
    prepare_streams()
    try:
        with ended_by_interrupt():
            from aegis.cli.commands import built, run

            tree = built()
        run(tree)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
