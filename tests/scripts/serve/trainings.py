"""Stand-ins for what the page's server starts: a plan that is made in a moment, and a run.sh whose stages write
records, save at SIGTERM, go on and end with a report, as the real ones do. A test that wants to see one between
two records says in the file `until` how many it may write, over all stages, and in the file `answer` what the model
writes."""

import json
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from scripts.planning.signature import sign

UPDATES = 12  # of a stage
RUN = """#!/usr/bin/env bash
set -e
trap 'echo "not finished"' EXIT
{python} {file} run "$(dirname "$0")"
trap - EXIT
"""


def make_plan(folder: Path, text: str | None, chat: str | None) -> None:
    """What scripts/plan.py writes. A text that says `refuse` is refused with what stands behind it."""
    source = Path((text or chat or "").partition(",")[0])
    said = source.read_text(encoding="utf-8")
    print("device: a stand-in", flush=True)
    time.sleep(float(os.environ.get("PLAN_SECONDS", "0.3")))
    if "refuse " in said:
        print(f"error: {source}{said.partition('refuse ')[2].strip()}", file=sys.stderr)
        sys.exit(2)
    names = ["pretrain"] + (["full_sft"] if chat else [])
    stages = [
        {
            "run": f"{name}_64",
            "is_pretraining": name == "pretrain",
            "passes": 3,
            "updates": UPDATES,
            "seconds": 60,
        }
        for name in names
    ]
    facts = {"parameters": 1_234_567, "width": 64, "depth": 1, "stages": stages, "seconds": 132.0}
    facts |= {"limit": "data", "memory": 1e9, "memory_free": 8e9, "disk": 3e7, "disk_free": 5e10}
    facts["unwise"] = [{"key": "more data", "stage": "pretrain", "updates": UPDATES}]
    script = RUN.format(python=sys.executable, file=__file__).encode()
    facts["signature"] = sign(script, folder)
    (folder / "plan_facts.json").write_text(json.dumps(facts))
    (folder / "run.sh").write_bytes(script)


def may_write(folder: Path, number: int) -> bool:
    """Whether a test lets it write this record."""
    until = folder / "until"
    return not until.exists() or number <= int(until.read_text() or 0)


def run_stages(folder: Path) -> None:
    """What run.sh does; each record takes RECORD_SECONDS."""
    stages = json.loads((folder / "plan_facts.json").read_text())["stages"]
    stopped: list[int] = []

    def stop(number: int, frame: object) -> None:
        stopped.append(number)
        print("SIGTERM: finishing this update, then saving", flush=True)

    signal.signal(signal.SIGTERM, stop)
    for number, stage in enumerate(stages):
        path = folder / f"{stage['run']}_metrics.jsonl"
        settings = {"stage": f"train_{stage['run'][:-3]}.py", "settings": {"save_weight": stage["run"][:-3]}}
        (folder / f"{stage['run']}_run.json").write_text(json.dumps(settings))
        first = len(path.read_text().splitlines()) if path.exists() else 0
        for update in range(first + 1, stage["updates"] + 1):
            time.sleep(float(os.environ.get("RECORD_SECONDS", "0.1")))
            while not stopped and not may_write(folder, number * UPDATES + update):
                time.sleep(0.01)
            record = {"update": update, "tokens": 100 * update, "seconds": update, "loss": 5 / update}
            record |= {
                "mean_loss": 5 / update,
                "seconds_left": float(stage["updates"] - update),
                "eval_loss": 3.0,
            }
            record |= {"initial_eval_loss": 6.0} if update == 1 else {}
            record |= {"eval_answers": 0.75, "asked": 4} if number else {}
            said = folder / "answer"
            answer = said.read_text() if said.exists() else "there was"
            record["samples"] = [{"prompt": "Once <script>hacked = 1</script>", "answer": answer}]
            with open(path, "a") as file:
                file.write(json.dumps(record) + "\n")
            if stopped:
                print(f"stopped: after update {update} of {stage['updates']}", file=sys.stderr)
                sys.exit(143)
        (folder / f"{stage['run']}.pth").write_bytes(path.read_bytes())
    (folder / "report.html").write_text("<script>hacked = 1</script>a report")


def main() -> None:
    if sys.argv[1] == "run":
        run_stages(Path(sys.argv[2]))
        return
    flags = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    print(f"flags: {json.dumps(flags)}", flush=True)
    make_plan(Path(flags["--save_dir"]), flags.get("--pretrain_data"), flags.get("--sft_data"))


if __name__ == "__main__":
    main()
