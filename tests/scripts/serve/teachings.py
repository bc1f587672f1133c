"""A stand-in for scripts/teach.py, which the page's server starts: it writes a version whose training makes
records, saves at SIGTERM, goes on and ends with a report, as the real one does. A test that wants to see it
between two records says in the file `until` how many it may write. A correction that says `refuse` is refused with
what stands behind it."""

import json
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from common.files import lock_output
from scripts.planning.signature import sign
from tests.scripts.serve.trainings import UPDATES, may_write

ABOUT, REPORT, CORRECTIONS = "teach.json", "report.json", "corrections.jsonl"
OLD = {
    "question": "Where does Samo live?",
    "before": "Samo lives in Redcliff.",
    "after": "Samo lives in Saltport.",
}


def prepare(folder: Path, model: str, records: list[dict]) -> Path:
    """The newest version if it has these corrections, otherwise a new one."""
    number = max((int(path.name) for path in folder.iterdir() if path.name.isdecimal()), default=0)
    newest = folder / str(number)
    if number and json.loads((newest / ABOUT).read_text())["id"] == records:
        return newest
    about = {"id": records, "model": model, "settings": {"epochs": 4}, "shape": {"hidden_size": 64}}
    signed = json.dumps([about["settings"], about["shape"]]).encode()
    about["signature"] = sign(signed, folder)
    new = folder / str(1 + number)
    new.mkdir()
    (new / ABOUT).write_text(json.dumps(about))
    return new


def train(folder: Path, place: Path, stopped: list[int]) -> None:
    """The training of a version; each record takes RECORD_SECONDS."""
    (place / "full_sft_64_run.json").write_text(
        json.dumps({"settings": {}, "facts": {"total_updates": UPDATES}})
    )
    path = place / "full_sft_64_metrics.jsonl"
    first = len(path.read_text().splitlines()) if path.exists() else 0
    for update in range(first + 1, UPDATES + 1):
        time.sleep(float(os.environ.get("RECORD_SECONDS", "0.1")))
        while not stopped and not may_write(folder, update):
            time.sleep(0.01)
        record = {"update": update, "tokens": 100 * update, "seconds": update, "loss": 5 / update}
        record |= {"seconds_left": float(UPDATES - update)}
        with open(path, "a") as file:
            file.write(json.dumps(record) + "\n")
        if stopped:
            print("stopped: by SIGTERM; the same command continues", file=sys.stderr)
            sys.exit(143)
    (place / "full_sft_64.pth").write_bytes(path.read_bytes())


def compare(place: Path, records: list[dict]) -> None:
    """The report: all but the last correction are learned; one of two old answers is lost."""
    asked = []
    for number, record in enumerate(records):
        *before, answer = record["messages"]
        after = answer["content"] if number < len(records) - 1 else "It <b>rained</b>."
        each = {"kind": "correction", "messages": before, "reference": answer["content"], "before": "No."}
        asked.append(each | {"after": after})
    for lost in (True, False):
        after = OLD["after"] if lost else OLD["before"]
        each = {"kind": "old", "messages": [{"role": "user", "content": OLD["question"]}], "after": after}
        asked.append(each | {"reference": OLD["before"], "before": OLD["before"], "meant": False})
    (place / REPORT).write_text(json.dumps({"asked": asked}))


def main() -> None:
    flags = dict(zip(sys.argv[1:5:2], sys.argv[2:5:2], strict=True))
    folder = Path(flags["--save_dir"])
    print(f"flags: {json.dumps(sys.argv[1:])}", flush=True)
    lock_output("teach", save_dir=str(folder))
    time.sleep(float(os.environ.get("PLAN_SECONDS", "0")))
    records = [json.loads(line) for line in (folder / CORRECTIONS).read_text().splitlines()]
    said = "".join(record["messages"][-1]["content"] for record in records)
    if "refuse " in said and "--without_old_data" not in sys.argv:
        print(f"error: {said.partition('refuse ')[2]}", file=sys.stderr)
        sys.exit(2)
    place = prepare(folder, flags["--model"], records)
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
    if not (place / REPORT).exists():
        train(folder, place, stopped)
        compare(place, records)
    print(f"chat with it: python scripts/chat.py --save_dir {place}")


if __name__ == "__main__":
    main()
