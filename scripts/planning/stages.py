"""The stages of a plan: their settings, their data, and their cost with a model of a given size."""

import argparse
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import say
from common.settings import ModelConfig, StageArgs
from dataset.files import expand_paths, read_records, split_data_path
from dataset.held_out import Split
from dataset.lm_dataset import StageDataset
from dataset.messages import BadRecord
from dataset.mixing import MixedDataset
from dataset.records import Chat, parse, turns_of
from dataset.token_cache import load_tokenizer
from scripts import train_tokenizer
from scripts.planning import early, exercises, rules, trial, variants
from scripts.planning.machine import Cost, measure
from scripts.teaching.material import files_of, runs_before
from trainer import train_full_sft, train_pretrain
from trainer.callbacks.right_answers import held_out_questions, max_new_tokens

START_SECONDS = 12.0  # seconds in which a stage starts Python, opens its data and builds its model
NGRAM, HASH_BASE, MOST_TOKENS_COMPARED = 6, 0x9E3779B97F4A7C15, 4_000_000
SMALL_BYTES = 4e6
MOST_TEXTS = 10_000  # that exercises are made from
MOST_EARLIER_BYTES = 2e8  # of texts to read again: tokenising more takes minutes
N_EVALS = 5  # evaluations of a stage besides the one before its first update
# generating a token takes 4 to 8 times as long as reading one
GENERATED_COST = 4
# flags of the plan that both stages have
SHARED_FLAGS = (
    "text_separator",
    "cache_dir",
    "on_bad_data",
    "max_bad_share",
    "max_lost_text",
    "device",
    "dtype",
)


@dataclass(frozen=True)
class Stage:
    """A stage of a plan: its script and settings, its data, how often it may read them, and what its model
    costs."""

    script: Any
    args: StageArgs
    data: StageDataset
    held_out: StageDataset
    most_passes: int  # the most passes over the data
    answer_tokens: int = 0  # tokens of the longest answers to the questions of an evaluation
    cost: Cost = field(default_factory=Cost)
    peak: float = 0.0  # measured bytes of an update on a GPU
    added: int = 0  # tokens of an epoch that the plan has written beside the data
    is_scattered: bool = False  # whether its text repeats itself, but mentions a name once in each place
    goes_on: bool = False  # whether it trains a given model (--from_weight), whose shape is given, too

    @property
    def has_few_conversations(self) -> bool:
        """Whether it is SFT on few conversations, which has separate rules."""
        tokens = self.own_data.num_tokens - self.added
        return self.script is train_full_sft and tokens < rules.FEW_TOKENS

    @property
    def repeats_itself(self) -> bool:
        """Whether most of the text repeats other parts of it."""
        return self.script is train_pretrain and self.most_passes >= 2 * rules.PASSES

    @property
    def own_data(self) -> StageDataset:
        """The data without replayed texts."""
        return self.data.datasets[0] if isinstance(self.data, MixedDataset) else self.data

    @property
    def part(self) -> float:
        """The part of the data that an epoch reads."""
        return self.own_data.epoch_items(self.args) / len(self.own_data)

    @property
    def passes(self) -> float:
        """The number of passes over the data; less than 1 for a part of them."""
        return self.args.epochs * self.part

    @property
    def tokens(self) -> int:
        """Tokens to train, replayed ones included."""
        return round(self.part * self.data.mean_tokens * len(self.data) * self.args.epochs)

    @property
    def updates(self) -> int:
        """Optimizer steps."""
        per_update = self.args.batch_size * self.args.accumulation_steps
        return math.ceil(round(self.part * len(self.data)) / per_update) * self.args.epochs

    @property
    def evaluation(self) -> float:
        """Seconds of an evaluation: its loss and, in SFT, its questions."""
        tokens = self.held_out.num_tokens + GENERATED_COST * self.answer_tokens
        return tokens * self.cost.eval_seconds_per_token

    @property
    def seconds(self) -> float:
        """The time from the first evaluation to the last log record, like `seconds` in the run's metrics. It
        covers updates and all evaluations but the last. Saving runs in the background; tokenising and
        starting are not counted."""
        updates = self.tokens * self.cost.seconds_per_token + self.updates * self.cost.seconds_per_update
        return updates + N_EVALS * self.evaluation

    @property
    def memory(self) -> float:
        """Bytes of the process with micro-batches of the mean length; on a GPU the measured bytes."""
        return self.peak or self.cost.memory(self.data.mean_tokens * self.args.batch_size)

    @property
    def disk(self) -> float:
        """Bytes of the stage's files: the fp16 weights twice, and two checkpoints."""
        return 26 * self.cost.parameters

    def with_depth(self, depth: int) -> "Stage":
        """This stage with a model of `depth` layers and heads (rules.WIDTH wide each), and the model's
        measured cost."""
        shape = {"hidden_size": rules.WIDTH * depth, "num_hidden_layers": depth, "num_attention_heads": depth}
        return replace(self, args=self.args.model_copy(update=shape)).measured()

    def measured(self) -> "Stage":
        """This stage with the measured cost of its model."""
        return replace(self, cost=measure(self.args, self.data))

    def with_passes(self, passes: float, memory: float) -> "Stage":
        """This stage with this many passes over the data, batch size and learning rate by the rules, and
        micro-batches that fit into `memory` bytes. passes: a whole number, or below 1 the share of the data
        to read once."""
        epochs, max_tokens = int(passes), 0
        if passes < 1:
            epochs, max_tokens = 1, max(1, round(passes * self.own_data.num_tokens))
        dropout = rules.dropout(passes) if self.script is train_pretrain else 0.0
        settings = {"epochs": epochs, "max_tokens": max_tokens, "dropout": dropout}
        args = self.args.model_copy(update=settings)
        tokens, item = replace(self, args=args).tokens, self.data.mean_tokens
        if self.has_few_conversations:
            batch = min(rules.FEW_BATCH, len(self.data))
            rate = rules.few_learning_rate(args.hidden_size, batch * item)
        else:
            batch = max(1, min(round(rules.update_tokens(tokens) / item), len(self.data)))
            is_new = self.script is train_pretrain and not self.goes_on
            rule = rules.learning_rate if is_new else rules.sft_learning_rate
            rate = rule(args.hidden_size, tokens, batch * item)
        numbers = {"batch_size": batch, "accumulation_steps": 1, "learning_rate": float(f"{rate:.1e}")}
        stage = replace(self, args=args.model_copy(update=numbers))
        while stage.memory > memory and stage.args.batch_size > 1:
            half, twice = stage.args.batch_size // 2, stage.args.accumulation_steps * 2
            smaller = {"batch_size": half, "accumulation_steps": twice}
            stage = replace(stage, args=stage.args.model_copy(update=smaller))
        warmup = {"warmup_updates": rules.warmup(stage.updates)}
        return replace(stage, args=stage.args.model_copy(update=warmup))

    def with_largest_micro_batch(self, memory: float) -> "Stage":
        """This stage with the largest micro-batches that fit into `memory` bytes of a GPU, found by trial.
        Fewer micro-batches make an update faster."""
        items, peak = trial.largest(self.script, self.args, memory)
        update_items = self.args.batch_size * self.args.accumulation_steps
        cut = {"batch_size": items, "accumulation_steps": max(1, round(update_items / items))}
        return replace(self, args=self.args.model_copy(update=cut), peak=peak)


def open_stages(args: argparse.Namespace) -> list[Stage]:
    """Open pretraining and, with --sft_data, SFT, with their data tokenised. Without --tokenizer_path, small
    data get a new vocabulary. Few conversations are trained together with pretraining text. Without text, a
    given model has SFT alone. Raises UserError."""
    tokenizer_path = args.tokenizer_path or ModelConfig().tokenizer_path
    earlier = find_earlier_texts(args) if args.from_weight else None
    if not args.pretrain_data:
        return [open_sft(args, tokenizer_path, earlier)]
    more: dict[str, Any] = {}
    if earlier:
        more = {"replay_data_path": earlier, "replay_share": rules.EARLIER_SHARE}
        say(f"{rules.EARLIER_SHARE:.0%} of the tokens: {earlier}, which the given model has read before")
    elif args.from_weight:
        most = f"up to {MOST_EARLIER_BYTES / 1e6:.0f} MB"
        say(f"no other text ({most}) that the given model has read was found; it will forget what it read")
    pretrain = open_stage(args, train_pretrain, args.pretrain_data, tokenizer_path, **more)
    repeated = 0.0
    if args.pretrain_data != args.sft_data:  # the chat template of conversations always repeats itself
        repeated = repeated_share(pretrain)
    texts = trained_texts(args, pretrain) if repeated >= rules.REPEATED_SHARE else []
    is_scattered = exercises.are_needed(texts)
    if not args.tokenizer_path:
        token_bytes = bytes_per_token(pretrain)
        text_bytes = pretrain.own_data.cache.report["target_bytes"]
        size = rules.vocabulary(text_bytes, token_bytes, is_scattered, exercises.has_spaces(texts))
        if size is not None:
            tokenizer_path = train_own_tokenizer(args, size)
            own = len(load_tokenizer(tokenizer_path))
            say(
                f"vocabulary: {own} tokens made from these data, in {tokenizer_path}. The data are few, and "
                f"a token of the shipped vocabulary would cover only {token_bytes:.2f} bytes of them. "
                "Compare losses with those of another vocabulary only in bits per byte of text (eval_bpb)"
            )
            pretrain = open_stage(args, train_pretrain, args.pretrain_data, tokenizer_path)
    passes = rules.most_passes(repeated, pretrain.own_data.num_tokens, is_scattered)
    pretrain = replace(pretrain, most_passes=passes, is_scattered=is_scattered)
    if not args.sft_data:
        return [pretrain]
    text = str(pretrain.args.data_path)
    sft = open_sft(args, tokenizer_path, f"{text},{earlier}" if earlier else text)
    # what is added would take the place of the earlier texts, which such a model needs more
    if pretrain.repeats_itself and sft.has_few_conversations and not earlier:
        return with_texts_of_the_plan(args, pretrain, sft, texts)
    return [pretrain, sft]


def find_earlier_texts(args: argparse.Namespace) -> str | None:
    """The data path of what the given model (--from_weight) has read before, without the text that it is to
    read now. It is found through the descriptions of the model's runs. None if there is nothing else, or if
    the files are gone."""
    files: dict[str, None] = {}
    for stage, run in runs_before(Path(args.from_weight)):
        if stage == "train_pretrain":
            files |= dict.fromkeys(map(os.path.abspath, files_of(run.data_path or "")))
    new = set(map(os.path.realpath, expand_paths(args.pretrain_data) if args.pretrain_data else []))
    found, left = [], MOST_EARLIER_BYTES
    for path in files:
        if os.path.realpath(path) in new:
            continue
        left -= os.path.getsize(path)
        if left >= 0:
            found.append(path)
    path = ",".join(found)
    return path if found and split_data_path(path) == found else None


def with_texts_of_the_plan(
    args: argparse.Namespace, pretrain: Stage, sft: Stage, texts: list[str]
) -> list[Stage]:
    """Both stages with texts that the plan writes: exercises in copying where they are needed, else
    conversations in pretraining, and variants of the conversations in SFT. Pretraining reads other exercises
    in each pass, SFT those of one pass. texts: `trained_texts` of pretraining."""
    text, conversations = str(pretrain.args.data_path), str(sft.args.data_path)
    trained, replayed, data = Split(sft.args.eval_share), text, conversations
    found = list(read_conversations(conversations, trained))
    turns = [turn for _, chat in found for turn in turns_of(chat) if turn[1]]
    is_scattered = pretrain.is_scattered
    are_needed = is_scattered or variants.are_needed(turns)
    if are_needed and (paths := write_exercises(args, pretrain, texts)):
        replayed = f"{text},{paths[0]}"
        pretrain = with_texts_beside(args, pretrain, ",".join(paths), exercises.SHARE)
    elif early_path := write_early(args, pretrain, [record for record, _ in found]):
        pretrain = with_texts_beside(args, pretrain, early_path, early.RATIO)
    path = f"{args.save_dir}/{variants.FILE}"
    if can_be_added(path, data) and variants.write_variants(turns, Path(path), trained.share, is_scattered):
        data = f"{conversations},{path}"
        say(f"variants of conversations: {path}; made-up words stand for words that the model does not know")
    if (replayed, data) == (text, conversations):
        return [pretrain, sft]
    settings = {"eval_share": sft.args.eval_share, "replay_data_path": replayed}
    settings["replay_share"] = rules.REPLAY_SHARE
    longer = open_stage(args, train_full_sft, data, pretrain.args.tokenizer_path, **settings)
    added = longer.own_data.num_tokens - sft.own_data.num_tokens
    return [pretrain, replace(longer, most_passes=rules.few_passes(len(longer.data)), added=added)]


def write_early(args: argparse.Namespace, pretrain: Stage, records: list[dict[str, Any]]) -> str | None:
    """Write these conversations for pretraining into the folder of the plan. Returns the path of the file;
    None if there are none."""
    path = f"{args.save_dir}/{early.FILE}"
    texts = read_texts(args, str(pretrain.args.data_path), Split(pretrain.args.eval_share))
    if not early.write_early(records, Path(path), sum(map(len, texts))):
        return None
    say(f"conversations in pretraining: {path}; a model that meets questions early finds more answers")
    return path


def with_texts_beside(args: argparse.Namespace, pretrain: Stage, path: str, ratio: float) -> Stage:
    """Pretraining that also reads the texts of this path. ratio: their tokens for a token of its own text."""
    more = {"replay_data_path": path, "replay_share": ratio / (1 + ratio)}
    text = str(pretrain.args.data_path)
    longer = open_stage(args, train_pretrain, text, pretrain.args.tokenizer_path, **more)
    added = round(longer.data.mean_tokens * len(longer.data)) - longer.own_data.num_tokens
    return replace(pretrain, args=longer.args, data=longer.data, held_out=longer.held_out, added=added)


def open_sft(args: argparse.Namespace, tokenizer_path: str, text: str | None = None) -> Stage:
    """Open SFT. text: the data of pretraining, if there is any; few conversations are trained together with
    it."""
    more: dict[str, Any] = {}
    if has_small_files(args.sft_data):
        whole = open_stage(args, train_full_sft, args.sft_data, tokenizer_path, eval_share=0.0)
        if whole.has_few_conversations:
            if args.eval_share is None:
                more["eval_share"] = rules.eval_share(whole.data.records)
            if text and args.pretrain_data != args.sft_data:
                more["replay_data_path"] = text
                more["replay_share"] = rules.REPLAY_SHARE
    sft = open_stage(args, train_full_sft, args.sft_data, tokenizer_path, **more)
    if sft.has_few_conversations:
        sft = replace(sft, most_passes=rules.few_passes(len(sft.data)))
    return sft


def has_small_files(path: str) -> bool:
    """Whether the files are small enough to be opened a second time quickly."""
    return sum(os.path.getsize(file) for file in expand_paths(path)) < SMALL_BYTES


def repeated_share(stage: Stage) -> float:
    """The share of n-grams of the held-out tokens that also occur in the training tokens. It is near 0 for a
    book, and 0.8 or more for a text that says the same things in a few ways. For long text only a part is
    compared."""
    powers = np.uint64(HASH_BASE) ** np.arange(NGRAM, dtype=np.uint64)  # modulo 2^64

    def ngrams(data: StageDataset) -> np.ndarray:
        tokens = np.array(data.cache.tokens[:MOST_TOKENS_COMPARED], dtype=np.uint64)
        return np.lib.stride_tricks.sliding_window_view(tokens, NGRAM) @ powers

    if min(len(stage.own_data.cache.tokens), len(stage.held_out.cache.tokens)) < NGRAM:
        return 0.0
    return float(np.isin(ngrams(stage.held_out), ngrams(stage.own_data)).mean())


def open_stage(args: argparse.Namespace, script: Any, path: str, tokenizer_path: str, **more: Any) -> Stage:
    """Open a stage with its data and the settings that are the same for all model sizes. more: further
    settings."""
    settings: dict[str, Any] = {name: getattr(args, name) for name in SHARED_FLAGS} | {
        "eval_share": rules.EVAL_SHARE if args.eval_share is None else args.eval_share,
        "data_path": ",".join(os.path.abspath(os.path.expanduser(part)) for part in split_data_path(path)),
        "save_dir": args.save_dir, "checkpoint_dir": f"{args.save_dir}/checkpoints",
        "tokenizer_path": tokenizer_path, "packing": script is train_pretrain, "optimizer": rules.OPTIMIZER,
    } | args.shape | more  # fmt: skip
    goes_on = bool(args.from_weight) and (script is train_pretrain or not args.pretrain_data)
    if goes_on:
        settings["from_weight"] = args.from_weight
    stage_args = script.Args(**settings)
    tokenizer = load_tokenizer(tokenizer_path)
    data, held_out = script.open_data(stage_args, tokenizer)
    is_asked = script is train_full_sft and held_out is not None
    questions = held_out_questions(tokenizer, held_out) if is_asked else []
    asked = len(questions) * max_new_tokens(questions)
    return Stage(script, stage_args, data, held_out, rules.SFT_PASSES, asked, goes_on=goes_on)


def train_own_tokenizer(args: argparse.Namespace, size: int) -> str:
    """Train a vocabulary of this size on the data; returns its folder. Raises UserError."""
    paths = dict.fromkeys(filter(None, (args.pretrain_data, args.sft_data)))
    texts = chain.from_iterable(read_texts(args, path) for path in paths)
    folder = f"{args.save_dir}/tokenizer"
    train_tokenizer.save(train_tokenizer.train(texts, size), Path(folder))
    return folder


def write_exercises(args: argparse.Namespace, pretrain: Stage, texts: list[str]) -> list[str]:
    """Write exercises in copying from these texts into the folder of the plan. Returns the path of those of
    one pass and the path of those of all others; none if there are no exercises."""
    text, trained = str(pretrain.args.data_path), Split(pretrain.args.eval_share)
    paths = [f"{args.save_dir}/{name}" for name in exercises.FILES]
    if not can_be_added(paths[0], text):
        return []
    if not exercises.write_exercises(texts, paths, trained.share, pretrain.most_passes):
        return []
    text = "these documents teach the model to repeat a word of the question in its answer"
    say(f"exercises: {paths[0]}; {text}")
    return paths


def trained_texts(args: argparse.Namespace, pretrain: Stage) -> list[str]:
    """The first MOST_TEXTS texts that pretraining does not hold out."""
    texts = read_texts(args, str(pretrain.args.data_path), Split(pretrain.args.eval_share))
    return list(islice(texts, MOST_TEXTS))


def can_be_added(path: str, data: str) -> bool:
    """Whether a file can be one of several of a data path: a name with a comma cannot."""
    return split_data_path(f"{data},{path}") == [*split_data_path(data), path]


def read_conversations(path: str, split: Split) -> Iterator[tuple[dict[str, Any], Chat]]:
    """The records of a data path with their conversations. A record that cannot be read is left out; the
    stage has named it."""
    paths = expand_paths(path)
    for _, record in split.choose(read_records(paths), paths, is_document=False):
        if isinstance(record, BadRecord):
            continue
        try:
            chat = parse(record, "sft").chats[0]
        except Exception:  # data may hold anything
            continue
        yield record, chat


def read_texts(args: argparse.Namespace, path: str, split: Split | None = None) -> Iterator[str]:
    """The texts of a data path; with --on_bad_data skip, without those that no stage can read."""
    return train_tokenizer.read_texts(path, args.text_separator, args.on_bad_data == "skip", split)


def bytes_per_token(stage: Stage) -> float:
    """The mean number of bytes of text per token of the stage."""
    report = stage.own_data.cache.report
    return report["target_bytes"] / report["targets"]
