"""What is saved while training goes on."""

from tests.stage_process import Faults, run
from tests.trainer.stage_flags import flags
from trainer.checkpoint.run import delete_old_checkpoints


def test_numbered_states_go_but_for_the_last_and_the_best(tmp_path):
    """Later ones are of a run that went further before it was killed."""
    for update in (2, 4, 6, 8, 10):
        (tmp_path / f"a_64_update_{update:08d}.pth").touch()
    delete_old_checkpoints(tmp_path, "a_64", 2, {"update": 8, "best_update": 2})
    assert sorted(int(path.stem[-2:]) for path in tmp_path.iterdir()) == [2, 6, 8, 10]


def test_a_state_that_cannot_be_read_again_ends_the_run_at_its_first_save(corpus, tmp_path):
    odd = "import fractions, trainer.checkpoint.run as s\n"
    odd += "s.asdict = lambda progress, real=s.asdict: real(progress) | {'odd': fractions.Fraction(1, 2)}"
    argv = flags(corpus, tmp_path, "pretrain", epochs=1, num_hidden_layers=1)
    (line,) = run("pretrain", argv, Faults(script=odd), status=2).error_lines
    assert "pretrain_32_resume.pth, just written, cannot be read again" in line


SLOW_BEST = """
import threading
from trainer import loop
from trainer.weights import files
write, save, saved = files.atomic_write, loop.save_checkpoint, threading.Event()
write_weights = loop.write_weights

def slow_write(path, *args):
    if path.name.startswith("pretrain_best"):
        print("waited" if saved.wait(20) else "training waits")
    write(path, *args)

def best_weights(state, name):
    saved.clear()
    return write_weights(state, name)

def noted_save(state):
    save(state)
    saved.set()

files.atomic_write, loop.save_checkpoint, loop.write_weights = slow_write, noted_save, best_weights
"""


def test_training_does_not_wait_for_the_best_weights(corpus, tmp_path):
    """They are written while it goes on, also beyond the checkpoint of their update."""
    argv = flags(corpus, tmp_path, "pretrain", epochs=1)
    done = run("pretrain", argv, Faults(script=SLOW_BEST))
    assert "waited" in done.out and "training waits" not in done.out
    assert (tmp_path / "out/pretrain_best_32.pth").exists()
