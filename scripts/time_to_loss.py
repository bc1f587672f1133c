"""How long until the model is as good: MiniMind's own recipe against ours, by the held-out loss that it ends with.

    python scripts/time_to_loss.py --stage pretrain --peer_path ../minimind -- --data_path data/pretrain.jsonl \
        --eval_data_path data/held_out.jsonl --eval_interval 50 --accumulation_steps 1 --epochs 1

Runs the peer's script as it is, with its defaults, for --peer_epochs on the same records; evaluates its weights on the
held-out data; then runs our stage script, which gets everything after `--`, until an evaluation is at or below that.
Both times are whole processes, from start to end (ours: to that evaluation, with all evaluations and saves before it).
Both use our tokenizer and the same shape. What the peer reached is kept in --folder: other settings of ours do not
run it again.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from dataset.errors import Parser, UserError, run_main
from scripts.benchmark import STAGES
from scripts.benchmark_pairs import SCRIPTS, check_checkout, check_python, first_samples, peer_environment, records_of
from trainer import stage
from trainer import trainer_utils as utils
from trainer.arguments import check_args, model_config, stage_parser
from trainer.checkpoint import load_weights, metrics_path, run_name, weight_path
from trainer.console import read_metrics
from trainer.loop import evaluate
from trainer.state import TrainState, next_token_loss


def parse_args() -> tuple[Namespace, Namespace, list[str]]:
    """Our own settings, those of our stage script, and the latter as typed."""
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    parser = Parser(description=__doc__.split("\n", 1)[0], usage="%(prog)s [options] -- FLAGS OF THE STAGE SCRIPT")
    flag = parser.add_argument
    flag("--stage", choices=sorted(STAGES), default="pretrain", help="what is trained")
    flag("--peer_path", required=True, help="folder of a checkout of jingyaogong/minimind")
    flag("--peer_python", help="Python that has its packages (default: this one)")
    flag("--peer_epochs", type=int, default=1, help="passes of the peer over the data")
    flag("--folder", default=str(utils.ROOT / "out" / "time_to_loss"), help="where both runs write")
    flag("--json", help="also write the result to this file")
    args, typed = parser.parse_args(sys.argv[1:at]), sys.argv[at + 1 :]
    ours = stage_parser(__doc__, **STAGES[args.stage][1]).parse_args(typed)
    check_args(ours)
    if not ours.eval_data_path:
        raise UserError("the held-out data are missing; give --eval_data_path after --")
    check_checkout(args.peer_path, args.stage)
    check_python(args.peer_python)
    return args, ours, typed


def run_peer(args: Namespace, ours: Namespace, data: stage.StageData, folder: Path) -> tuple[float, Path]:
    """Train the peer by its own script and defaults, unless `folder` holds just that: seconds, and its weights.

    It runs in `folder/trainer`, so that `../model`, where it looks for a tokenizer, is ours.

    Raises:
        UserError: it failed; its last words are quoted.
    """
    shape = {name: getattr(ours, name) for name in ("hidden_size", "num_hidden_layers", "use_moe", "from_weight")}
    shape |= {"data_path": "../data.jsonl", "save_dir": "../out", "epochs": args.peer_epochs}
    flags = [part for key, value in shape.items() for part in (f"--{key}", str(value))]
    script = Path(args.peer_path).resolve() / SCRIPTS[args.stage]
    command = [args.peer_python or sys.executable, str(script), *flags]
    about = {"command": shlex.join(command), "data": data.train.cache.fingerprint}
    weights, result = weight_path(folder / "out", STAGES[args.stage][1]["save_weight"], ours), folder / "peer.json"
    if result.is_file() and weights.is_file() and about.items() <= (known := json.loads(result.read_text())).items():
        utils.Logger(f"the peer has run before: {known['seconds']:.0f} s")
        return known["seconds"], weights
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "trainer").mkdir(parents=True)
    (folder / "model").symlink_to(Path(ours.tokenizer_path).resolve())
    begin_with_weights(ours, folder / "out")
    samples = first_samples(data.train, ours.seed)
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records_of(data.train.cache, samples)]
    (folder / "data.jsonl").write_text("".join(lines), encoding="utf-8")
    utils.Logger(f"running {about['command']}")
    env = peer_environment(folder, args.peer_path)
    seconds = timed_run(command, folder / "peer.log", cwd=folder / "trainer", env=env)
    result.write_text(json.dumps(about | {"seconds": seconds}), encoding="utf-8")
    return seconds, weights


def begin_with_weights(ours: Namespace, save_dir: Path) -> None:
    """Put the weights to start from where a run will look for them."""
    save_dir.mkdir(parents=True, exist_ok=True)
    if ours.from_weight != "none":
        start = weight_path(ours.save_dir, ours.from_weight, ours)
        if not start.is_file():
            raise UserError(f"weights {start} do not exist; train that stage first, or give --from_weight none")
        shutil.copy(start, save_dir)


def timed_run(command: list[str], log: Path, **options: Any) -> float:
    """Run a command to its end: seconds. Raises UserError if it fails."""
    begin = time.perf_counter()
    with open(log, "w", encoding="utf-8") as file:
        status = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False, **options).returncode
    if status:
        last = (log.read_text(encoding="utf-8", errors="replace").split("\n") or [""])[-2:]
        raise UserError(f"{shlex.join(command)} failed ({' '.join(last).strip()}); all it said is in {log}")
    return time.perf_counter() - begin


def held_out_loss(ours: Namespace, data: stage.StageData, weights: Path) -> float:
    """Nats per target of these weights on the held-out data, by our own evaluation."""
    config = model_config(ours, data.tokenizer)
    device = utils.pick_device(ours.device, 0)
    autocast, scaler = utils.mixed_precision(ours.dtype, device)
    model, _ = utils.init_model(config, "none", ours.tokenizer_path, ours.save_dir, device)
    load_weights(model, weights)
    parts = {"optimizer": None, "scaler": scaler, "autocast": autocast, "device": device, "loss_fn": next_token_loss}
    state = TrainState(ours, config, model, total_updates=1, run={}, **parts)
    return evaluate(state, utils.eval_loader(data.held_out, ours.batch_size))["eval_loss"]


def run_ours(args: Namespace, ours: Namespace, typed: list[str], goal: float, folder: Path) -> dict[str, Any]:
    """Run our stage script until its held-out loss is at the goal: the record of that evaluation, or of the last one,
    with `wall_seconds` of the process up to then."""
    shutil.rmtree(folder, ignore_errors=True)
    begin_with_weights(ours, folder)
    script = utils.ROOT / SCRIPTS[args.stage]
    places = ["--save_dir", folder, "--checkpoint_dir", folder / "checkpoints", "--cache_dir", folder / "cache"]
    metrics = metrics_path(folder, run_name(ours.save_weight, ours))
    begin, last = time.perf_counter(), {}
    with open(folder / "ours.log", "w", encoding="utf-8") as file:
        process = subprocess.Popen([sys.executable, str(script), *typed, *map(str, places)], stdout=file, stderr=file)
    while True:
        running, now = process.poll() is None, time.perf_counter() - begin
        evaluated = [record for record in read_metrics(metrics) if record.get("eval_loss") is not None]
        if evaluated and evaluated[-1] != last:
            last = evaluated[-1]
            utils.Logger(f"{now:7.1f} s, update {last['update']}: held-out loss {last['eval_loss']:.4f}")
            at = now
        reached = last and last["eval_loss"] <= goal
        if reached and running:
            process.terminate()
            process.wait()
        if reached or not running:
            break
        time.sleep(0.1)
    if not last:
        raise UserError(f"our run ended without an evaluation; what it said is in {folder / 'ours.log'}")
    return last | {"wall_seconds": at, "reached": bool(reached)}


def main() -> None:
    """The peer, its held-out loss, ours, and the ratio."""
    args, ours, typed = parse_args()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("time_to_loss compares single processes; start it with python, not with torchrun")
    data, folder = stage.load_data(STAGES[args.stage][0], ours), Path(args.folder).resolve()
    seconds, weights = run_peer(args, ours, data, folder / "peer")
    goal = held_out_loss(ours, data, weights)
    utils.Logger(f"the peer took {seconds:.1f} s to a held-out loss of {goal:.4f}")
    record = run_ours(args, ours, typed, goal, folder / "ours")
    ratio = seconds / record["wall_seconds"]
    outcome = "at or below it" if record["reached"] else f"NOT reached, {record['eval_loss']:.4f} at the end,"
    utils.Logger(f"ours: {outcome} after {record['wall_seconds']:.1f} s; ratio of the times {ratio:.2f}")
    if args.json:
        found = {"peer_seconds": seconds, "peer_eval_loss": goal, "ours": record, "ratio": ratio}
        found |= {"command": shlex.join(sys.argv)}
        Path(args.json).write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    run_main(main)
