"""The built-in demo data: a small invented world in Chinese and English, generated from a seed without
downloads.

    python -m scripts.demo.corpus --output_dir dataset/demo --seed 0

It shows what each training stage is for. The pretraining data state four facts about every inhabitant of a
valley, each in many wordings and in both languages. The SFT data show how to answer questions about some of
the inhabitants, in conversations that change the subject. They also show what to say if nothing in the valley
is the answer. The quiz asks about inhabitants whom SFT never mentions, so it needs both: facts from
pretraining, and the form of an answer from SFT.

Files: pretrain.jsonl, pretrain_eval.jsonl {"text"}; sft.jsonl, sft_eval.jsonl {"conversations"}; quiz.jsonl
{"conversations", "answer", "wrong_answers"}: one question each, whose answer must contain the value in
"answer" and no other; quiz_second.jsonl and quiz_fifth.jsonl, the same questions after one and four about
other people. For the stages after SFT:

persona       another identity than in SFT, asked for in many wordings, beside conversations of SFT. The quiz
              has other wordings.
terse         pairs of answers for DPO: the rejected one is SFT's sentence, the chosen one the same without
              the name. Held-out pairs are about other people.
distillation  questions about everybody; one answer in three is wrong. Held-out ones, also the quiz's, come in
              other wordings; their answers are right.
reasoning     questions that take two facts, where somebody lives and what that place is known for. One answer
              in three states both in `reasoning_content`. The quiz asks about people whom the conversations
              never mention.
sums/         sums for reinforcement learning, see sums.py.

A seed gives the same bytes everywhere; files that are up to date are not rewritten. In the texts of
world.json, {n} stands for the name of a person, {v} for the value, {p} for a place.
A model can answer questions about a fact only if it was stated in several wordings: Allen-Zhu & Li,
arXiv:2309.14316.
"""

import sys
from pathlib import Path

# run the code beside this file
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.command_line import Parser, one_line_errors
from common.errors import UserError
from common.files import atomic_write, json_lines
from common.settings import ROOT
from scripts.demo.sums import make_sums
from scripts.demo.tour import make_tour
from scripts.demo.world import make_corpus


def write_files(output_dir: str | Path, files: dict[str, list[dict]]) -> dict[str, int]:
    """Write {file name: records} into a folder; returns the number of records per file.

    Files are replaced atomically; one with the right content is not touched.
    Raises UserError if the folder cannot be created or written.
    """
    folder = Path(output_dir)
    try:
        for name in files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--output_dir {folder} cannot be created ({error.strerror}); give another folder"
        ) from error
    for name, records in files.items():
        data = json_lines(records)
        path = folder / name
        if not path.is_file() or path.read_bytes() != data:
            atomic_write(path, lambda file, data=data: file.write(data))
    return {name: len(records) for name, records in files.items()}


def main() -> None:
    """Write the files of a seed, and print their sizes."""
    parser = Parser(description="Generate the built-in demo data; nothing is downloaded.")
    parser.add_argument("--output_dir", default=str(ROOT / "dataset/demo"), help="folder for the files")
    parser.add_argument("--seed", type=int, default=0, help="number that selects the world")
    args = parser.parse_args()
    files = make_corpus(args.seed) | make_tour(args.seed) | make_sums(args.seed)
    counts = write_files(args.output_dir, files)
    sizes = ", ".join(f"{count} {name}" for name, count in counts.items())
    print(f"seed {args.seed} in {args.output_dir}: {sizes}")


if __name__ == "__main__":
    with one_line_errors():
        main()
