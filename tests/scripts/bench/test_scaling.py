"""How an update's time grows: the points and their arithmetic are those that the flags ask for; no time is judged."""

import json
import statistics

import pytest

from scripts.bench import scaling

SMALL = ["--tokens", 128, "--max_seq_len", 32, "--hidden_size", 32, "--num_hidden_layers", 2, "--warmup", 1]
SMALL += ["--moe_hidden_size", 16, "--moe_num_hidden_layers", 1, "--rounds", 2, "--dtype", "float32"]
POINTS = {"length": [16, 32, 128], "width": [32, 48], "experts": [2, 4], "top_k": [1, 8]}


def operations(width: int, depth: int, length: int, experts: int = 0, k: int = 1) -> float:
    """Floating-point operations per token of an update of 128, counted by hand: two per weight or pair of numbers in
    the forward pass, four in the backward pass; 8 heads and 4 of keys and values; half of attention's square."""
    hidden, keys = {16: 64, 32: 128, 48: 192}[width], width // 2
    weights = 2 * width * width + 2 * width * keys + 3 * width * hidden * k + width * experts
    pairs = 128 * length * width  # scores and their mixture of the values, each half of a square
    targets = 128 - 128 // length
    return 6 * (depth * (128 * weights + pairs) + targets * width * 6400) / 128


def test_each_curve_has_its_points_and_their_arithmetic(call, tmp_path):
    pytest.importorskip("matplotlib")
    points = [word for name, values in POINTS.items() for word in (f"--{name}", *values)]
    out = ["--json", tmp_path / "new/scaling.json", "--png_dir", tmp_path / "drawn"]
    done = call(scaling, *SMALL, *points, *out)
    assert done.returncode == 0, done.stderr
    curves = json.loads((tmp_path / "new/scaling.json").read_text(encoding="utf-8"))["curves"]
    assert list(curves) == list(POINTS)
    arithmetic = {
        "length": [operations(32, 2, length) for length in POINTS["length"]],
        "width": [operations(width, 2, 32) for width in POINTS["width"]],
        "experts": [operations(16, 1, 32, experts) for experts in POINTS["experts"]],
        "top_k": [operations(16, 1, 32, 8, k) for k in POINTS["top_k"]],
    }
    for name, curve in curves.items():
        found = curve["points"]
        assert [point["value"] for point in found] == POINTS[name]
        assert [point["flops_per_token"] for point in found] == arithmetic[name]
        assert [point["flops_growth"] for point in found] == [each / arithmetic[name][0] for each in arithmetic[name]]
        assert found[0]["growth"] == 1
        for point in found:
            rounds, seconds = point["seconds_per_token_of_rounds"], point["seconds_per_token"]
            assert len(rounds) == 2 and seconds == statistics.median(rounds) > 0
            assert point["growth"] == seconds / found[0]["seconds_per_token"]
            row = f"{point['value']} {point['parameters']:,} {seconds:.3e} {point['growth']:.2f}"
            assert f"{row} {point['flops_growth']:.2f}" in [" ".join(line.split()) for line in done.stdout.splitlines()]
        assert curve["title"] in done.stdout
        assert (tmp_path / f"drawn/{name}.png").read_bytes()[:4] == b"\x89PNG"
    sizes = {name: [point["parameters"] for point in curve["points"]] for name, curve in curves.items()}
    assert len(set(sizes["length"])) == len(set(sizes["top_k"])) == 1
    assert sizes["experts"][1] - sizes["experts"][0] == 2 * (3 * 16 * 64 + 16)  # two experts, and their router's rows
    assert done.stderr.count(": round 2 of 2, ") == sum(map(len, POINTS.values()))
    assert "updates of 128 tokens in samples of 32; float32 on cpu" in curves["experts"]["title"]


def test_points_take_turns_and_only_the_chosen_curve_is_measured(call):
    done = call(scaling, *SMALL, "--curves", "length", "--length", 16, 32, "--rounds", 3)
    turns = [line.split(":")[0] for line in done.stderr.splitlines() if "round" in line]
    assert turns == [f"length {length}" for length in (16, 32, 32, 16, 16, 32)]
    assert done.stdout.count("seconds per token") == 1


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--curves", "ranks"], "invalid choice: 'ranks'"),
        (["--width", "32", "50"], "--width: must be divisible by 16, not '50'"),
        (["--tokens", "100"], "--tokens 100 must be divisible by the length of the samples, --length 16"),
        (["--length", "128", "--max_seq_len", "48"], "divisible by the length of the samples, --max_seq_len 48"),
        (["--top_k", "9"], "--top_k 9: --num_experts_per_tok 9 must be --num_experts 8 or less"),
        (["--rounds", "0"], "--rounds: must be 1 or more"),
        (["--device", "abacus"], "--device abacus is unknown"),
        (["--json", "."], "--json or --png_dir cannot be written"),
    ],
)
def test_a_mistake_is_one_line(call, flags, told):
    done = call(scaling, *SMALL, "--length", 16, *flags)
    assert done.returncode == 2 and told in done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_models_that_do_not_fit_are_one_line(call, monkeypatch):
    monkeypatch.setattr(scaling, "STATE", 10**12)
    done = call(scaling, *SMALL, "--curves", "experts", "--experts", 2, 4)
    assert done.returncode == 2 and done.stderr.startswith("error: --experts: all points together need ")
