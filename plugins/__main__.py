"""`smg-servicer`: look at an installation, or see it work."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="smg-servicer", description="gRPC workers behind the SMG router")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    doctor = commands.add_parser("doctor", help="tell whether every installed engine can serve, and what to do if not")
    doctor.add_argument("--json", action="store_true", help="print the report as JSON")
    commands.add_parser(
        "demo", help="start a tiny model, a worker and the router, and send one request", add_help=False
    )
    args, rest = parser.parse_known_args(arguments)
    if args.command == "demo":
        from .demo.run import run

        return run(arguments[arguments.index("demo") + 1 :])
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    from .hooks.doctor import run as examine

    return examine(json=args.json)


if __name__ == "__main__":
    sys.exit(main())
