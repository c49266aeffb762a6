"""`python -m stages.tracking`: close the runs of dead processes and send what waits."""

from __future__ import annotations

from pathlib import Path
import sys

from stages.command import command
from stages.tracking import settle


def main() -> int:
    with command("tracking"):
        closed = settle(Path.cwd())
        for name, status in closed.items():
            print(f"{name}: {status}")
        if not closed:
            print("nothing waits")
    return 0


if __name__ == "__main__":
    sys.exit(main())
