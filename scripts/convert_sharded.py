"""Convert the checkpoint folder of a sharded run into plain files, in one process.

    python scripts/convert_sharded.py checkpoints/full_sft_512_resume --weights out/full_sft_512.pth
    python scripts/convert_sharded.py checkpoints/full_sft_512_resume --state checkpoints/full_sft_512_resume.pth

The weights file is like that of any run. Any run, sharded or not, on any number of ranks, can resume from the state.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run the code beside this file, installed or not

from common.command_line import Parser, one_line_errors
from common.durable_files import atomic_write
from common.errors import UserError, reason
from trainer.components.parallel import half_precision
from trainer.components.sharded import read_rest, with_tensors
from trainer.components.state_files import UNREADABLE, write_file


def convert(folder: Path, weights: Path | None, state: Path | None) -> None:
    """Write plain files from a folder: the fp16 weights, and the state to resume from.

    Raises:
        UserError: the folder is not a readable checkpoint, or a file cannot be written.
    """
    try:
        full = with_tensors(read_rest(folder))
    except UNREADABLE as error:
        raise UserError(f"{folder}: not a readable folder of a sharded run ({reason(error)})") from error
    if weights is not None:
        atomic_write(weights, lambda file: write_file(half_precision(full["model"]), file))
    if state is not None:
        atomic_write(state, lambda file: write_file(full, file))


def main() -> None:
    """Read the command line and convert."""
    parser = Parser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("folder", type=Path, help="checkpoint folder of a sharded run")
    parser.add_argument("--weights", type=Path, help="file for the fp16 weights")
    parser.add_argument("--state", type=Path, help="file to resume from, <save_weight>_<hidden_size>[_moe]_resume.pth")
    args = parser.parse_args()
    if args.weights is None and args.state is None:
        raise UserError("nothing to write: give --weights, --state or both")
    convert(args.folder, args.weights, args.state)
    for path in filter(None, (args.weights, args.state)):
        print(f"wrote {path}")


if __name__ == "__main__":
    with one_line_errors():
        main()
