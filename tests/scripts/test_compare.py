"""compare.py: pairs that differ by what was changed alone, whatever was killed; what it refuses; what it
says."""

import json
import math
import random
import shutil
import subprocess
import sys
import time
from statistics import mean, stdev
from typing import ClassVar

import psutil
import pytest

from common.errors import UserError
from common.settings import ROOT, StageArgs
from scripts import compare
from tests.conftest import sentence, write_jsonl
from tests.stage_process import run as run_stage
from tests.trainer.stage_flags import write_start_weights
from tools.compare import code, runs
from tools.compare.paired import t_quantile
from tools.compare.variant import letter_of
from tools.verify import launch
from tools.verify.launch import LAUNCH_VARIABLE, Run, finish, is_alive

SMALL = ["--hidden_size", 32, "--num_hidden_layers", 1, "--max_seq_len", 64, "--batch_size", 8]
SMALL += ["--accumulation_steps", 1, "--epochs", 1, "--learning_rate", 1e-2, "--dtype", "float32"]


@pytest.fixture
def data(tmp_path):
    """A text of which some records are held out."""
    rng = random.Random(3)
    return write_jsonl(tmp_path / "text.jsonl", [{"text": sentence(rng, 5, 20)} for _ in range(40)])


@pytest.fixture
def started(monkeypatch):
    """The commands of the runs, which are forked here and not started anew. `fail_at`: numbers of runs before
    which, and after which, the comparison is interrupted."""

    class Started(list):
        before: ClassVar[set[int]] = set()
        after: ClassVar[set[int]] = set()

    started = Started()

    def forked(run: Run) -> dict[str, float]:
        started.append(run.command)
        if len(started) in started.before:
            raise KeyboardInterrupt
        script = run.command[1]
        is_here = "/code/tree/" in script
        run_stage(f"{script.rpartition('train_')[2][:-3]}" if is_here else script, run.command[2:])
        if len(started) in started.after:
            raise KeyboardInterrupt
        return {"wall_seconds": 2.0, "cpu_per_update": 0.01}

    monkeypatch.setattr(runs, "finish", forked)
    return started


@pytest.fixture
def comparing(call, data, tmp_path):
    """comparing(*flags) runs the script on small data; folder: of the results."""

    def run(*flags, folder="out"):
        places = ["--save_dir", tmp_path / folder, "--cache_dir", tmp_path / "cache"]
        return call(compare, "--data_path", data, "--eval_share", 0.2, *places, *SMALL, *flags)

    return run


def result(folder) -> dict:
    (path,) = folder.glob("compare/*/result.json")
    return json.loads(path.read_text())


def test_pairs_have_equal_seeds_and_turn_their_order(comparing, started, tmp_path):
    variants = ["--eval_interval", 1, "--epochs", 2, "", "--learning_rate 1e-5"]
    done = comparing("--pairs", 3, *variants)
    assert done.returncode == 0, done.stderr

    def values(flag: str) -> list[str]:
        return [words[len(words) - words[::-1].index(flag)] for words in started]  # the last one counts

    order = [path.split("/")[-2] for path in values("--save_dir")]
    assert order == ["1_A", "1_B", "2_B", "2_A", "3_A", "3_B"]
    assert values("--seed") == ["42", "42", "43", "43", "44", "44"]

    found = result(tmp_path / "out")
    losses = {letter: [run["eval_loss"] for run in of] for letter, of in found["runs"].items()}
    differences = [b - a for a, b in zip(losses["A"], losses["B"], strict=True)]
    half = t_quantile(0.975, 2) * stdev(differences) / math.sqrt(3)
    told = found["results"]["B"]
    assert told["differences"] == differences
    assert (told["low"], told["high"]) == pytest.approx((mean(differences) - half, mean(differences) + half))
    assert told["low"] > 0 and told["sentence"].startswith("worse: eval_loss +")
    assert "better in 0 of 3 pairs" in told["sentence"]
    needed = told["effect"]["ratio"]
    assert needed > 2 and f"for the same eval_loss it needs {needed:.3g} of A's updates [" in told["sentence"]
    assert found["spread"] == 0.0  # that of so large a difference is no guide
    assert len({run["tokens"] for run in found["runs"]["A"]}) == 1

    (folder,) = (tmp_path / "out/compare").glob("pretrain_*")
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert not list(folder.rglob("*.pth"))  # weights would fill the disk
    log = tmp_path / "out/compare/log.md"
    assert log.read_text().count("\n") == 1 and folder.name in log.read_text()
    # the same again: nothing is trained, the log has its line
    count = len(started)
    assert comparing("--pairs", 3, *variants).returncode == 0
    assert len(started) == count and log.read_text().count("\n") == 1
    # going on says that the result was seen
    assert "already seen with 3 pairs" in comparing("--pairs", 4, *variants).stdout
    assert len(started) == count + 2 and result(tmp_path / "out")["looks"] == [3]


def test_interrupted_anywhere_it_ends_with_the_same_file(comparing, started, tmp_path):
    flags = ["--pairs", 2, "--name", "x", "", "--weight_decay 0.3"]
    assert comparing(*flags).returncode == 0
    started.clear()
    started.before, started.after = {1, 4, 6}, {2, 5}
    for _ in range(5):
        done = comparing(*flags, folder="other")
        assert done.returncode == 130 and "stopped: by Ctrl-C" in done.stderr
    assert comparing(*flags, folder="other").returncode == 0
    files = [(tmp_path / folder / "compare/x/result.json").read_text() for folder in ("out", "other")]
    assert files[0] == files[1].replace(str(tmp_path / "other"), str(tmp_path / "out"))


def test_a_variant_that_changes_nothing_is_called_so(comparing, started, tmp_path):
    assert comparing("--pairs", 2, "", "--warmup_updates 0").returncode == 0
    told = result(tmp_path / "out")["results"]["B"]
    assert told["sentence"] == "nothing changed: eval_loss is bitwise identical in all pairs"
    assert told["differences"] == [0.0, 0.0]


@pytest.fixture
def made_up(monkeypatch):
    """Runs that are not trained: (pair and letter, updates) of each. The second variant takes twice as long;
    a pair takes 4 s."""
    made: list[tuple[str, int]] = []

    def train(variant, stage, folder, seed, steps, quiz):
        made.append((folder.name, steps))
        (folder / "save").mkdir(parents=True, exist_ok=True)
        slowness = 2.0 if folder.name.endswith("B") else 1.0
        record = {"update": 7, "tokens": 70, "seconds": 1.0, "mean_loss": 2.0}
        write_jsonl(folder / "save/a_metrics.jsonl", [record])
        figures = {"eval_loss": seed / 100 + slowness, "updates": steps or 40, "tokens": 70}
        times = {"wall_seconds": 2.0, "training_seconds": slowness, "memory_mb": 1.0}
        return {"figures": figures, "inputs": {"tokenizer": "b"}, "times": times}

    monkeypatch.setattr(compare, "train", train)
    return made


def test_hours_become_pairs(comparing, made_up):
    flags = ["", "--weight_decay 0.3"]
    done = comparing("--hours", 13 / 3600, *flags)
    assert "a pair takes 4 s; 3 pairs find a difference of 1.18%" in done.stdout and len(made_up) == 6
    done = comparing("--hours", 4 / 3600, "--name", "short", *flags)
    assert done.returncode == 2
    assert "at least two must fit: give --hours 0.0056 for five pairs" in done.stderr


def test_the_slower_variant_gets_fewer_updates(comparing, made_up):
    """They are measured in a pair that does not count, and once."""
    flags = ["--same", "seconds", "--name", "x", "", "--weight_decay 0.3"]
    assert comparing("--pairs", 2, *flags).returncode == 0
    assert made_up == [("0_A", 0), ("0_B", 0), ("1_A", 40), ("1_B", 20), ("2_B", 20), ("2_A", 40)]
    made_up.clear()
    assert comparing("--pairs", 3, *flags).returncode == 0
    assert made_up[:2] == [("1_A", 40), ("1_B", 20)] and len(made_up) == 6


def test_the_spread_is_learned_from_earlier_comparisons(tmp_path):
    """From those of the same stage, by the same figure."""
    assert compare.known_spread(tmp_path, "sft", "eval_loss") == compare.SPREAD
    earlier = [("sft", "eval_loss", 0.02), ("dpo", "eval_loss", 0.5), ("sft", "eval_loss", 0.0)]
    earlier += [("sft", "quiz", 0.3), ("sft", "eval_loss", 0.04)]
    for name, (stage, metric, spread) in enumerate(earlier):
        (tmp_path / str(name)).mkdir()
        content = {"settings": {"stage": stage}, "metric": metric, "spread": spread}
        (tmp_path / str(name) / "result.json").write_text(json.dumps(content))
    assert compare.known_spread(tmp_path, "sft", "eval_loss") == pytest.approx(0.03)


MISTAKES = {
    "one variant": (["--weight_decay 0.3"], "give two variants or more"),
    "one pair": (["--pairs", 1, "", "--packing 1"], "--pairs must be at least 2"),
    "no time": (["--hours", 0, "", "--packing 1"], "--hours above 0"),
    "a flag that there is not": (
        ["--bath_size", 3, "", "--packing 1"],
        "--bath_size is unknown; did you mean",
    ),
    "a wrong flag of a variant": (
        ["", "--weight_decay 11"],
        "--weight_decay must be less than or equal to 10",
    ),
    "another seed": (["", "--seed 3"], 'variant "--seed 3": --seed changes how the runs are measured'),
    "another share": (["", "--eval_share 0.1"], "--eval_share changes how the runs are measured"),
    "other samples": (["", "--max_seq_len 32"], "--max_seq_len changes how the runs are measured"),
    "other data": (["", "--data_path other.jsonl"], "other data need a separate held-out file"),
    "a place": (["", "--checkpoint_dir x"], "--checkpoint_dir: this script sets it"),
    "no revision": (
        ["--base", "nosuch"],
        "--base 'nosuch' is neither a folder nor a revision of the git repo",
    ),
    "an empty revision": (["--base", ""], "--base '' is neither a folder nor a revision"),
    "a file": (["--base", "README.md"], "--base 'README.md' is neither a folder nor a revision"),
    "a variant of one word": (["", "--packing"], '--packing may be a variant or a flag of all runs: write "'),
    "a first variant of one word": (["--packing", "", "--seed 3"], "--packing may be a variant or a flag"),
    "one word against a revision": (["--base", "HEAD", "--packing"], "--packing may be a variant or a flag"),
    "one word with a value": (
        ["--base", "HEAD", "--weight_decay=0.3"],
        'write "--weight_decay 0.3", in quotes, for a variant, and --weight_decay 0.3, without them, for all',
    ),
    "one word before another": (["--packing", "--weight_decay 0.3"], "--packing may be a variant or a flag"),
    "an unknown flag of a variant": (
        ["", "--bath_size 3"],
        'variant "--bath_size 3": --bath_size is unknown',
    ),
    "no code": (["--base", "/"], "/ does not contain the code of this trainer"),
    "a path as a name": (["--name", "a/b", "", "--packing 1"], "--name 'a/b' must be a plain name"),
    "an open quote": (["", "--save_weight 'a"], "No closing quotation"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_line(case, comparing, started):
    flags, expected = MISTAKES[case]
    done = comparing(*flags)
    assert done.returncode == 2 and expected in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not started


def test_other_settings_are_refused_by_name(comparing, started):
    started.before = {1}
    comparing("--pairs", 2, "--name", "x", "", "--weight_decay 0.3")
    done = comparing("--pairs", 2, "--name", "x", "", "--weight_decay 0.2")
    assert done.returncode == 2
    assert "was begun with variants ['', '--weight_decay 0.3'], not ['', '--weight_decay 0.2']" in done.stderr
    done = comparing("--pairs", 2, "--name", "x", "--same", "seconds", "", "--weight_decay 0.3")
    assert "was begun with same 'tokens', not 'seconds'" in done.stderr


def test_unequal_tokens_are_refused_after_the_first_runs(comparing, started):
    done = comparing("--pairs", 2, "", "--max_steps 3")
    assert done.returncode == 2 and 'variant "--max_steps 3" trains on -' in done.stderr and len(started) == 2


def test_another_tokenizer_is_compared_by_bits_per_byte(comparing, started, data, tmp_path, call):
    from scripts import train_tokenizer

    made = tmp_path / "tokenizer"
    assert (
        call(train_tokenizer, "--data_path", data, "--vocab_size", 300, "--output_dir", made).returncode == 0
    )
    assert comparing("--pairs", 2, "", f"--tokenizer_path {made}").returncode == 0
    found = result(tmp_path / "out")
    assert found["metric"] == "eval_bpb"
    bits = [[run["eval_bpb"] for run in of] for of in found["runs"].values()]
    assert found["results"]["B"]["differences"] == [b - a for a, b in zip(*bits, strict=True)]


def test_another_stage_by_its_own_figure_from_weights_by_name(comparing, started, corpus, tmp_path):
    """DPO by eval_accuracy, from weights in --save_dir, which the runs, that write elsewhere, are given by
    their path."""
    write_start_weights(tmp_path / "out", {"start_32": {"hidden_size": 32, "num_hidden_layers": 1}})
    flags = ["--stage", "dpo", "--data_path", corpus["dpo"], "--from_weight", "start", "--pairs", 2]
    done = comparing(*flags, "", "--beta 0.5")
    assert done.returncode == 0, done.stderr
    found = result(tmp_path / "out")
    assert (found["metric"], found["mode"]) == ("eval_accuracy", "max")
    assert all(0 <= run["eval_accuracy"] <= 1 for of in found["runs"].values() for run in of)


def test_a_quiz_decides(comparing, started, monkeypatch, tmp_path):
    real_run = subprocess.run

    def evaluate(command, **options):
        if command[0] == "git":
            return real_run(command, **options)
        done = run_stage("scripts.evaluate", command[2:])
        return subprocess.CompletedProcess(command, 0, done.out, done.err)

    monkeypatch.setattr(runs.subprocess, "run", evaluate)
    choices = ["the red fox walks", "stone river under", "sees and a blue"]
    records = [
        {"question": f"the {word}", "choices": choices, "answer": i % 3} for i, word in enumerate("abcdef")
    ]
    quiz = write_jsonl(tmp_path / "quiz.jsonl", records)
    done = comparing("--pairs", 2, "--quiz", f"--task choice --data_path {quiz}", "", "--learning_rate 1e-5")
    assert done.returncode == 0, done.stderr
    found = result(tmp_path / "out")
    assert (found["metric"], found["mode"]) == ("quiz", "max")
    values = [run["quiz"] for of in found["runs"].values() for run in of]
    assert len(values) == 4 and all(value in [i / 6 for i in range(7)] for value in values)


# --- code


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A small repository in the place of this one, with a commit and an edit."""
    folder = tmp_path / "repository"
    for name in ("trainer/a.py", "model/b.py", "docs/c.md", ".gitignore"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("*.log\n")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], cwd=folder, check=True)
    (folder / "trainer/a.py").write_text("edited\n")
    (folder / "trainer/new.py").write_text("new\n")
    (folder / "trainer/ignored.log").write_text("no\n")
    (folder / "model/b.py").unlink()
    monkeypatch.setattr(code, "ROOT", folder)
    return folder


def test_code_is_copied_as_it_is_and_as_it_was(repository, tmp_path):
    entries = sorted((repository / ".git").rglob("*"))
    code.copy_code(str(repository), tmp_path / "tree")
    code.copy_code(code.resolve_base("HEAD"), tmp_path / "base")

    def files(folder):
        return {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}

    assert files(tmp_path / "tree") == {"trainer/a.py": "edited\n", "trainer/new.py": "new\n"}
    assert files(tmp_path / "base") == {"trainer/a.py": "*.log\n", "model/b.py": "*.log\n"}
    for setting in ("core.autocrlf=true", "core.eol=crlf"):  # as in Git for Windows
        subprocess.run(["git", "config", *setting.split("=")], cwd=repository, check=True)
    code.copy_code(code.resolve_base("HEAD"), tmp_path / "crlf")
    assert (tmp_path / "crlf/trainer/a.py").read_bytes() == b"*.log\n"
    differing = ["model/b.py", "trainer/a.py", "trainer/new.py"]
    names = code.copied_files(tmp_path / "tree")
    assert code.differing_files(tmp_path / "tree", tmp_path / "base", names) == differing
    assert sorted((repository / ".git").rglob("*")) == entries  # nothing is left in the repository
    (repository / "trainer/a.py").write_text("edited again\n")
    code.copy_code(str(repository), tmp_path / "tree")  # it is there: a comparison goes on with its copy
    assert (tmp_path / "tree/trainer/a.py").read_text() == "edited\n"


def test_every_file_of_the_code_counts_and_no_data(repository, tmp_path):
    """A template and Python that git ignores are code; what lies in dataset/ and what Python compiles is not."""
    (repository / "model/chat_template.jinja").write_text("a")
    (repository / "dataset/raw").mkdir(parents=True)
    (repository / "dataset/raw/big.parquet").write_text("data")
    (repository / "dataset/local.py").write_text("a")
    (repository / ".gitignore").write_text("*.log\nlocal.py\n")
    (repository / "trainer/local.py").write_text("a")
    code.copy_code(str(repository), tmp_path / "tree")
    names = ["dataset/local.py", "model/chat_template.jinja", "trainer/a.py", "trainer/local.py"]
    assert sorted(code.copied_files(tmp_path / "tree")) == [*names, "trainer/new.py"]

    def edited() -> list[str]:
        return code.differing_files(repository, tmp_path / "tree", code.code_files(repository))

    (repository / "dataset/raw/big.parquet").write_text("other data")
    (tmp_path / "tree/trainer/__pycache__").mkdir()
    (tmp_path / "tree/trainer/__pycache__/a.cpython-311.pyc").write_text("compiled")
    assert edited() == []
    (repository / "model/chat_template.jinja").write_text("b")
    (repository / "trainer/local.py").write_text("b")
    assert edited() == ["model/chat_template.jinja", "trainer/local.py"]


def test_a_revision_from_before_a_rename_is_one_line(comparing, started, tmp_path):
    """The script had another name then; or it knows other flags."""
    other = tmp_path / "other"
    code.copy_code(str(ROOT), other)
    subprocess.run(["git", "init", "-q"], cwd=other, check=True)
    script = other / "trainer/train_pretrain.py"
    script.rename(other / "trainer/pretrain.py")
    done = comparing("--pairs", 2, "--base", other)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and not started
    assert (
        "has no trainer/train_pretrain.py, which had another name then; give a newer revision" in done.stderr
    )


def test_a_run_of_older_code_that_says_less_is_one_line(comparing, monkeypatch):
    """Its records have no memory_mb."""

    def finish(run: Run) -> dict[str, float]:
        save = run.folder / "save"
        save.mkdir()
        record = {"update": 1, "tokens": 9, "tokens_per_second": 3.0, "eval_loss": 2.0}
        write_jsonl(save / "a_metrics.jsonl", [record])
        return {"wall_seconds": 1.0}

    monkeypatch.setattr(runs, "finish", finish)
    done = comparing("--pairs", 2, "", "--weight_decay 0.3")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "wrote no 'memory_mb': this code is too old" in done.stderr


def test_more_variants_than_letters(comparing, made_up, tmp_path):
    rates = [f"--learning_rate {number}e-3" for number in range(1, 30)]
    assert comparing("--pairs", 2, *rates).returncode == 0
    names = [name for name, _ in made_up]
    assert names[25:29] == ["1_Z", "1_AA", "1_AB", "1_AC"] and len(set(names)) == 58
    assert list(result(tmp_path / "out")["results"])[24:] == ["Z", "AA", "AB", "AC"]
    assert [letter_of(number) for number in (0, 701, 702)] == ["A", "ZZ", "AAA"]


def test_an_edit_against_another_folder_of_code(comparing, started, tmp_path):
    """The other code trains with a rate at which nothing is learned."""
    other = tmp_path / "other"
    code.copy_code(str(ROOT), other)
    subprocess.run(["git", "init", "-q"], cwd=other, check=True)
    path = other / "trainer/train_pretrain.py"
    schedule = "schedule = stage.warmup_cosine"
    assert schedule in path.read_text()
    path.write_text(path.read_text().replace(schedule, "schedule = lambda *_: 1e-6"))
    done = comparing("--pairs", 2, "--base", other)
    assert done.returncode == 0, done.stderr
    found = result(tmp_path / "out")
    assert found["edited"] == ["trainer/train_pretrain.py"]
    assert all(
        b < a for a, b in zip(*([r["eval_loss"] for r in of] for of in found["runs"].values()), strict=True)
    )
    assert "edited: trainer/train_pretrain.py" in done.stdout


def test_edits_after_the_start(comparing, started, monkeypatch):
    flags = ["--pairs", 2, "--name", "x", "", "--weight_decay 0.3"]
    started.before = {2}
    comparing(*flags)
    monkeypatch.setattr(compare, "differing_files", lambda *folders: ["trainer/loop.py"])
    done = comparing(*flags)
    assert done.returncode == 0 and "trainer/loop.py changed since" in done.stderr
    done = comparing(*flags)
    assert done.returncode == 2 and "give a --name for a comparison of the files as they are" in done.stderr


# --- a run

SCRIPT = """
import pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
folder.mkdir(exist_ok=True)
time.sleep(float(sys.argv[2]))
begin = time.process_time()
(folder / "a_metrics.jsonl").write_text('{"update": 1}\\n')
time.sleep(0.1)
while time.process_time() < begin + 0.4:
    pass
(folder / "a_metrics.jsonl").write_text('{"update": 4}\\n')
print("error: " + sys.argv[3], file=sys.stderr)
sys.exit(2 if sys.argv[3] else 0)
"""


def test_a_run_that_is_left_over_is_ended_and_times_are_told(tmp_path):
    run = Run(
        tmp_path / "run", StageArgs(), [sys.executable, "-c", SCRIPT, str(tmp_path / "run/save"), "0", ""]
    )
    log = str(tmp_path / "run/launch_1.log")
    left = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], env={LAUNCH_VARIABLE: log}
    )
    while not psutil.Process(left.pid).environ():
        time.sleep(0.01)
    times = finish(run)
    left.wait(10)
    assert not psutil.pid_exists(left.pid) or not is_alive(psutil.Process(left.pid))
    assert times["wall_seconds"] > 0.4
    assert 0.05 < times["cpu_per_update"] < 0.2  # 0.4 s of CPU, 4 updates


def test_the_seconds_of_a_killed_run_are_those_of_all_its_launches(tmp_path, monkeypatch):
    """Those of the training before the checkpoint that it goes on from, and those of this launch."""
    (tmp_path / "run/checkpoint").mkdir(parents=True)
    (tmp_path / "run/checkpoint/a_resume.pth").touch()
    monkeypatch.setattr(launch, "read_checkpoint", lambda path: {"update": 2, "seconds": 100.0})
    run = Run(
        tmp_path / "run", StageArgs(), [sys.executable, "-c", SCRIPT, str(tmp_path / "run/save"), "0", ""]
    )
    assert 100.4 < finish(run)["wall_seconds"] < 200


def test_the_mistake_of_a_run_is_one_line(tmp_path):
    save = str(tmp_path / "run/save")
    run = Run(tmp_path / "run", StageArgs(), [sys.executable, "-c", SCRIPT, save, "0", "no such data"])
    with pytest.raises(UserError, match=r"run: no such data .all of it: .*launch_1.log"):
        finish(run)


def test_copies_are_left_out_of_git():
    assert (
        subprocess.run(["git", "check-ignore", "-q", "out/compare/x"], cwd=ROOT, check=False).returncode == 0
    )
    assert shutil.which("git")
