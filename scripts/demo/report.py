"""Write the quickstart's report from the results of its quiz and the metrics of its runs.

python scripts/demo/report.py --save_dir out/demo --report out/demo_report.json
"""

import json
import sys
from pathlib import Path
from typing import Any

# run the code beside this file
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.command_line import Parser, one_line_errors
from common.errors import UserError
from trainer.report.metrics import read_metrics

RUNS = ("pretrain_256", "full_sft_256", "sft_only_256")
QUIZZES = ("quiz.json", "quiz_second.json")


def read_quiz(path: Path) -> dict[str, Any]:
    """What scripts/evaluate.py wrote of each model."""
    return json.loads(path.read_text(encoding="utf-8"))["models"]


def right_share(result: dict[str, Any]) -> float:
    """The share of right answers of a model."""
    return round(result["figures"]["contains_answer"]["value"], 4)


def main() -> None:
    """Read the quizzes and the metrics of a folder, write the report, print it."""
    parser = Parser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument(
        "--save_dir", type=Path, required=True, help=f"folder of the runs, with {' and '.join(QUIZZES)}"
    )
    parser.add_argument("--report", type=Path, required=True, help="JSON file to write")
    args = parser.parse_args()
    try:
        quiz, second = (read_quiz(args.save_dir / name) for name in QUIZZES)
        last = [read_metrics(args.save_dir / f"{run}_metrics.jsonl")[-1] for run in RUNS]
        report = {
            "heldout_accuracy": right_share(quiz[RUNS[1]]),
            "heldout_accuracy_second_question": right_share(second[RUNS[1]]),
            "heldout_accuracy_without_pretrain": right_share(quiz[RUNS[2]]),
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
