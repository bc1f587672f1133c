"""Samples of what the model generates. At each evaluation a few prompts are answered, once with the likeliest
tokens and once with tokens drawn as in a chat, so that you can read a run as well as measure it. Training is
not affected: the answers have their own random numbers, and nothing is kept."""

from typing import TYPE_CHECKING, Any, cast

from common.errors import UserError, reason
from dataset.lm_dataset import StageDataset
from dataset.opening import sample_lines
from dataset.order import StageData
from dataset.rollout_prompts import PromptDataset
from dataset.token_cache import load_tokenizer
from model.prompts import document_tokens, prompt_tokens
from trainer.callbacks.base import Callback
from trainer.callbacks.train_state import TrainState
from trainer.devices.compiling import uncompiled
from trainer.devices.process_group import Logger, all_gather, is_main_process
from trainer.devices.wrapping import is_sharded, unwrap

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = tuple[str, list[int]]  # a prompt: its text for the log, and its tokens
# held-out samples that are answered; longest answer, and length of a document's opening, in tokens
NUM_PROMPTS, MAX_NEW_TOKENS, OPENING_TOKENS = 3, 48, 16
MIN_TRIGRAMS = 24  # with fewer trigrams, the share of distinct ones says little


def sample_callbacks(state: TrainState) -> list[Callback]:
    """The prompts of --sample_prompts. Raises UserError if it names a file and the model does not generate
    text, or if the file holds no prompt."""
    args, held_out = state.args, getattr(state.eval_loader, "dataset", None)
    is_file = args.sample_prompts != "auto"
    if is_file and not isinstance(held_out, StageData):
        raise UserError(f"--sample_prompts {args.sample_prompts} is for the stages; leave it out")
    if not isinstance(held_out, StageData):
        return []
    if is_sharded(state.model):
        Logger(
            f"--sample_prompts: none are answered with --parallel {args.parallel}, which has no whole weights"
        )
        return []
    tokenizer = load_tokenizer(args.tokenizer_path)
    prompts = file_prompts(args, tokenizer, held_out) if is_file else held_out_prompts(tokenizer, held_out)
    return [Samples(prompts, tokenizer)]


def file_prompts(args: Any, tokenizer: "PreTrainedTokenizerBase", held_out: StageData) -> list[Prompt]:
    """The prompts of a text file, one per line: a user's messages, or in pretraining the beginnings of
    documents."""
    thinking = {"enable_thinking": bool(getattr(args, "open_thinking", False))}
    tools = held_out.tools if isinstance(held_out, PromptDataset) else None

    def tokens(line: str) -> list[int]:
        if isinstance(held_out, StageDataset) and held_out.kind == "pretrain":
            return document_tokens(tokenizer, line)
        return prompt_tokens(tokenizer, [{"role": "user", "content": line}], tools, **thinking)

    try:
        return [(line, tokens(line)) for line in sample_lines(args.sample_prompts)]
    except ValueError as error:  # the chat template refuses it
        raise UserError(f"--sample_prompts {args.sample_prompts}: {reason(error)}") from error


def held_out_prompts(tokenizer: "PreTrainedTokenizerBase", held_out: StageData) -> list[Prompt]:
    """The beginnings of some held-out samples: a conversation up to its first answer, or the first words of a
    document."""
    chosen = sorted({i * len(held_out) // NUM_PROMPTS for i in range(NUM_PROMPTS)})
    if isinstance(held_out, PromptDataset):
        return [(str(held_out[i].messages[-1]["content"]), held_out[i].input_ids) for i in chosen]
    parts = []
    for sample in (held_out[i][0] for i in chosen):
        tokens, first_answered = sample["input_ids"].tolist(), int((sample["loss_weight"] != 0).argmax())
        is_document = held_out.kind == "pretrain"
        parts.append(opening(tokenizer, tokens) if is_document else tokens[: max(1, first_answered)])
    return [(prompt_text(tokenizer, part), part) for part in parts]


def opening(tokenizer: "PreTrainedTokenizerBase", tokens: list[int]) -> list[int]:
    """The first tokens of a document, some OPENING_TOKENS, up to the end of a word."""
    most = max(1, min(OPENING_TOKENS, len(tokens) // 2))
    for end in range(most, 0, -1):
        before = str(tokenizer.decode(tokens[:end], skip_special_tokens=True))
        behind = str(tokenizer.decode(tokens[: end + 1], skip_special_tokens=True))[len(before) :]
        is_whole = before and before[-1] != "\ufffd"  # not a part of a character
        if is_whole and not (is_in_word(before[-1]) and is_in_word(behind[:1])):
            return tokens[:end]
    return tokens[:most]


def is_in_word(character: str) -> bool:
    """Whether a word continues with this character: a letter or digit of a script with spaces between words
    (Chinese and Japanese come after these in Unicode), or a part of a character."""
    return (character.isalnum() and character < "\u2e80") or character == "\ufffd"


def prompt_text(tokenizer: "PreTrainedTokenizerBase", tokens: list[int]) -> str:
    """The text of a prompt; of a conversation only its last message, which stands before the last end of a
    turn."""
    special = set(tokenizer.all_special_ids)
    ends = [i for i, token in enumerate(tokens) if token in special]
    if len(ends) >= 2 and tokens[ends[-2]] == tokenizer.eos_token_id:  # the last one opens the answer
        before = ends[-3] if len(ends) >= 3 else -1
        return str(tokenizer.decode(tokens[before + 1 : ends[-2]])).partition("\n")[2]  # without the role
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


class Samples(Callback):
    """Answers prompts at each evaluation, on rank 0, with the weights that are evaluated."""

    def __init__(self, prompts: list[Prompt], tokenizer: "PreTrainedTokenizerBase"):
        self.prompts, self.tokenizer = prompts, tokenizer
        self.answers: list[
            tuple[list[int], list[int]]
        ] = []  # of the evaluation whose record is not written yet

    def on_validation_start(self, state: Any) -> None:
        if is_main_process():
            self.answers = self.write_answers(state)

    def on_log(self, state: Any, record: dict[str, Any]) -> None:
        """After an evaluation, add the samples on rank 0, after those of the rollouts if there are any. On
        all ranks, add the share of distinct trigrams in the answers."""
        if "eval_loss" not in record:
            return
        answers, self.answers = self.answers, []
        share, *_ = all_gather(distinct_trigrams([greedy for greedy, _ in answers]))  # of rank 0
        if share is not None:
            record["distinct_trigrams"] = share
        if not answers:
            return
        samples = []
        for (prompt, _), tokens in zip(self.prompts, answers, strict=True):
            texts = self.tokenizer.batch_decode(list(tokens), skip_special_tokens=True)
            answer, sampled = (text.rstrip("\ufffd") for text in texts)  # the limit may cut a character
            samples.append({"prompt": prompt, "answer": answer, "sampled": sampled})
        record["samples"] = [*record.get("samples", ()), *samples]

    def write_answers(self, state: TrainState) -> list[tuple[list[int], list[int]]]:
        """The model's answers to each prompt: the likeliest tokens, and tokens drawn as in a chat."""
        from model.sampling import DEFAULTS, Sampling

        samplings = [[Sampling(temperature=0.0), DEFAULTS]] * len(self.prompts)
        prompts = [tokens for _, tokens in self.prompts]
        written = write(state, self.tokenizer, prompts, samplings, MAX_NEW_TOKENS)
        return [(greedy, sampled) for greedy, sampled in written]


def write(
    state: TrainState,
    tokenizer: "PreTrainedTokenizerBase",
    prompts: list[list[int]],
    samplings: list[list[Any]],
    max_new_tokens: int,
) -> list[list[list[int]]]:
    """The tokens that the model generates for each prompt and each of its samplings; nothing if its logits
    are not finite. Training is not affected."""
    from model.generation import NotFinite, generate

    model: Any = unwrap(state.model)
    model = getattr(model, "actor", model)  # of PPO
    room = model.config.max_position_embeddings - max_new_tokens
    was_training = model.training
    model.eval()
    end_ids = [cast(int, tokenizer.eos_token_id)]
    prompts = [tokens[-room:] for tokens in prompts]
    try:
        with uncompiled(model):
            written = generate(model, prompts, samplings, max_new_tokens, end_ids)
    except NotFinite:  # the run diverges, which its losses show
        return []
    finally:
        model.train(was_training)
    return [[answer.tokens for answer in answers] for answers in written]


def distinct_trigrams(answers: list[list[int]]) -> float | None:
    """The share, 0 to 1, of distinct trigrams among all token trigrams of the answers; None if there are only
    a few of them."""
    trigrams = [list(zip(tokens, tokens[1:], tokens[2:], strict=False)) for tokens in answers]
    total = sum(len(each) for each in trigrams)
    return sum(len(set(each)) for each in trigrams) / total if total >= MIN_TRIGRAMS else None
