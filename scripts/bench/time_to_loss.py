"""Time until our trainer reaches the held-out loss that MiniMind's own recipe ends with.

    python scripts/bench/time_to_loss.py --stage pretrain --peer_path ../minimind -- --data_path data/pretrain.jsonl \
        --eval_data_path data/held_out.jsonl --eval_interval 50 --accumulation_steps 1 --epochs 1

Runs the peer's script unmodified, with its defaults, for --peer_epochs on the same records; evaluates its weights on
the held-out data; then runs our stage script with the arguments after `--` until an evaluation reaches that loss. Both
are wall-clock times from the start of the process (ours: to that evaluation, with all earlier evaluations and saves).
Both use our tokenizer and the same shape. The peer's result is kept in --folder: it runs again only if its settings or
the data change.
"""

import json
import math
import shlex
import shutil
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any, cast

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run the code beside this file, installed or not

from common.command_line import Parser, one_line_errors
from common.config_sources import parse_args as parse_stage_args
from common.errors import UserError
from common.settings import ROOT, StageArgs
from dataset.lm_dataset import StageDataset
from scripts.bench.pairs import SCRIPTS, check_peer, first_samples, peer_environment, records_of
from scripts.benchmark import STAGES
from trainer.components.data import open_datasets
from trainer.components.device import mixed_precision, prepare_device, select_device
from trainer.components.metrics import read_metrics
from trainer.components.model_files import load_weights
from trainer.components.run_files import EXPERTS, metrics_path, run_name, weight_path
from trainer.components.state import TrainState
from trainer.loop import evaluate
from trainer.trainer_utils import Logger, eval_loader, init_model, load_tokenizer, model_config, next_token_loss


def parse_args() -> tuple[Namespace, StageArgs, list[str]]:
    """The flags of this script, the settings of our stage script, and the latter as typed."""
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    parser = Parser(description=__doc__.split("\n", 1)[0], usage="%(prog)s [options] -- FLAGS OF THE STAGE SCRIPT")
    flag = parser.add_argument
    flag("--stage", choices=sorted(STAGES), default="pretrain", help="stage to compare")
    flag("--peer_path", required=True, help="folder of a checkout of jingyaogong/minimind")
    flag("--peer_python", help="Python with its packages; this one if not given")
    flag("--peer_epochs", type=int, default=1, help="epochs of the peer")
    flag("--folder", default=str(ROOT / "out" / "time_to_loss"), help="folder for the files of both runs")
    flag("--json", help="also write the result to this file")
    args, typed = parser.parse_args(sys.argv[1:at]), sys.argv[at + 1 :]
    ours = parse_stage_args(STAGES[args.stage][1], __doc__, typed)
    if not ours.eval_data_path:
        raise UserError("the held-out data are missing; give --eval_data_path after --")
    if ours.use_moe and (ours.num_experts, ours.num_experts_per_tok) != EXPERTS:
        raise UserError("MiniMind's script takes neither --num_experts nor --num_experts_per_tok; leave them out")
    check_peer("minimind", args.stage, args.peer_path, args.peer_python)
    return args, ours, typed


def run_peer(args: Namespace, ours: StageArgs, data: StageDataset, folder: Path) -> tuple[float, Path]:
    """Train the peer with its own script and defaults, unless `folder` holds that run: seconds, and its weights.

    It runs in `folder/trainer`, so that `../model`, where it looks for a tokenizer, is ours.

    Raises:
        UserError: it failed; the message quotes its last lines.
    """
    shape = {name: getattr(ours, name) for name in ("hidden_size", "num_hidden_layers", "use_moe", "from_weight")}
    shape |= {"data_path": "../data.jsonl", "save_dir": "../out", "epochs": args.peer_epochs}
    shape["use_moe"] = int(ours.use_moe)  # the peer takes 0 or 1
    flags = [part for key, value in shape.items() for part in (f"--{key}", str(value))]
    script = Path(args.peer_path).resolve() / SCRIPTS[args.stage]
    command = [args.peer_python or sys.executable, str(script), *flags]
    about = {"command": shlex.join(command), "data": data.cache.fingerprint}
    weights, result = weight_path(folder / "out", STAGES[args.stage][1].save_weight, ours), folder / "peer.json"
    if result.is_file() and weights.is_file() and about.items() <= (known := json.loads(result.read_text())).items():
        Logger(f"the peer has run before: {known['seconds']:.0f} s")
        return known["seconds"], weights
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "trainer").mkdir(parents=True)
    (folder / "model").symlink_to(Path(ours.tokenizer_path).resolve())
    begin_with_weights(ours, folder / "out")
    samples = first_samples(data, ours.seed)
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records_of(data.cache, samples)]
    (folder / "data.jsonl").write_text("".join(lines), encoding="utf-8")
    Logger(f"running {about['command']}")
    env = peer_environment(folder, args.peer_path)
    seconds = timed_run(command, folder / "peer.log", cwd=folder / "trainer", env=env)
    result.write_text(json.dumps(about | {"seconds": seconds}), encoding="utf-8")
    return seconds, weights


def begin_with_weights(ours: StageArgs, save_dir: Path) -> None:
    """Copy the initial weights to where the run looks for them."""
    save_dir.mkdir(parents=True, exist_ok=True)
    if ours.from_weight != "none":
        start = weight_path(ours.save_dir, ours.from_weight, ours)
        if not start.is_file():
            raise UserError(f"weights {start} do not exist; train that stage first, or give --from_weight none")
        shutil.copy(start, save_dir)


def timed_run(command: list[str], log: Path, **options: Any) -> float:
    """Run a command and return its seconds. Raises UserError if it fails."""
    begin = time.perf_counter()
    with open(log, "w", encoding="utf-8") as file:
        status = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False, **options).returncode
    if status:
        last = log.read_text(encoding="utf-8", errors="replace").split("\n")[-2:]
        raise UserError(f"{shlex.join(command)} failed ({' '.join(last).strip()}); its output is in {log}")
    return time.perf_counter() - begin


def evaluate_weights(ours: StageArgs, held_out: StageDataset, weights: Path) -> float:
    """Held-out loss of these weights in our evaluation (nats per target)."""
    tokenizer = load_tokenizer(ours.tokenizer_path)
    config = model_config(tokenizer, ours)
    device = select_device(ours.device)
    prepare_device(device)
    autocast, scaler = mixed_precision(ours.dtype, device)
    model, _ = init_model(config, "none", ours.tokenizer_path, ours.save_dir, device)
    load_weights(model, weights)
    optimizer = torch.optim.SGD(model.parameters())  # never stepped
    state = TrainState(
        args=ours,
        lm_config=config,
        model=model,
        optimizer=optimizer,
        scaler=scaler,
        autocast=autocast,
        device=device,
        loss_fn=next_token_loss,
        schedule=lambda update, total, args: None,
        run={},
    )
    loss = (evaluate(state, eval_loader(held_out, ours.batch_size)) or {}).get("eval_loss")
    return math.nan if loss is None else loss


def run_ours(args: Namespace, ours: StageArgs, typed: list[str], goal: float, folder: Path) -> dict[str, Any]:
    """Run our stage script until its held-out loss reaches the goal: the record of that evaluation, or of the last one,
    with the `wall_seconds` of the process so far."""
    shutil.rmtree(folder, ignore_errors=True)
    begin_with_weights(ours, folder)
    script = ROOT / SCRIPTS[args.stage]
    places = ["--save_dir", folder, "--checkpoint_dir", folder / "checkpoints", "--cache_dir", folder / "cache"]
    metrics = metrics_path(folder, run_name(ours.save_weight, ours))
    begin, at, last = time.perf_counter(), 0.0, {}
    with open(folder / "ours.log", "w", encoding="utf-8") as file:
        process = subprocess.Popen([sys.executable, str(script), *typed, *map(str, places)], stdout=file, stderr=file)
    while True:
        running, now = process.poll() is None, time.perf_counter() - begin
        evaluated = [record for record in read_metrics(metrics) if record.get("eval_loss") is not None]
        if evaluated and evaluated[-1] != last:
            last = evaluated[-1]
            Logger(f"{now:7.1f} s, update {last['update']}: held-out loss {last['eval_loss']:.4f}")
            at = now
        reached = last and last["eval_loss"] <= goal
        if reached and running:
            process.terminate()
            process.wait()
        if reached or not running:
            break
        time.sleep(0.1)
    if not last:
        raise UserError(f"our run ended without an evaluation; its output is in {folder / 'ours.log'}")
    return last | {"wall_seconds": at, "reached": bool(reached)}


def main() -> None:
    """Run the peer, evaluate it, run ours, and print the ratio of the times."""
    args, ours, typed = parse_args()
    data, held_out = open_datasets(STAGES[args.stage][0], ours, load_tokenizer(ours.tokenizer_path))
    folder = Path(args.folder).resolve()
    seconds, weights = run_peer(args, ours, data, folder / "peer")
    goal = evaluate_weights(ours, cast(StageDataset, held_out), weights)  # parse_args requires --eval_data_path
    Logger(f"the peer took {seconds:.1f} s to a held-out loss of {goal:.4f}")
    record = run_ours(args, ours, typed, goal, folder / "ours")
    ratio = seconds / record["wall_seconds"]
    outcome = "at or below it" if record["reached"] else f"NOT reached, {record['eval_loss']:.4f} at the end,"
    Logger(f"ours: {outcome} after {record['wall_seconds']:.1f} s; ratio of the times {ratio:.2f}")
    if args.json:
        found = {"peer_seconds": seconds, "peer_eval_loss": goal, "ours": record, "ratio": ratio}
        found |= {"command": shlex.join(sys.argv)}
        Path(args.json).write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    with one_line_errors():
        main()
