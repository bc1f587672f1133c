"""Texts beside conversations, or beside other texts (--replay_data_path): what an epoch takes, exact resume, mistakes."""

import signal

import pytest

from common.errors import UserError
from common.settings import ROOT
from dataset.token_cache import load_tokenizer
from tests.stage_process import Faults, run
from tests.trainer.stage_flags import assert_same_run, flags
from trainer import train_full_sft, train_pretrain


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(ROOT / "model")


def open_data(corpus, tokenizer, **settings):
    paths = {"data_path": str(corpus["sft"]), "replay_data_path": str(corpus["pretrain"])}
    options = {"cache_dir": str(corpus["cache"]), "max_seq_len": 64}
    args = train_full_sft.Args(**paths | options | settings)
    return args, *train_full_sft.open_data(args, tokenizer)


@pytest.mark.parametrize("share", [0.1, 0.3, 0.9])
def test_an_epoch_has_all_conversations_and_the_next_texts(corpus, tokenizer, share):
    """At most all texts: with a share of 0.9 they are too few."""
    args, train, held_out = open_data(corpus, tokenizer, replay_share=share)
    chats, texts = train.datasets
    seen = []
    for epoch in range(4):
        items = train.items_of_epoch(args, epoch)
        of_chats, of_texts = items[items < len(chats)], items[items >= len(chats)]
        assert sorted(of_chats) == list(range(len(chats))) and len(set(of_texts)) == len(of_texts)
        seen += of_texts.tolist()
        tokens = train.item_tokens[of_texts].sum()
        wanted = min(share / (1 - share) * chats.num_tokens, texts.num_tokens)
        assert abs(tokens - wanted) <= 2 * texts.item_tokens.max()
    counts = [seen.count(text) for text in range(len(chats), len(chats) + len(texts))]
    assert max(counts) - min(counts) <= 1
    text = train[len(chats)][0]
    assert (text["loss_weight"][1:] == 1).all()  # every token of a text is a target
    assert held_out is None


def test_what_is_held_out_are_conversations_and_no_text_that_pretraining_holds_out(corpus, tokenizer):
    _, train, held_out = open_data(corpus, tokenizer, eval_share=0.2)
    _, whole, _ = open_data(corpus, tokenizer)
    assert held_out.kind == "sft" and 0 < held_out.records < 40
    assert train.datasets[0].records + held_out.records == whole.datasets[0].records
    assert 0 < train.datasets[1].records < whole.datasets[1].records


def test_weighted_conversations_keep_their_ratio(corpus, tokenizer):
    path = f"{corpus['sft']}:3,{corpus['sft_eval']}:1"
    _, train, _ = open_data(corpus, tokenizer, data_path=path, replay_share=0.2)
    assert train.shares == pytest.approx([0.6, 0.2, 0.2])


def test_a_killed_run_ends_with_the_same_bits_and_asking_questions_changes_none(corpus, tmp_path):
    """Muon and dropout; the killed run finds the texts at another path; the first run is asked nothing."""
    settings = {"replay_data_path": corpus["pretrain"], "replay_share": 0.4, "from_weight": "none"}
    settings |= {"optimizer": "muon", "dropout": 0.1, "hidden_size": 32, "eval_interval": 8}
    run("full_sft", flags(corpus, tmp_path / "whole", "sft", **settings))
    asked = settings | {"sample_prompts": "auto"}
    argv = flags(corpus, tmp_path / "killed", "sft", **asked)
    run("full_sft", argv, Faults(signals={9: signal.SIGKILL}), status=-9)
    moved = tmp_path / "moved.jsonl"
    moved.write_bytes(corpus["pretrain"].read_bytes())
    asked |= {"replay_data_path": moved, "from_resume": 1}
    run("full_sft", flags(corpus, tmp_path / "killed", "sft", **asked))
    assert_same_run(tmp_path / "whole", tmp_path / "killed", "full_sft_32")


def test_pretraining_replays_in_rows_and_a_killed_run_ends_with_the_same_bits(corpus, tokenizer, tmp_path):
    settings = {"replay_data_path": corpus["pretrain_eval"], "replay_share": 0.4, "packing": True}
    options = {"data_path": str(corpus["pretrain"]), "cache_dir": str(corpus["cache"]), "max_seq_len": 64}
    args = train_pretrain.Args(**options | settings | {"replay_data_path": str(corpus["pretrain_eval"])})
    train, _ = train_pretrain.open_data(args, tokenizer)
    assert all(source.packing for source in train.datasets) and train.shares[1] <= 0.4
    assert train.counts[0] == len(train.datasets[0])  # an epoch has all texts
    settings |= {"packing": 1, "hidden_size": 32, "dropout": 0.1}
    run("pretrain", flags(corpus, tmp_path / "whole", "pretrain", **settings))
    argv = flags(corpus, tmp_path / "killed", "pretrain", **settings)
    run("pretrain", argv, Faults(signals={3: signal.SIGKILL}), status=-9)
    run("pretrain", flags(corpus, tmp_path / "killed", "pretrain", **settings, from_resume=1))
    assert_same_run(tmp_path / "whole", tmp_path / "killed", "pretrain_32")


def test_other_texts_are_another_run_and_missing_ones_are_named_first(corpus, tmp_path, tokenizer):
    settings = {"replay_data_path": corpus["pretrain"], "from_weight": "none", "epochs": 1}
    run("full_sft", flags(corpus, tmp_path, "sft", **settings))
    settings |= {"replay_data_path": corpus["pretrain_eval"], "from_resume": 1}
    (error,) = run("full_sft", flags(corpus, tmp_path, "sft", **settings), status=2).error_lines
    assert "data" in error
    args = train_full_sft.Args(data_path=str(corpus["sft"]), replay_data_path="nowhere.jsonl")
    with pytest.raises(UserError, match=r"nowhere\.jsonl"):
        args.check_names()
