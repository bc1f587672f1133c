"""Write the quickstart's report from the results of its quiz and the metrics of its runs.

python scripts/demo/report.py --save_dir out/demo --report out/demo_report.json
"""

import json
import sys
from pathlib import Path

# run the code beside this file
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.command_line import Parser, one_line_errors
from common.errors import UserError
from trainer.report.metrics import read_metrics

RUNS = ("pretrain_256", "full_sft_256", "sft_only_256")


def main() -> None:
    """Read `quiz.json` and the metrics of a folder, write the report, print it."""
    parser = Parser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--save_dir", type=Path, required=True, help="folder of the runs, with quiz.json")
    parser.add_argument("--report", type=Path, required=True, help="JSON file to write")
    args = parser.parse_args()
    try:
        quiz = json.loads((args.save_dir / "quiz.json").read_text(encoding="utf-8"))["models"]
        right = {run: quiz[run]["figures"]["contains_answer"]["value"] for run in RUNS[1:]}
        last = [read_metrics(args.save_dir / f"{run}_metrics.jsonl")[-1] for run in RUNS]
        report = {
            "heldout_accuracy": round(right[RUNS[1]], 4),
            "heldout_accuracy_without_pretrain": round(right[RUNS[2]], 4),
            "train_seconds": round(sum(record["seconds"] for record in last), 1),
            "parameters": quiz[RUNS[1]]["parameters"],
            "peak_memory_mb": round(max(record["memory_mb"] for record in last), 1),
        }
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"{args.save_dir} lacks the quickstart's results; run: bash scripts/quickstart.sh"
        ) from error
    args.report.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    with one_line_errors():
        main()
