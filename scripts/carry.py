"""A run that moves: one file with the runs of a folder, which continues on another machine.

    python scripts/carry.py pack out/plan run.mmt               newest states, weights, records, settings
    python scripts/carry.py pack out/plan run.mmt --with_data   the training data, too
    python scripts/carry.py go run.mmt --stop_after 11h         on a fresh clone: unpack, train on, pack again
    python scripts/carry.py go run.mmt --data FOLDER            with data that are not in the pack

At the end, or when it is stopped, `go` replaces the pack and keeps the one before it as run.mmt.before. A
pack holds no code: the stages are this project's scripts with the settings that the pack lists. See
docs/moving.md.
"""

import sys
from pathlib import Path

# run the code beside this file, installed or not
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.command_line import Parser, one_line_errors  # first: without requirements it says so

# isort: split
from common.arguments import add_flag
from common.settings import StageArgs
from tools.carry.session import go, pack


def main() -> None:
    """Pack a folder of runs, or continue a pack."""
    parser = Parser(description=__doc__.split("\n", 1)[0])
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser)
    packing = commands.add_parser("pack", help="pack the runs of a folder into one file")
    packing.add_argument("folder", type=Path, help="--save_dir of the runs, such as out/plan")
    packing.add_argument("pack", type=Path, help="file to write, such as run.mmt")
    packing.add_argument("--with_data", action="store_true", help="pack the training data, too")
    going = commands.add_parser("go", help="unpack, train on, and pack again")
    going.add_argument("pack", type=Path, help="file that `pack` wrote; it is replaced at the end")
    going.add_argument(
        "--to", type=Path, help="folder to unpack into (default: out/NAME of the packed folder)"
    )
    going.add_argument("--data", type=Path, help="folder to search for data that are not in the pack")
    add_flag(going, StageArgs, "stop_after")
    args = parser.parse_args()
    if args.command == "pack":
        pack(args.folder, args.pack, args.with_data)
    else:
        go(args.pack, args.to, args.data, args.stop_after)


if __name__ == "__main__":
    with one_line_errors():
        main()
