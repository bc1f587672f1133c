"""The model against references nobody here wrote (stock Qwen3 and Qwen3-MoE), and the flat batch against the
padded."""

import pytest
import torch
from torch.nn import functional as F
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.cache_utils import DynamicCache
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from common.errors import UserError
from dataset.batch import collate_flat
from dataset.lm_dataset import SFTDataset
from dataset.token_cache import load_tokenizer
from model.model_minimind import ROPE_TYPES, MiniMindConfig, MiniMindForCausalLM
from tests.conftest import ROOT

VOCAB = 300
SHAPES = {
    "dense": {},
    "moe": {"use_moe": True},
    "moe_top2": {"use_moe": True, "num_experts": 5, "num_experts_per_tok": 2},
}


def build(shape: str, seed: int = 0, **kwargs) -> MiniMindForCausalLM:
    """A small model whose weights are large enough that a mistake shows."""
    config = MiniMindConfig(hidden_size=64, num_hidden_layers=2, vocab_size=VOCAB, **SHAPES[shape], **kwargs)
    model = MiniMindForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        spread = 0.1 if parameter.ndim > 1 else 0.3
        centre = 0.0 if parameter.ndim > 1 else 1.0
        parameter.data = centre + spread * torch.randn(parameter.shape, generator=generator)
    model.tie_weights()
    return model


def stock(model: MiniMindForCausalLM) -> Qwen3ForCausalLM:
    """Stock transformers, loaded from the very same state dict."""
    c = model.config
    names = "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim rms_norm_eps"
    names += " intermediate_size max_position_embeddings tie_word_embeddings rope_parameters"
    names += " pad_token_id bos_token_id eos_token_id"
    config_class, model_class = Qwen3Config, Qwen3ForCausalLM
    if c.use_moe:
        names += " num_experts num_experts_per_tok moe_intermediate_size norm_topk_prob"
        config_class, model_class = Qwen3MoeConfig, Qwen3MoeForCausalLM
    config = config_class(**{name: getattr(c, name) for name in names.split()})
    reference, info = model_class.from_pretrained(
        None, config=config, state_dict=model.state_dict(), output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return reference.eval()


def ragged(lengths: list[int], seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (n,), generator=generator) for n in lengths]


def flat_batch(samples: list[torch.Tensor], trained: list[torch.Tensor] | None = None) -> dict:
    """A plain reference of the collate: every next token inside a sample is a target unless `trained` says
    no."""
    index, targets, start = [], [], 0
    for s, ids in enumerate(samples):
        for t in range(len(ids) - 1):
            if trained is None or trained[s][t + 1]:
                index.append(start + t)
                targets.append(int(ids[t + 1]))
        start += len(ids)
    lengths = torch.tensor([0] + [len(ids) for ids in samples])
    return {
        "input_ids": torch.cat(samples),
        "position_ids": torch.cat([torch.arange(len(ids)) for ids in samples]),
        "cu_seqlens": lengths.cumsum(0).to(torch.int32),
        "max_seqlen": int(lengths.max()),
        "target_index": torch.tensor(index, dtype=torch.long),
        "targets": torch.tensor(targets, dtype=torch.long),
    }


def padded_batch(samples: list[torch.Tensor], side: str = "right") -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(len(ids) for ids in samples)
    ids = torch.zeros(len(samples), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, sample in enumerate(samples):
        place = slice(0, len(sample)) if side == "right" else slice(longest - len(sample), longest)
        ids[row, place], mask[row, place] = sample, 1
    return ids, mask


@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_logits_are_stock_qwen3s_padded_and_flat(shape):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    model = build(shape, rope_scaling=yarn)
    reference = stock(model)
    samples = ragged([5, 33, 12])
    ids, mask = padded_batch(samples)
    want = reference(ids, attention_mask=mask).logits
    padded = model(ids, attention_mask=mask).logits
    batch = flat_batch(samples)
    flat = model(**{name: batch[name] for name in ("input_ids", "position_ids", "cu_seqlens", "max_seqlen")})
    assert want.abs().max() > 0.5  # the comparison is not between zeros
    assert (padded - want)[mask.bool()].abs().max() <= 1e-4
    assert (flat.logits - want[mask.bool()]).abs().max() <= 1e-4


ROPES = {  # each changes the angles within the 40 tokens of the test, and beyond its original length
    "default": None,
    "another base": {"rope_type": "default", "rope_theta": 1e4},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16}
    | {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}


@pytest.mark.parametrize("rope", ROPES)
@torch.no_grad()
def test_rotary_angles_are_transformers_beyond_the_original_length(rope):
    model, plain = (build("dense", rope_scaling=rope_scaling) for rope_scaling in (ROPES[rope], None))
    ids = ragged([40])[0][None]
    assert (model(ids).logits - stock(model)(ids).logits).abs().max() <= 1e-4
    assert rope == "default" or (model(ids).logits - plain(ids).logits).abs().max() > 0.1


@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("name", sorted({*ROPE_INIT_FUNCTIONS, "unheard_of"} - set(ROPE_TYPES)))
def test_rotary_angles_that_depend_on_the_input_are_refused(name, field):
    rope = {"rope_type": name, "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e6}
    rope |= {f"{side}_factor": [1.0] * 4 for side in ("short", "long")} if name == "longrope" else {}
    with pytest.raises(UserError, match=f"rope_scaling of type {name} is not supported; use one of default"):
        MiniMindConfig(hidden_size=64, **{field: rope})
    with pytest.raises(UserError, match="num_experts_per_tok 5 must be num_experts 4 or less"):
        MiniMindConfig(use_moe=True, num_experts_per_tok=5)


@pytest.mark.parametrize("name", ["sliding_window", "attention_chunk_size", "layer_types"])
def test_fields_that_change_the_cache_of_generate_alone_are_refused(name):
    with pytest.raises(UserError, match=f"the config field {name} changes the cache"):
        MiniMindConfig(hidden_size=64, **{name: ["full_attention"] * 8 if name == "layer_types" else 4})


@pytest.mark.parametrize("shape", SHAPES)
def test_losses_and_gradients_are_stock_qwen3s_in_float64(shape):
    """Both compute norms and angles in float32."""
    model = build(shape).double().train()
    reference, samples = stock(model).double().train(), ragged([5, 33, 12])
    reference.config._experts_implementation = "eager"  # the grouped product knows no float64
    batch = flat_batch(samples)
    out = model(**batch)
    out.loss.backward()
    for ids in samples:
        logits = reference(ids[None]).logits[0, :-1]
        F.cross_entropy(logits, ids[1:], reduction="sum").backward()
    pairs = []
    flat = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, parameter in reference.named_parameters():
        if name in flat:
            pairs.append((flat[name], parameter.grad))
        else:  # stock transformers holds the experts stacked
            layer, _, stacked = name.rpartition(".")
            parts = ("gate", "up") if stacked == "gate_up_proj" else ("down",)
            for number, grad in enumerate(parameter.grad):
                ours = [flat[f"{layer}.{number}.{part}_proj.weight"] for part in parts]
                pairs.append((torch.cat(ours), grad))
    assert len(pairs) >= 24 and max(grad.abs().max() for _, grad in pairs) > 1
    for ours, grad in pairs:  # with one expert per token the router's is 0
        assert (ours - grad).abs().max() <= 1e-5 * grad.abs().max() + 1e-6


@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_a_padded_call_has_an_aux_loss_with_and_without_labels(shape, monkeypatch):
    model = build(shape)
    ids, mask = padded_batch(ragged([5, 12]))
    with_labels, without = model(ids, attention_mask=mask, labels=ids), model(ids, attention_mask=mask)
    assert without.loss is None
    assert (without.aux_loss == 0) == (shape == "dense")
    wanted = torch.nn.functional.cross_entropy(with_labels.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert torch.allclose(with_labels.loss, wanted, rtol=1e-6)
    if shape != "dense":
        assert torch.equal(without.aux_loss, with_labels.aux_loss) and without.aux_loss > 0
        whole = model(ids, attention_mask=padded_batch(ragged([12, 12]))[1]).aux_loss
        assert torch.equal(model(ids).aux_loss, whole) and whole != without.aux_loss
        four_dimensional = torch.ones(2, 1, 12, 12, dtype=torch.bool).tril()
        assert torch.equal(model(ids, attention_mask=four_dimensional).aux_loss, whole)
    unwanted = lambda *_: pytest.fail("generation pays for the aux_loss")  # noqa: E731
    monkeypatch.setattr(MiniMindForCausalLM, "_aux_loss", unwanted)
    model.generate(ids[1:], max_new_tokens=2, do_sample=False)


def test_top_k_is_another_name_of_the_experts_per_token():
    config = MiniMindConfig(use_moe=True, top_k=2)
    assert config.num_experts_per_tok == 2 and "top_k" not in config.to_dict()
    with pytest.raises(ValueError, match="keyword arguments"):
        MiniMindConfig(64, 2)


def test_with_one_expert_per_token_the_cross_entropy_has_no_gradient_for_the_router():
    """Its normalised weight is always 1: only the load-balancing loss trains the router. With two both do."""
    for shape, by_cross_entropy in (("moe", False), ("moe_top2", True)):
        model, batch = build(shape).train(), flat_batch(ragged([20]))
        gates = [layer.mlp.gate.weight for layer in model.model.layers]
        for part in ("loss", "aux_loss"):
            grads = torch.autograd.grad(getattr(model(**batch), part), gates)
            assert (min(grad.norm() for grad in grads) > 1e-5) == (part == "aux_loss" or by_cross_entropy), (
                shape,
                part,
            )


@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_generation_is_stock_qwen3s(shape):
    model = build(shape)
    prompt = ragged([7])[0][None]
    wanted = {"max_new_tokens": 64, "min_new_tokens": 64, "do_sample": False}
    ours = model.generate(prompt, **wanted)
    assert ours.shape == (1, 71)
    assert torch.equal(ours, stock(model).generate(prompt, **wanted))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_left_padded_batch_generates_what_each_prompt_generates_alone(shape):
    model = build(shape)
    prompts = ragged([3, 9, 6])
    ids, mask = padded_batch(prompts, side="left")
    wanted = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    together = model.generate(ids, attention_mask=mask, **wanted)[:, ids.shape[1] :]
    for prompt, answer in zip(prompts, together, strict=True):
        alone = model.generate(prompt[None], **wanted)[0, len(prompt) :]
        assert torch.equal(alone, answer)


def test_generation_with_and_without_a_cache_agree():
    model = build("dense")
    prompt = ragged([5])[0][None]
    wanted = {"max_new_tokens": 10, "min_new_tokens": 10, "do_sample": False}
    assert torch.equal(model.generate(prompt, **wanted), model.generate(prompt, use_cache=False, **wanted))
    static = model.generate(prompt, cache_implementation="static", disable_compile=True, **wanted)
    assert torch.equal(model.generate(prompt, **wanted), static)


def gradients(model: MiniMindForCausalLM) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_flat_padded_and_one_at_a_time_have_the_same_loss_and_gradients(shape):
    model = build(shape).train()
    samples = ragged([5, 33, 12, 2, 21])
    total = sum(len(ids) for ids in samples)

    out = model(**flat_batch(samples))
    (out.loss / (total - 5) + out.aux_loss / total).backward()
    flat = gradients(model)

    losses = aux = 0.0
    for sample in samples:  # one sample at a time
        one = model(**flat_batch([sample]))
        (one.loss / (total - 5) + one.aux_loss / total).backward()
        losses, aux = losses + one.loss.item(), aux + one.aux_loss.item()
    single = gradients(model)

    ids, mask = padded_batch(samples)
    padded = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))
    (padded.loss + padded.aux_loss).backward()
    pad = gradients(model)

    assert abs(losses - out.loss.item()) <= 1e-5 * losses
    assert abs(aux - out.aux_loss.item()) <= 1e-5 * max(aux, 1e-8)
    mean = out.loss.item() / (total - 5) + out.aux_loss.item() / total
    assert abs((padded.loss + padded.aux_loss).item() - mean) <= 1e-5
    for name, gradient in flat.items():
        scale = max(1.0, gradient.abs().max().item())
        assert (single[name] - gradient).abs().max() <= 1e-5 * scale, name
        assert (pad[name] - gradient).abs().max() <= 1e-5 * scale, name


@pytest.mark.parametrize("shape", ["dense", "moe"])
@pytest.mark.parametrize("packing", [False, True])
def test_packed_and_unpacked_data_train_what_stock_qwen3_trains_one_at_a_time(corpus, shape, packing):
    """From conversations to gradients: the dataset's flat batch against stock transformers on each sample
    alone."""
    dataset = SFTDataset(str(corpus["sft"]), load_tokenizer(ROOT / "model"), 256, packing, corpus["cache"])
    rows = [dataset[i] for i in range(8)]
    samples = [sample for row in rows for sample in row]
    assert len(samples) > 8 if packing else len(samples) == 8
    batch = collate_flat(rows)
    torch.manual_seed(0)
    model = MiniMindForCausalLM(MiniMindConfig(hidden_size=32, num_hidden_layers=2, **SHAPES[shape])).train()
    reference = stock(model).train()
    out = model(**batch.model_inputs(), targets=batch["targets"])
    (out.loss / len(batch["targets"])).backward()
    flat = gradients(model)
    for sample in samples:
        ids = torch.from_numpy(sample["input_ids"].astype("int64"))
        labels = ids.masked_fill(torch.from_numpy(sample["loss_weight"] == 0), -100)[1:]
        logits = reference(ids[None]).logits[0, :-1]
        loss = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
        (loss / len(batch["targets"])).backward()
    for name, parameter in reference.named_parameters():
        if name in flat:  # stock transformers holds the experts stacked
            assert (flat[name] - parameter.grad).abs().max() <= 1e-5, name
    assert sum(name in flat for name, _ in reference.named_parameters()) >= 12


def test_a_cpu_meets_few_numbers_of_rows():
    """Flat batches of any size run as multiples of 64 rows: each number of rows costs a compiled kernel."""
    model, seen = build("dense").train(), set()
    for layer in (model.model.layers[0].self_attn.q_proj, model.model.layers[1].mlp.down_proj):
        layer.register_forward_pre_hook(lambda _, inputs: seen.add(inputs[0].shape[0]))
    for lengths in ([5, 30], [60, 4], [64], [64, 1], [100, 70, 20]):
        model(**flat_batch(ragged(lengths)))
    assert seen == {64, 128, 192}


@pytest.mark.parametrize("shape", SHAPES)
def test_bfloat16_autocast_stays_near_float32(shape):
    model = build(shape).train()
    batch = flat_batch(ragged([20, 31]))
    exact = model(**batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(**batch)
    out.loss.backward()
    assert out.loss.dtype == torch.float32
    assert abs(out.loss.item() - exact.loss.item()) < 0.03 * exact.loss.item()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


def test_names_and_defaults_are_minimind_3s():
    config = MiniMindConfig()
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (512, 8, 6400)
    assert (config.intermediate_size, config.head_dim, config.num_key_value_heads) == (1664, 64, 4)
    keys = build("dense").state_dict().keys()
    layer = "input_layernorm post_attention_layernorm self_attn.q_proj self_attn.k_proj self_attn.v_proj"
    layer += " self_attn.o_proj self_attn.q_norm self_attn.k_norm mlp.gate_proj mlp.up_proj mlp.down_proj"
    want = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    want |= {f"model.layers.{i}.{name}.weight" for i in (0, 1) for name in layer.split()}
    assert set(keys) == want
    experts = {key for key in build("moe").state_dict() if "layers.0.mlp" in key}
    names = [f"experts.{e}.{part}_proj" for e in range(4) for part in ("gate", "up", "down")]
    assert experts == {f"model.layers.0.mlp.{name}.weight" for name in ("gate", *names)}


@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_save_pretrained_comes_back_bit_for_bit(shape, tmp_path):
    model = build(shape)
    model.save_pretrained(tmp_path)
    again = MiniMindForCausalLM.from_pretrained(tmp_path).eval()
    want, got = model.state_dict(), again.state_dict()
    assert want.keys() == got.keys() and all(torch.equal(got[name], want[name]) for name in want)
    ids = ragged([9])[0][None]  # a product of few rows may round by where a weight lies in memory
    torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=0, atol=1e-5)
    assert again.lm_head.weight is again.model.embed_tokens.weight


@pytest.mark.parametrize("shape", SHAPES)
def test_an_empty_micro_batch_has_gradients_of_zero(shape):
    """Ranks without samples take part with one; DDP waits for each gradient."""
    model = build(shape).train()
    empty = torch.empty(0, dtype=torch.long)
    batch = {"input_ids": empty, "position_ids": empty, "cu_seqlens": torch.zeros(1, dtype=torch.int32)}
    out = model(**batch, max_seqlen=0, target_index=empty, targets=empty)
    (out.loss + out.aux_loss).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert out.loss == 0 and not any(parameter.grad.any() for parameter in model.parameters())


def test_names_that_a_forward_pass_does_not_know_are_refused_and_the_cache_has_two():
    """What it swallowed could not be obeyed: transformers 5.24 gives the cache another name."""
    model, ids = build("dense"), ragged([9])[0][None]
    for options in ({"cash": 1}, {"output_hidden_states": True}):
        with pytest.raises(TypeError, match=min(options)):
            model(ids, **options)
    with torch.no_grad():
        whole = model(ids).logits[:, -1]
        for name in ("past_key_values", "cache"):
            cache = DynamicCache()
            model(ids[:, :5], **{name: cache})
            torch.testing.assert_close(model(ids[:, 5:], **{name: cache}).logits[:, -1], whole)
