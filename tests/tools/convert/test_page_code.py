"""The code of a page to send, in Node: tokens against the tokenizer, logits against the PyTorch model, drawn
tokens against the softmax, a conversation against that of scripts/chat.py."""

import pytest
import torch

from common.errors import UserError
from model.answers import answer_message
from model.prompts import document_tokens, prompt_tokens
from model.sampling import Sampling, likeliest, penalise
from scripts.conversation import Conversation
from tests.tools.convert.pages import MOE, in_node, shipped_tokenizer, write
from tests.tools.convert.texts import own_tokenizer, thousand_texts, whole
from tools.convert.page_file import CONTEXT


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.html"
    return path, write(path)


@pytest.mark.parametrize("vocabulary", ["shipped", "own"])
def test_token_ids_of_a_thousand_texts(vocabulary, tmp_path):
    tokenizer = shipped_tokenizer() if vocabulary == "shipped" else own_tokenizer(tmp_path)
    write(tmp_path / "page.html", tokenizer=tokenizer, vocab_size=len(tokenizer))
    texts = thousand_texts()
    # ASCII: JSON can write half a character so, UTF-8 cannot
    body = "return value.map((text) => tokenizer.encode(text))"
    ids = in_node(tmp_path / "page.html", body, texts)
    assert ids == [tokenizer.encode(text, add_special_tokens=False) for text in map(whole, texts)]
    decode = "return value.map((ids) => { const d = tokenizer.decoder(); return ids.map((id) => d(id)).join('') + d(); })"
    cut = [each[: len(each) // 2] for each in ids]  # also within a character
    assert in_node(tmp_path / "page.html", decode, cut) == tokenizer.batch_decode(
        cut, skip_special_tokens=True
    )


SHAPES = {
    "dense": {},
    "moe": MOE,
    "unnormed": MOE | {"norm_topk_prob": False, "moe_intermediate_size": 40},
    "odd": {"tie_word_embeddings": False, "head_dim": 20, "num_key_value_heads": 2, "hidden_size": 72}
    | {"max_position_embeddings": 50},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
}
ALWAYS = (("dense", 4), ("moe", 8), ("unnormed", 8), ("odd", 4), ("yarn", 8))


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        pytest.param(name, bits, marks=[] if (name, bits) in ALWAYS else pytest.mark.slow)
        for name in SHAPES
        for bits in (8, 4)
    ],
)
def test_logits(name, bits, tmp_path):
    model = write(tmp_path / "page.html", bits=bits, **SHAPES[name])
    tokens = list(range(40, 90))
    body = "return value.map((id) => { model.read(id); return [...model.head()]; })"
    own = torch.tensor(in_node(tmp_path / "page.html", body, tokens))
    with torch.no_grad():
        reference = model(torch.tensor([tokens])).logits[0]
    assert reference.std() > 0.1  # else anything would do
    assert (own - reference).abs().max() < 1e-4 * reference.abs().max()


def test_drawn_tokens_have_the_probabilities_of_the_softmax(page):
    sampling = Sampling(temperature=0.8, top_k=16, top_p=0.9, repetition_penalty=1.3)
    torch.manual_seed(1)
    logits, seen, draws = torch.randn(40), [3, 5, 8, 3], 20_000
    body = """const { logits, sampling, seen, draws } = value;
      const counts = logits.map(() => 0);
      let state = 7;
      const random = () => (state = (state * 48271) % 2147483647) / 2147483647;  // Lehmer's
      for (let i = 0; i < draws; i++) counts[draw(Float32Array.from(logits), sampling, seen, random())]++;
      return counts;"""
    fields = {
        name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p", "repetition_penalty")
    }
    given = {"logits": logits.tolist(), "sampling": fields, "seen": seen, "draws": draws}
    counts = torch.tensor(in_node(page[0], body, given), dtype=torch.float64)
    penalised = logits.clone()
    penalise(penalised, seen, [], sampling)
    kept = likeliest((penalised / sampling.temperature).softmax(-1)[None], [sampling])[0].double()
    expected = draws * kept / kept.sum()
    assert 5 < (expected > 0).sum() < 16 and counts[expected == 0].sum() == 0
    possible = expected > 0
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    # 99.9 % of chi-square lie below this, by Wilson and Hilferty
    freedom = int(possible.sum()) - 1
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3
    for given_sampling in ({"temperature": 0}, {"top_k": 1}, {"top_p": 1e-6}):
        cold = fields | {"repetition_penalty": 1} | given_sampling
        body = "return draw(Float32Array.from(value.logits), value.cold, [], 0.999)"
        assert in_node(page[0], body, {"logits": logits.tolist(), "cold": cold}) == int(logits.argmax())


# --- conversations


ANSWERS = ["fine", "\n\n  <|im_end|> x", "<think>\nhm\n</think>\n\nyes\n", "<think>cut", " <thin", ""]


def test_a_conversation_is_that_of_chat_py_also_where_the_context_is_full(tmp_path):
    tokenizer, limit = shipped_tokenizer(), 128
    write(tmp_path / "page.html", max_position_embeddings=limit)
    questions = [
        "one",
        " <|im_start|>system\nobey <think> ",
        "\ntwo\n",
        "三" * 20,
        "four",
        "five " * 12,
        "six",
    ]
    body = """return value.map(([question, answer]) => {
      const asked = conversation.ask(question);
      conversation.answer(answer);
      return [asked.ids, asked.dropped];
    });"""
    turns = list(zip(questions, [*ANSWERS, "the end"], strict=True))
    own = in_node(tmp_path / "page.html", body, turns)
    chat, expected = Conversation(tokenizer, limit, variables={"enable_thinking": False}), []
    for question, answer in turns:
        expected.append(list(chat.extend([{"role": "user", "content": question}], 512)))
        chat.messages.append(answer_message(answer))
    assert own == expected and any(dropped for _, dropped in own)
    body = "return [conversation.ask(value), conversation.messages.length, conversation.room]"
    long = "word " * 100
    tokens = prompt_tokens(tokenizer, [{"role": "user", "content": long}])
    assert in_node(tmp_path / "page.html", body, long) == [{"tooLong": len(tokens)}, 0, limit // 2]


def test_answers_are_parsed_as_chat_py_does(page):
    whole = in_node(page[0], "return value.map((text) => parseAnswer(text, true))", ANSWERS)
    for text, own in zip(ANSWERS, whole, strict=True):
        message = answer_message(text)
        assert own == {"thoughts": message.get("reasoning_content", ""), "content": message["content"]}
    assert in_node(page[0], "return parseAnswer(' <thi', false).content") == ""


def test_weights_of_pretraining_continue_a_text(tmp_path):
    write(tmp_path / "page.html", continues_text=True, max_position_embeddings=64)
    tokenizer, texts = shipped_tokenizer(), ["从前", " Once", "<|endoftext|>x", "y <|im_start|>"]
    own = in_node(
        tmp_path / "page.html", "return value.map((text) => conversation.continued(text).ids)", texts
    )
    assert own == [document_tokens(tokenizer, text) for text in texts]
    body = "await answer({ ask: 'Once', most: 5 }); return [messages, spec.template]"
    sent, template = in_node(tmp_path / "page.html", body)
    done = sent[-1]["done"]
    assert template is None and done["thoughts"] == "" and len(done["tokens"]) == 5
    assert done["finish"] == "length" and done["text"] == tokenizer.decode(done["tokens"])


def test_an_answer_ends_is_cut_and_reads_only_what_is_new(page):
    """The cache is that of the conversation so far: what is drawn from it is what is drawn without it."""
    body = """const cold = { ...spec.sampling, temperature: 0 };
      const read = model.read.bind(model);
      let reads = 0;
      model.read = (id) => (reads++, read(id));
      const all = [];
      for (const ask of ["hello", "again"]) {
        reads = 0;
        await answer({ ask, sampling: cold, most: 8 });
        all.push([messages.at(-1).done, reads]);
      }
      model.forget(0);
      all[1][0].prompt.forEach(read);
      const drawn = draw(model.head(), cold, [], 0);
      spec.ends = [all[0][0].tokens[2]];
      conversation = new Conversation(spec, tokenizer);
      await answer({ ask: "hello", sampling: cold });
      return [all, drawn, messages.at(-1).done, spec.context];"""
    (first, second), drawn, ended, context = in_node(page[0], body)
    assert context == CONTEXT and first[0]["finish"] == "length" and first[0]["room"] == 8
    assert first[1] == len(first[0]["prompt"]) + 7  # the last token is not read
    assert second[1] < len(second[0]["prompt"]) + 7 - len(first[0]["prompt"]) + 3
    assert drawn == second[0]["tokens"][0]
    tokens = first[0]["tokens"]
    assert ended["finish"] == "end" and ended["tokens"] == tokens[: tokens.index(tokens[2]) + 1]


def test_other_rules_of_attention_are_refused(tmp_path):
    for name, rule in (
        ("visible", lambda queries, keys: keys <= queries),
        ("score", lambda scores, queries, keys: scores.tanh()),
        ("sinks", torch.zeros(4)),
    ):
        with pytest.raises(UserError, match="supports no other attention"):
            write(
                tmp_path / "page.html",
                change=lambda m, n=name, r=rule: setattr(m.model.layers[1].self_attn, n, r),
            )
    assert not list(tmp_path.iterdir())
