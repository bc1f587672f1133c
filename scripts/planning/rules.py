"""Rules for size, passes, batch size and learning rate by the amount of data, fitted to measured runs
(docs/dev/LOG.md, "Which batch, learning rate and loss" and "More from the same tokens")."""

import math

OPTIMIZER = "muon"
WIDTH = 64  # width per layer: --depth 8 is the default model, 512 x 8
DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24)
# limits of passes over the data. In pretraining, more than PASSES teach little (arXiv:2305.16264;
# docs/dev/LOG.md, "Decay in each pass"), except on text that repeats itself (`most_passes`)
PASSES, SFT_PASSES, MAX_PASSES = 4, 2, 24
# if at least this share of a short text repeats itself, it needs this many updates, in at most this many
# passes (docs/dev/LOG.md, "Passes over text that repeats itself"). If it also mentions each name once in each
# place, it needs twice as many (docs/dev/LOG.md, "Scattered facts: whole words and more passes")
REPEATED_SHARE, TEXT_UPDATES, SCATTERED_UPDATES, MOST_PASSES_OF_LITTLE_TEXT = 0.4, 700, 1400, 96
# the least number of tokens that a model reads per weight of its layers, with fewer passes than PASSES and
# with all of them (docs/dev/LOG.md, "Size under decay")
TOKENS_PER_WEIGHT, TOKENS_PER_WEIGHT_OF_ALL_PASSES = 0.5, 1 / 3
# share of earlier texts in the tokens of a given model that reads a new text. With half of this share it kept
# what it had learned (docs/dev/LOG.md, "Replaying the first text")
EARLIER_SHARE = 0.2
EVAL_SHARE, HELD_OUT_QUESTIONS = 0.02, 50
MIN_USEFUL_UPDATES = 100  # fewer teach little
# distinct tokens of general text; with fewer, no run wrote sentences that make sense (docs/dev/LOG.md, "When
# a model writes sentences")
MIN_TOKENS_FOR_SENTENCES = 5e6
MIN_CONVERSATIONS = 3000  # fewer only teach a manner of answering, and only to a model that can already write
# Conversations with fewer tokens than this count as few (200 updates of 2,048 tokens in SFT_PASSES). They
# need many small updates at a small rate, mixed with as many tokens of the pretraining text. Without this
# text the model forgets what only the text says (docs/dev/LOG.md, "SFT of few conversations" and "The rate of
# few conversations")
FEW_TOKENS = 200 * 2048 / SFT_PASSES
FEW_UPDATES, FEW_BATCH, FEW_MAX_PASSES, FEW_RATE, REPLAY_SHARE = 700, 8, 90, 1.8e-4, 0.5


def most_passes(repeated: float, tokens: float, is_scattered: bool) -> int:
    """The most passes over a text. tokens: its length. repeated: the share of it that also occurs in the rest
    of the text. The new part of a text bears PASSES passes, so a text that states each fact several times can
    be read more often without overfitting. A short text of this kind is read until it makes TEXT_UPDATES
    updates, or SCATTERED_UPDATES, each as large as in a run of one pass (docs/dev/LOG.md, "Passes over text
    that repeats itself" and "Scattered facts: whole words and more passes").
    is_scattered: as in `vocabulary`."""
    passes = min(MAX_PASSES, int(PASSES / max(1 - repeated, PASSES / MAX_PASSES)))
    if repeated < REPEATED_SHARE:
        return passes
    updates = SCATTERED_UPDATES if is_scattered else TEXT_UPDATES
    enough = math.ceil(updates * update_tokens(tokens) / tokens)
    return max(passes, min(enough, MOST_PASSES_OF_LITTLE_TEXT))


def dropout(passes: float) -> float:
    """The dropout of a run with this many passes. After more than PASSES without dropout, a model has learnt
    the documents by heart, and SFT cannot teach it to answer from them (docs/dev/LOG.md, "Dropout in many
    passes")."""
    if passes <= PASSES:
        return 0.0
    return 0.1 if passes <= MAX_PASSES else 0.2


def layer_weights(depth: int, width: int | None = None) -> float:
    """The approximate number of weights in the layers of a model of this depth. width: of a model that is
    given; others are WIDTH wide per layer."""
    return 12.0 * depth * (width or WIDTH * depth) ** 2


def tokens_needed(depth: int, passes: float) -> float:
    """The number of tokens that a model of this depth must read to learn more than a smaller one. If more
    passes are possible, they teach more than size does."""
    share = TOKENS_PER_WEIGHT if passes < PASSES else TOKENS_PER_WEIGHT_OF_ALL_PASSES
    return layer_weights(depth) * share


def update_tokens(tokens: float) -> float:
    """The number of tokens per update in a run over this many tokens."""
    return min(max(2048 * (tokens / 1e6) ** 0.5, 2048), 2**19)


def learning_rate(width: int, tokens: float, tokens_per_update: float) -> float:
    """The peak learning rate of a run over this many tokens, for OPTIMIZER."""
    return 1e-3 * (width / 128) ** -0.6 * (tokens / 3.5e5) ** -0.4 * (tokens_per_update / 2048) ** 0.5


def sft_learning_rate(width: int, tokens: float, tokens_per_update: float) -> float:
    """The same for SFT. Its short runs need no larger rates, because they start from trained weights."""
    return min(learning_rate(width, tokens, tokens_per_update), 6e-4 * (width / 128) ** -0.6)


def eval_share(conversations: int) -> float:
    """The share to hold out if there are few conversations: about HELD_OUT_QUESTIONS, but at most a tenth."""
    return round(min(max(HELD_OUT_QUESTIONS / conversations, EVAL_SHARE), 0.1), 3)


def few_passes(items: int) -> int:
    """The number of passes over few conversations. items: samples of an epoch."""
    return max(SFT_PASSES, min(FEW_MAX_PASSES, round(FEW_UPDATES * FEW_BATCH / items)))


def few_learning_rate(width: int, tokens_per_update: float) -> float:
    """The peak learning rate of SFT on few conversations, for OPTIMIZER."""
    return FEW_RATE * (width / 128) ** -0.6 * (tokens_per_update / 430) ** 0.25


def warmup(updates: int) -> int:
    """The number of warm-up updates."""
    return max(1, min(100, updates // 20))


def vocabulary(text_bytes: float, bytes_per_token: float, is_scattered: bool, has_spaces: bool) -> int | None:
    """The most tokens of a new vocabulary for a small text that the shipped one splits into short tokens;
    None: use the shipped one. On a small text most rows of the shipped vocabulary would hardly be trained,
    but cost as much as the others.

    is_scattered: whether the text repeats itself, but mentions a name once in each place. Then a larger
    vocabulary is better, because a small model learns more facts if names have fewer tokens (docs/dev/LOG.md,
    "A vocabulary for facts").
    has_spaces: whether words are written with spaces between them. Then 4,096 tokens make each recurring word
    of such a text a token. In Chinese they would be phrases, which are worse.
    """
    if text_bytes >= 2e6 or bytes_per_token >= 3:
        return None
    if not is_scattered:
        return 512
    return 4096 if has_spaces else 1536
