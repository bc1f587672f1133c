"""Built-in sums for reinforcement learning: what a small model half knows after SFT and can learn from
rewards.

Sums of one and two digits: sft.jsonl, rl.jsonl and test.jsonl have no pair of numbers in common, in either
order. rl_shuffled.jsonl is a control that teaches nothing: the questions of rl.jsonl with shuffled answers.
The model cannot do sums of three digits alone, but it may leave them to a calculator: agent_sft.jsonl shows
in a few examples how to call it; agent_rl.jsonl and agent_test.jsonl have other pairs.

All are conversations that end with the answer. `python -m scripts.demo.corpus` writes them.
"""

import random

# of the 5,050 pairs of up to two digits those kept for the test; questions made of them
HELD_OUT, TEST = 505, 300
AGENT = {"agent_sft.jsonl": 1000, "agent_rl.jsonl": 640, "agent_test.jsonl": 200}  # pairs of three digits
CALCULATE = {  # the tool of the calculator in trainer/rollouts/environments.py
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Compute an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "such as 12 * (3 + 4)"}},
            "required": ["expression"],
        },
    },
}

Pair = tuple[int, int]


def both_orders(pairs: list[Pair]) -> list[Pair]:
    """Each pair in both orders, sorted."""
    return sorted({(a, b) for a, b in pairs} | {(b, a) for a, b in pairs})


def ask(pair: Pair, answer: int, *between: dict) -> dict:
    """A conversation: the question, the turns between question and answer, and the answer."""
    question = {"role": "user", "content": f"{pair[0]}+{pair[1]}=?"}
    return {"conversations": [question, *between, {"role": "assistant", "content": str(answer)}]}


def ask_calculator(pair: Pair) -> dict:
    """A conversation in which the answer comes from the calculator."""
    call = {"name": "calculate", "arguments": {"expression": f"{pair[0]}+{pair[1]}"}}
    turn = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}
    return ask(pair, sum(pair), turn, {"role": "tool", "content": str(sum(pair))}) | {"tools": [CALCULATE]}


def make_small_sums(rng: random.Random) -> dict[str, list[dict]]:
    """The files with sums of one and two digits."""
    pairs = [(a, b) for a in range(100) for b in range(a, 100)]
    rng.shuffle(pairs)
    test, rest = both_orders(pairs[:HELD_OUT]), pairs[HELD_OUT:]
    sft, rl = both_orders(rest[: len(rest) // 2]), both_orders(rest[len(rest) // 2 :])
    answers = [sum(pair) for pair in rl]
    rng.shuffle(answers)
    return {
        "sft.jsonl": [ask(pair, sum(pair)) for pair in sft],
        "rl.jsonl": [ask(pair, sum(pair)) for pair in rl],
        "rl_shuffled.jsonl": [ask(pair, answer) for pair, answer in zip(rl, answers, strict=True)],
        "test.jsonl": [ask(pair, sum(pair)) for pair in rng.sample(test, TEST)],
    }


def make_agent_sums(rng: random.Random) -> dict[str, list[dict]]:
    """The files with sums of three digits."""
    pairs = [(a, b) for a in range(100, 1000) for b in range(a, 1000)]
    drawn = [(a, b) if rng.random() < 0.5 else (b, a) for a, b in rng.sample(pairs, sum(AGENT.values()))]
    files = {}
    for name, size in AGENT.items():
        files[name] = [
            ask_calculator(pair) if name == "agent_sft.jsonl" else ask(pair, sum(pair))
            for pair in drawn[:size]
        ]
        drawn = drawn[size:]
    return files


def make_sums(seed: int) -> dict[str, list[dict]]:
    """All files as {file name: records}, a pure function of the seed."""
    rng = random.Random(seed)
    files = make_small_sums(rng) | make_agent_sums(rng)
    return {f"sums/{name}": records for name, records in files.items()}
