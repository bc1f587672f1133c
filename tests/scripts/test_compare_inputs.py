"""compare.py where its inputs do not stand still: what is edited between two runs, what a variant is judged
by, and what changes nothing."""

import hashlib
import json
import random
import shutil
from pathlib import Path

import pytest

from common.arguments import parse_args
from common.errors import UserError
from common.settings import ROOT
from scripts import compare
from tests.conftest import sentence, write_jsonl
from tests.stage_process import run as run_stage
from tests.trainer.stage_flags import write_start_weights
from tools.compare import runs
from tools.compare.inputs import check_pair, check_unchanged
from tools.compare.variant import Variant

SMALL = ["--hidden_size", 32, "--num_hidden_layers", 1, "--max_seq_len", 64, "--batch_size", 8]
SMALL += ["--accumulation_steps", 1, "--epochs", 1, "--learning_rate", 1e-2, "--dtype", "float32"]
SHAPE = {"hidden_size": 32, "num_hidden_layers": 1}
RUNS = ("1_A", "1_B", "2_B", "2_A")  # of two pairs, in their order


@pytest.fixture(scope="module")
def start_weights(tmp_path_factory) -> Path:
    """A folder with weights to copy."""
    folder = tmp_path_factory.mktemp("start")
    write_start_weights(folder, {"start_32": SHAPE, "other_32": SHAPE, "teacher_32": SHAPE})
    return folder


@pytest.fixture
def files(tmp_path, start_weights):
    """Every kind of file that a comparison reads, by name."""
    rng = random.Random(3)
    texts = [{"text": sentence(rng, 5, 60)} for _ in range(30)]
    questions = [{"prompt": f"{sentence(rng, 2, 4)}?", "answer": "fox"} for _ in range(12)]
    chats = [
        {
            "conversations": [
                {"role": "user", "content": each["prompt"]},
                {"role": "assistant", "content": "fox"},
            ]
        }
        for each in questions
    ]
    pairs = [{**each, "chosen": "fox", "rejected": sentence(rng, 1, 3)} for each in questions]
    found = {
        "data": write_jsonl(tmp_path / "text.jsonl", texts),
        "held_out": write_jsonl(tmp_path / "held_out.jsonl", texts[:5]),
        "chats": write_jsonl(tmp_path / "chats.jsonl", chats),
        "pairs": write_jsonl(tmp_path / "pairs.jsonl", pairs),
        "prompts": write_jsonl(tmp_path / "prompts.jsonl", questions),
        "quiz": write_jsonl(tmp_path / "quiz.jsonl", questions),
        "reward": tmp_path / "my_reward.py",
        "config": tmp_path / "settings.yaml",
        "tokenizer": tmp_path / "tokenizer/chat_template.jinja",
        "start": tmp_path / "start_32.pth",
        "other": tmp_path / "other_32.pth",
        "teacher": tmp_path / "teacher_32.pth",
        "reward_model": tmp_path / "scores/config.json",
    }
    found["reward"].write_text(
        "def score(messages, completion, record):\n    return float(len(completion))\n"
    )
    found["config"].write_text("training:\n  weight_decay: 0.1\n")
    found["tokenizer"].parent.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        found["tokenizer"].with_name(name).write_bytes((ROOT / "model" / name).read_bytes())
    found["reward_model"].parent.mkdir()
    found["reward_model"].write_text("{}")
    shutil.copytree(start_weights, tmp_path, dirs_exist_ok=True)
    return found


class MadeUp:
    """Runs that are not trained: they write what a run does, and their losses are a function of all that they
    read. before: number of a run, from 0, -> what happens before it."""

    def __init__(self, stage: str):
        self.args_class, self.before, self.count = runs.stage_script(stage).Args, {}, 0

    def finish(self, run) -> dict[str, float]:
        """In the place of the stage's process."""
        self.before.get(self.count, lambda: None)()
        self.count += 1
        args = parse_args(self.args_class, None, run.command[2:])
        fingerprint = {"data": digest(args.data_path), "tokenizer": digest(args.tokenizer_path)}
        fingerprint["held_out_data"] = digest(args.eval_data_path or args.data_path)
        if args.from_weight != "none":
            fingerprint["from_weight_sha256"] = digest(args.from_weight)
        if teacher := getattr(args, "from_teacher_weight", None):
            fingerprint["teacher_sha256"] = digest(teacher)
        if reward_model := getattr(args, "reward_model", None):
            fingerprint["reward_model_sha256"] = digest(reward_model)
        sources = {"trainer/loop.py": "a"}
        if ".py" in (reward := getattr(args, "reward", "")):
            sources["my_reward.py"] = digest(reward.partition(":")[0])
        settings = {name: str(value) for name, value in args}
        trained = {key: value for key, value in settings.items() if key in TRAINS}
        content = json.dumps([args.seed, trained, fingerprint, sources])
        value = int(hashlib.sha256(content.encode()).hexdigest()[:6], 16) / 2**24
        record = {"update": 9, "tokens": 900, "tokens_per_second": 9.0, "memory_mb": 1.0, "mean_loss": 1.0}
        names = ("loss", "accuracy", "divergence", "reward", "reward_margin")
        save = Path(args.save_dir)
        save.mkdir(parents=True)
        write_jsonl(save / "a_32_metrics.jsonl", [record | {f"eval_{name}": 2 + value for name in names}])
        about = {"settings": settings, "fingerprint": fingerprint, "sources": sources}
        about["environment"] = {"device": "cpu", "dtype": "float32"}
        (save / "a_32_run.json").write_text(json.dumps(about))
        return {"wall_seconds": 1.0}


TRAINS = ("learning_rate", "weight_decay", "beta", "temperature")


def digest(path: str) -> str:
    """A hash of a file, or of those in a folder."""
    path = Path(path)
    each = sorted(filter(Path.is_file, path.iterdir())) if path.is_dir() else [path]
    return hashlib.sha256(b"".join(file.read_bytes() for file in each)).hexdigest()


@pytest.fixture
def comparing(call, files, tmp_path, monkeypatch):
    """comparing(stage, flags, before) compares made-up runs; returns the finished call and what it wrote."""
    monkeypatch.setattr(
        compare, "copy_code", lambda source, target: target.mkdir(parents=True, exist_ok=True)
    )
    monkeypatch.setattr(compare, "check_code", lambda folder, tree: None)
    monkeypatch.setattr(
        runs, "take_quiz", lambda *_: (0.5, {f"--quiz {files['quiz']}": digest(files["quiz"])})
    )
    data = {"pretrain": "data", "sft": "chats", "dpo": "pairs", "distillation": "chats"}

    def run(stage, flags, before=None):
        made_up = MadeUp(stage)
        made_up.before = before or {}
        monkeypatch.setattr(runs, "finish", made_up.finish)
        words = ["--stage", stage, "--pairs", 2, "--name", "x", "--save_dir", tmp_path / "out"]
        words += ["--data_path", files[data.get(stage, "prompts")], "--cache_dir", tmp_path / "cache"]
        if stage != "pretrain":
            words += ["--from_weight", files["start"]]
        if stage == "distillation":
            words += ["--from_teacher_weight", files["teacher"]]
        done = call(compare, *words, *(str(flag).format(**files) for flag in flags))
        path = tmp_path / "out/compare/x/result.json"
        return done, json.loads(path.read_text()) if path.exists() else None

    return run


def edit(path: Path) -> None:
    """Another content, by one line break."""
    path.write_bytes(path.read_bytes() + b"\n")


# input -> stage, its flags, what the line names
EDITS = {
    "data": ("pretrain", [], "--data_path"),
    "held_out": ("pretrain", ["--eval_data_path", "{held_out}"], "--eval_data_path"),
    "tokenizer": ("pretrain", ["--tokenizer_path", "{tokenizer}/.."], "--tokenizer_path"),
    "start": ("sft", [], "--from_weight"),
    "pairs": ("dpo", [], "--data_path"),
    "teacher": ("distillation", [], "--from_teacher_weight"),
    "reward": ("grpo", ["--reward", "{reward}:score"], "my_reward.py"),
    "reward_model": ("ppo", ["--reward_model", "{reward_model}/.."], "--reward_model"),
    "quiz": ("sft", ["--quiz", "--task answers --data_path {quiz}"], "--quiz"),
}


@pytest.mark.parametrize(
    ("name", "number"),
    [
        pytest.param(name, number, marks=[] if number == 2 or name == "data" else pytest.mark.slow)
        for name in EDITS
        for number in (1, 2, 3)
    ],
)
def test_an_edited_input_is_refused(name, number, comparing, files):
    """At the first run that reads it, or where tokenizers may differ at the next; that run does not count.
    With the old file in its place the same command goes on, and says that nothing changed."""
    stage, flags, named = EDITS[name]
    flags = [str(flag).replace("{tokenizer}/..", str(files["tokenizer"].parent)) for flag in flags]
    flags = [flag.replace("{reward_model}/..", str(files["reward_model"].parent)) for flag in flags]
    old = files[name].read_bytes()
    done, found = comparing(stage, [*flags, "", "--log_interval 5"], {number: lambda: edit(files[name])})
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and found is None, done.stderr
    assert named in done.stderr or "held-out records" in done.stderr, done.stderr
    assert "restore the old files and repeat the command, or start again under a new --name" in done.stderr
    files[name].write_bytes(old)
    done, found = comparing(stage, [*flags, "", "--log_interval 5"])
    assert done.returncode == 0, done.stderr
    assert found["results"]["B"]["sentence"].startswith("nothing changed")


JUDGES = [
    ("distillation", ["--monitor", "eval_divergence"], "--temperature 3"),
    ("distillation", ["--monitor", "eval_divergence"], "--from_teacher_weight {other}"),
    ("distillation", [], "--kind pretrain"),
    ("dpo", ["--monitor", "eval_loss"], "--beta 0.5"),
    ("dpo", ["--monitor", "eval_loss"], "--rpo_alpha 1"),
    ("dpo", ["--monitor", "eval_reward_margin", "--mode", "max"], "--beta 0.5"),
    ("dpo", [], "--from_weight {other}"),
    ("grpo", [], "--reward length"),
    ("grpo", [], "--max_gen_len 9"),
    ("grpo", [], "--thinking_ratio 1"),
    ("ppo", [], "--open_thinking 1"),
    ("ppo", [], "--reward_model {reward_model}"),
    ("agent", [], "--environment mock_tools"),
    ("agent", [], "--max_turns 2"),
    ("agent", [], "--max_total_len 64"),
    ("sft", [], "--max_seq_len 32"),
    ("pretrain", [], "--eval_share 0.1"),
    ("pretrain", [], "--text_separator ##"),
    ("pretrain", [], "--monitor eval_bpb"),
    ("lora", [], "--seed 1"),
]


@pytest.mark.parametrize("stage, flags, variant", JUDGES)
def test_a_variant_that_changes_its_judge_is_refused(stage, flags, variant, comparing):
    """Before anything is trained."""
    name = variant.split()[0]
    done, _ = comparing(stage, [*flags, "", variant], {0: lambda: pytest.fail("a run was started")})
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f"{name} changes how the runs are measured" in done.stderr, done.stderr


ALLOWED = [
    ("dpo", [], "--beta 0.5"),  # judged by accuracy
    ("distillation", [], "--temperature 3"),  # by the cross entropy
    ("distillation", [], "--from_teacher_weight {other}"),
    ("grpo", [], "--temperature 0.7"),  # held-out completions are the likeliest
    ("grpo", ["--quiz", "--task answers --data_path {quiz}"], "--reward length"),  # by the quiz
    ("sft", [], "--from_weight {other}"),
]


@pytest.mark.parametrize("stage, flags, variant", ALLOWED)
def test_what_does_not_judge_may_differ(stage, flags, variant, comparing):
    done, found = comparing(stage, [*flags, "", variant])
    assert done.returncode == 0, done.stderr
    assert found["pairs"] == 2


NO_OPS = [
    ("pretrain", [], ""),
    ("pretrain", [], "--weight_decay auto"),
    ("pretrain", ["--weight_decay", 0.1], "--config {config}"),
    ("sft", [], "--save_interval 7"),
    ("dpo", [], "--rpo_alpha 0"),
    ("distillation", [], "--student_use_moe 0"),
    ("grpo", [], "--log_interval 3"),
    ("ppo", [], "--num_workers 1"),
]


@pytest.mark.parametrize("stage, flags, variant", NO_OPS)
def test_a_no_op_is_zero(stage, flags, variant, comparing):
    if variant == "--weight_decay auto":  # what a run resolves it to
        flags, variant = ["--weight_decay", 0.01], "--weight_decay 1e-2"
    done, found = comparing(stage, [*flags, "", variant])
    assert done.returncode == 0, done.stderr
    assert found["results"]["B"]["differences"] == [0.0, 0.0]
    assert found["results"]["B"]["sentence"].startswith("nothing changed")


@pytest.mark.parametrize("number", [1, 2, 3])
def test_an_edited_config_changes_nothing(number, comparing, files):
    """Its settings are flags from the start on; the same command with the edited file is another one."""
    flags = ["--config", files["config"], "", "--log_interval 5"]

    def other() -> None:
        files["config"].write_text("training:\n  weight_decay: 5.0\n")

    done, found = comparing("pretrain", flags, {number: other})
    assert done.returncode == 0, done.stderr
    assert found["results"]["B"]["differences"] == [0.0, 0.0]
    assert found["settings"]["flags"]["weight_decay"] == 0.1
    done, _ = comparing("pretrain", flags)
    assert done.returncode == 2 and "was begun with flags" in done.stderr


def test_a_config_is_overridden_by_flags_and_overrides_those_of_all(comparing, files):
    files["config"].write_text(
        "training:\n  weight_decay: 0.1\n  seed: 7\ncheckpoint:\n  checkpoint_dir: x\n"
    )
    flags = [
        "--config",
        files["config"],
        "--seed",
        8,
        "--weight_decay",
        0.3,
        "",
        "--config {config} --seed 8",
    ]
    done, found = comparing("pretrain", flags)
    assert done.returncode == 0, done.stderr
    # flags before the file; the file of a variant before what all have; the folder is this script's
    common = {
        name: found["settings"]["flags"].get(name) for name in ("seed", "weight_decay", "checkpoint_dir")
    }
    assert common == {"seed": 8, "weight_decay": 0.3, "checkpoint_dir": None}
    assert found["results"]["B"]["differences"] != [0.0, 0.0]
    assert "--weight_decay=0.1" in found["settings"]["variants"][1]


# --- each input by itself

INPUTS = {"data": "a", "held_out_data": "b", "tokenizer": "c", "learning_rate": 0.1, "max_seq_len": 64}


@pytest.mark.parametrize("name", INPUTS)
def test_a_run_must_have_read_what_the_first_run_of_its_variant_has(name):
    check_unchanged(INPUTS, dict(INPUTS), "2_B")
    with pytest.raises(UserError, match=r"2_B: .* changed since the first run of this variant"):
        check_unchanged(INPUTS, INPUTS | {name: "other"}, "2_B")
    with pytest.raises(UserError, match="changed since"):
        check_unchanged(INPUTS, {key: value for key, value in INPUTS.items() if key != name}, "2_B")


def test_held_out_data_of_a_pair_must_be_the_same():
    """Even where all else is, and the variants' flags too."""
    args = runs.stage_script("pretrain").Args()
    pair = Variant("one", Path("a"), [], args), Variant("other", Path("a"), [], args)
    check_pair(pair, (INPUTS, dict(INPUTS)), ())
    with pytest.raises(UserError, match='"other": its held-out records differ from those of the first'):
        check_pair(pair, (INPUTS, INPUTS | {"held_out_data": "x"}), ())
    # the code of a revision may have another default of what judges
    with pytest.raises(UserError, match="--max_seq_len changes how the runs are measured, and is not that"):
        check_pair(pair, (INPUTS, INPUTS | {"max_seq_len": 32}), ("max_seq_len",))


# --- real runs


@pytest.fixture
def training(call, files, tmp_path, monkeypatch):
    """As `comparing`, with runs that are trained."""
    count = [0]

    def run(stage, data, flags, before):
        def forked(each) -> dict[str, float]:
            before.get(count[0], lambda: None)()
            count[0] += 1
            run_stage(stage, each.command[2:])
            return {"wall_seconds": 2.0}

        monkeypatch.setattr(runs, "finish", forked)
        words = ["--stage", stage, "--pairs", 2, "--name", "x", "--save_dir", tmp_path / "out", *SMALL]
        words += ["--data_path", files[data], "--eval_share", 0.3, "--cache_dir", tmp_path / "cache"]
        done = call(compare, *words, *(str(flag).format(**files) for flag in flags))
        return done, count[0], tmp_path / "out/compare/x/result.json"

    return run


def doubled(path: Path):
    return lambda: path.write_text(
        "".join(line + "\n" for line in path.read_text().split("\n") for _ in (1, 2))
    )


START = ["--from_weight", "{start}"]
REAL = {
    "data between the runs of a pair": ("pretrain", "data", [], "data", 1, "held-out records"),
    "data between two pairs": ("pretrain", "data", [], "data", 2, "--data_path"),
    "start weights": ("sft", "chats", START, "start", 2, "--from_weight"),
    "teacher": (
        "distillation", "chats", [*START, "--from_teacher_weight", "{teacher}"], "teacher", 1,
        "--from_teacher_weight",
    ),
    "reward": (
        "grpo", "prompts", [*START, "--reward", "{reward}:score", "--max_gen_len", 4], "reward", 2,
        "my_reward.py",
    ),
    "tokenizer": ("sft", "chats", [*START, "--tokenizer_path", "{folder}"], "tokenizer", 2, "--tokenizer_path"),
}  # fmt: skip


# the other inputs by the runs that train nothing, above
TRAINED = ("data between the runs of a pair",)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in TRAINED else pytest.mark.slow) for case in REAL]
)
def test_an_edit_between_trained_runs_is_refused(case, training, files):
    stage, data, flags, edited, number, named = REAL[case]
    flags = [str(flag).replace("{folder}", str(files["tokenizer"].parent)) for flag in flags]

    def change() -> None:
        path = files[edited]
        if path.suffix == ".pth":
            path.write_bytes(files["other"].read_bytes())
        elif path.suffix == ".jsonl":
            doubled(path)()
        elif path.suffix == ".jinja":
            path.write_text("{# edited #}" + path.read_text())
        else:
            path.write_text(path.read_text().replace("float(len", "2 * float(len"))

    done, count, result = training(stage, data, [*flags, "", "--save_interval 900"], {number: change})
    assert done.returncode == 2 and named in done.stderr and not result.exists(), done.stderr
    assert count == number + 1


def test_an_edited_config_leaves_trained_runs_alone(training, files):
    """And the held-out data, whose file is touched, but not changed."""

    def change() -> None:
        files["config"].write_text("training:\n  weight_decay: 5.0\n  max_steps: 1\n")
        files["data"].touch()

    flags = ["--config", files["config"], "", "--save_interval 900"]
    done, count, result = training("pretrain", "data", flags, {2: change})
    assert done.returncode == 0 and count == 4, done.stderr
    assert json.loads(result.read_text())["results"]["B"]["differences"] == [0.0, 0.0]
