"""With `invariant=True` all logits after a text have the same bits, however the text is read; and who is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import cycle
from types import MethodType
from typing import Any

import pytest
import torch
import transformers
from marks import slow
from tiny_models import POSITIONS, raised, tiny, untested
from torch import Tensor, nn
from torch.nn import functional as F

import torch_specops
from torch_specops import SpeculativeDecoder, invariant_forward
from torch_specops.cli.loading import smollm2_directory
from torch_specops.hf import invariant as exchanges
from torch_specops.hf import language_model
from torch_specops.hf.models import TransformersModel
from torch_specops.ops import invariant as ops
from torch_specops.ops.attention import attend_masked

DTYPES = (torch.float32, torch.bfloat16)
# The numbers of a layer's activations are no multiple of a vector's.
WIDE = {"intermediate_size": 148}
FAMILIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("llama", "qwen2", "qwen2 sliding", "qwen3", "mistral", "gemma", "gemma3", "phi", "gpt_neox"), WIDE
    ),
    "gpt2": {"n_inner": 148},
    "opt": {"ffn_dim": 148},
    # All of its windows are longer than the texts.
    "gemma3 ": WIDE | {"sliding_window": 90},
}
# In bfloat16 transformers' own product of experts takes multiples of 8 alone.
_OWN = {"num_experts": 6, "num_experts_per_tok": 5, "moe_intermediate_size": 40}
MIXTURES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4, "intermediate_size": 152},
    "Qwen2Moe": _OWN | {"shared_expert_intermediate_size": 148},
    "Qwen3Moe": _OWN | {"head_dim": 8, "norm_topk_prob": True},
    "Olmoe": {"num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 152},
    "GraniteMoe": {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 152},
}
PIECES = (1, 2, 3, 5, 7, 1, 8, 16, 2)
LENGTH = 50
TOKENS = torch.randint(1, 60, (3, LENGTH), generator=torch.Generator().manual_seed(0))


def model_of(family: str, dtype: torch.dtype = torch.float32, **fields: Any) -> transformers.PreTrainedModel:
    return tiny(family.strip(), **(FAMILIES.get(family, {}) | fields)).to(dtype)


def in_pieces(adapter: TransformersModel, rows: Tensor) -> Tensor:
    """The logits of texts [B, L], read in pieces of which each row is at another place, with rows left out, packed,
    and with slots that hold what was rolled back."""
    batch, length = rows.shape
    logits = torch.zeros(batch, length, adapter.vocab_size, dtype=adapter.dtype)
    adapter.expect(length)
    adapter.start(batch, POSITIONS)
    adapter.begin_texts(torch.full((batch,), length))
    # Slots get other tokens first.
    adapter.forward(rows[:, :30].flip(1), torch.arange(30).expand(batch, -1))
    ends = torch.arange(batch)
    for row in range(1, batch):
        logits[row, :row] = adapter.forward(rows[row, None, :row], torch.arange(row)[None], rows=torch.tensor([row]))[0]
    numbered = enumerate(cycle(PIECES))
    while int(ends.min()) < length:
        number, size = next(numbered)
        positions = (ends.unsqueeze(1) + torch.arange(size)).clamp(max=length - 1)
        tokens = rows.gather(1, positions)
        if number % 3 == 2:
            is_read = torch.arange(size) < size - torch.arange(batch).unsqueeze(1)
            is_read[:, 0] = True
            found, stops = adapter.forward_packed(tokens, positions, is_read), ends + is_read.sum(1)
            places = torch.arange(batch).unsqueeze(1).expand(-1, size)[is_read], positions[is_read]
            logits[places], ends = found, stops
        else:
            logits[torch.arange(batch).unsqueeze(1), positions] = adapter.forward(tokens, positions)
            ends = ends + size
    return logits


def differing(model: transformers.PreTrainedModel, *, invariant: bool) -> int:
    """How many logits differ between pieces, each row alone, and a trainer's forward over whole texts."""
    found = in_pieces(language_model(model, invariant=invariant), TOKENS)
    alone = in_pieces(language_model(model, invariant=invariant), TOKENS[1:2])
    whole = (invariant_forward(model) if invariant else model)(TOKENS).logits
    torch.testing.assert_close(found, whole, atol=2.0 if model.dtype == torch.bfloat16 else 1e-3, rtol=1e-2)
    return int((found != whole).sum() + (alone != whole[1:2]).sum())


# One of each kind of layers in every dtype.
BOTH = ("llama", "gemma3", "gpt2")


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        (family, dtype) if dtype == torch.bfloat16 or family in BOTH else slow(family, dtype)
        for family in FAMILIES
        for dtype in DTYPES
    ],
    ids=str,
)
@torch.no_grad()
def test_all_logits_are_those_of_one_forward(family: str, dtype: torch.dtype) -> None:
    assert differing(model_of(family, dtype), invariant=True) == 0


@torch.no_grad()
def test_pieces_of_a_plain_model_differ() -> None:
    assert differing(model_of("llama"), invariant=False) > 100


@torch.no_grad()
def unlisted(prefix: str, **more: Any) -> transformers.PreTrainedModel:
    fields = WIDE | {"max_position_embeddings": POSITIONS, "vocab_size": 60, "pad_token_id": 0}
    model = untested(prefix, num_key_value_heads=2, **(fields | MIXTURES.get(prefix, {}) | more))
    for weight in model.parameters():
        # As sharp as a trained model.
        weight.mul_(6.0 if weight.dim() > 1 else 1.0)
    return model


QUICK = ("Granite", "Olmo2", "Qwen2Moe")
SLOW = ("Phi3", "SmolLM3", "StableLm", "Starcoder2", "Mixtral", "Qwen3Moe", "Olmoe", "GraniteMoe")


@pytest.mark.parametrize("prefix", [*QUICK, *map(slow, SLOW)])
@torch.no_grad()
def test_families_that_the_loop_checks(prefix: str) -> None:
    model = unlisted(prefix)
    assert model.config.model_type in exchanges.FAMILIES
    for dtype in DTYPES:
        assert differing(model.to(dtype), invariant=True) == 0, dtype


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@torch.no_grad()
def test_two_threads(two_threads: None) -> None:
    assert differing(model_of("llama", torch.bfloat16), invariant=True) == 0
    # Threads share the sum of a single long row.
    logits, tokens = torch.randn(9, 70_000, generator=torch.Generator().manual_seed(0)), torch.arange(9)
    rows = [torch_specops.raw_logprobs(logits[[row]], tokens[[row]]) for row in range(9)]
    assert torch.equal(torch.cat(rows), torch_specops.raw_logprobs(logits, tokens))


MUTATIONS: dict[str, tuple[str, Callable[..., Tensor], str]] = {
    "a plain linear": ("linear", F.linear, r"model\.layers\.0\.self_attn\.q_proj \(Linear\)"),
    "a plain activation": ("pointwise", lambda function, x: function(x), r"model\.layers\.\d\.mlp\.act_fn \(SiLU.*\)"),
    "attention as before": ("attend", attend_masked, r"the input of model\.layers\.\d\.self_attn\.o_proj \(Linear\)"),
}


@pytest.mark.parametrize("name", MUTATIONS)
@torch.no_grad()
def test_mutations_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, mutation, module = MUTATIONS[name]
    model = model_of("llama", hidden_size=96)
    assert differing(model, invariant=True) == 0
    monkeypatch.setattr(ops, function, mutation)
    assert differing(model, invariant=True) > 0
    # A first use finds it too, and says where.
    monkeypatch.setattr(exchanges, "_passed", set())
    with pytest.raises(RuntimeError, match=f"invariant: of the modules of LlamaForCausalLM, {module} is the first"):
        torch_specops.generate(model, TOKENS[:, :4], max_new_tokens=2, invariant=True)
    with pytest.raises(RuntimeError, match=module):
        invariant_forward(model)(TOKENS)


@pytest.mark.parametrize("ending", exchanges.EXPERTS)
@torch.no_grad()
def test_mutations_of_experts_are_found(ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = unlisted("Qwen2Moe", hidden_size=96)
    invariant_forward(model)(TOKENS[:1])
    monkeypatch.setitem(exchanges.EXPERTS, ending, lambda module, *given: type(module).forward(module, *given))
    assert differing(model, invariant=True) > 0
    if ending == "Experts":
        # A first use finds it too. Its few tokens need not show the end of a loop over one number of each, and with
        # AVX2 not a router.
        monkeypatch.setattr(exchanges, "_passed", set())
        with pytest.raises(RuntimeError, match=r"model\.layers\.0\.mlp \(Qwen2MoeSparseMoeBlock\) is the first"):
            invariant_forward(model)(TOKENS)


@torch.no_grad()
def test_another_number_of_threads_is_compared_again(monkeypatch: pytest.MonkeyPatch, two_threads: None) -> None:
    decoder = SpeculativeDecoder(model_of("llama"), invariant=True)
    torch.set_num_threads(1)
    decoder.generate(TOKENS[:, :4], max_new_tokens=2)
    monkeypatch.setattr(ops, "attend", attend_masked)
    decoder.generate(TOKENS[:, :4], max_new_tokens=2)
    torch.set_num_threads(2)
    monkeypatch.setattr(exchanges, "_passed", {key for key in exchanges._passed if key[2][0] == 1})
    with pytest.raises(RuntimeError, match="o_proj"):
        decoder.generate(TOKENS[:, :4], max_new_tokens=2)


@pytest.mark.parametrize("family", ["llama", "Qwen2Moe"])
def test_a_trainer_has_gradients_and_the_same_bits(family: str) -> None:
    policy = (unlisted if family in MIXTURES else model_of)(family, attention_dropout=0.5).train()
    output = torch_specops.generate(policy, TOKENS[:, :6], max_new_tokens=20, seed=0, logprobs="raw", invariant=True)
    forward = invariant_forward(policy)
    optimizer = torch.optim.SGD(policy.parameters(), 1e-2)
    for step in range(2):
        logits = forward(output.sequences).logits
        logprobs = torch_specops.raw_logprobs(logits[:, :-1], output.sequences[:, 1:])
        is_same = logprobs[:, 5:] == output.logprobs[:, 6:]
        # The parameters that an optimizer has changed are those of the forward.
        assert bool(is_same.all()) if step == 0 else not bool(is_same.any())
        optimizer.zero_grad()
        logprobs[:, 5:].sum().backward()
        if step == 0:
            ours = [weight.grad.clone() for weight in policy.parameters()]
            plain = torch.log_softmax(policy.eval()(output.sequences).logits[:, :-1], 2)
            plain.gather(2, output.sequences[:, 1:, None])[:, 5:].sum().neg().backward()
            for weight, gradient in zip(policy.train().parameters(), ours, strict=True):
                assert float(weight.grad.norm()) <= 1e-4 * float(gradient.norm())
                weight.grad = gradient
        optimizer.step()
    assert policy.training and not any("forward" in vars(module) for module in policy.modules())


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gemma3", "opt"])
def test_padding_on_either_side(family: str) -> None:
    """Padding attends to nothing in a layer with a window, and must not reach texts."""
    forward = invariant_forward(model_of(family))
    whole = forward(TOKENS[:1, :40]).logits
    for before, after in ((0, 30), (30, 0), (7, 9)):
        ids, mask = F.pad(TOKENS[:2, :40], (before, after), value=3), torch.ones(2, 40 + before + after).long()
        mask[0, :before] = 0
        mask[0, before + 40 :] = 0
        logits = forward(ids, mask).logits
        assert torch.equal(logits[:1, before : before + 40], whole)
        kept = forward(ids, mask, logits_to_keep=after + 9).logits
        assert kept.shape[1] == after + 9 and torch.equal(kept[0, :9], whole[0, -9:])
        assert torch.equal(kept[1], logits[1, -after - 9 :])
    forward(ids, attention_mask=mask.bool())
    for arguments in (
        {"position_ids": mask.cumsum(1)},
        {"past_key_values": transformers.DynamicCache()},
        {"labels": ids},
        {"attention_mask": mask[:, None, None]},
        {"attention_mask": mask, "logits_to_keep": torch.tensor([3])},
    ):
        name = list(arguments)[-1]
        with pytest.raises(ValueError, match=f"{name}: expected"):
            forward(ids, **arguments)


def with_forward(change: Callable[[Any], nn.Module]) -> transformers.PreTrainedModel:
    model = model_of("llama")
    module = change(model)
    module.forward = MethodType(type(module).forward, module)
    return model


def with_module(place: str, module: nn.Module) -> transformers.PreTrainedModel:
    model = model_of("llama")
    parent, _, name = place.rpartition(".")
    setattr(model.get_submodule(parent), name, module)
    return model


class Own(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def dynamically_quantised() -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(model_of("llama"), {nn.Linear}, dtype=torch.qint8)


@pytest.mark.filterwarnings("ignore:.*quantiz")
def test_who_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    moe = transformers.PhimoeConfig(vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=1)
    quantised = unlisted("Mixtral")
    experts = quantised.model.layers[1].mlp.experts
    experts.down_proj = nn.Parameter(experts.down_proj.detach().half())
    hybrid = transformers.Lfm2Config(
        vocab_size=60, hidden_size=32, num_hidden_layers=2, layer_types=["conv", "full_attention"]
    )
    from_config = transformers.AutoModelForCausalLM.from_config
    longrope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    family = "invariant: expected a model of gemma, .*, got {} "
    place = r"invariant: model\.layers\.0\.mlp\.{} \({}\) {}"
    cases: list[tuple[Any, type[Exception], str]] = [
        (model_of("gemma2"), ValueError, family.format("Gemma2ForCausalLM")),
        (model_of("t5"), ValueError, family.format("T5ForConditionalGeneration")),
        (model_of("whisper"), ValueError, family.format("WhisperForConditionalGeneration")),
        (from_config(moe), ValueError, family.format("PhimoeForCausalLM")),
        (from_config(hybrid), ValueError, family.format("Lfm2ForCausalLM")),
        (
            model_of("llama", torch.float16),
            ValueError,
            "invariant: expected a model in float32 or bfloat16, got torch.fl",
        ),
        (tiny("llama"), ValueError, "invariant: expected a model in float32 or bfloat16, got torch.float64"),
        (model_of("llama", attention="eager"), ValueError, "invariant: expected attention 'sdpa', got 'eager'"),
        (
            model_of("gemma3", final_logit_softcapping=30.0),
            ValueError,
            "invariant: expected final_logit_softcapping None",
        ),
        (model_of("llama", rope_parameters=longrope), ValueError, "invariant: the model's rotary embedding"),
        (with_forward(lambda model: model), ValueError, r"invariant: the model \(LlamaForCausalLM\) has a forward"),
        (
            with_forward(lambda model: model.model.layers[0].mlp.up_proj),
            ValueError,
            place.format("up_proj", "Linear", "has"),
        ),
        (
            with_module("model.layers.0.mlp.up_proj", Own(32, 148)),
            ValueError,
            place.format("up_proj", "Own", "has a forward"),
        ),
        (
            with_module("model.layers.0.mlp.act_fn", nn.Softmax(-1)),
            ValueError,
            place.format("act_fn", "Softmax", "may depend"),
        ),
        (quantised, ValueError, r"invariant: model\.layers\.1\.mlp\.experts \(MixtralExperts\) is quantised"),
        (dynamically_quantised(), ValueError, "invariant: .* may depend on what is read with a token"),
        (nn.Linear(2, 2), TypeError, "target: expected a transformers model"),
        (language_model(model_of("llama")), ValueError, "invariant: expected target to be a transformers model, or"),
    ]
    assert raised(lambda target: SpeculativeDecoder(target, invariant=True), cases) == []
    llama = model_of("llama")
    with pytest.raises(ValueError, match="compile: expected 'auto' or False with an invariant target, got True"):
        SpeculativeDecoder(llama, invariant=True, compile=True)
    forward = invariant_forward(llama)
    for call in (SpeculativeDecoder(llama, invariant=True).generate, forward):
        with (
            torch.autocast("cpu", dtype=torch.bfloat16),
            pytest.raises(ValueError, match=r"invariant: expected no torch\.auto"),
        ):
            call(TOKENS[:, :9], **({} if call is forward else {"max_new_tokens": 9}))
    with pytest.raises(ValueError, match="invariant: expected False for trees"):
        torch_specops.beam.beam_search(
            language_model(llama, invariant=True), TOKENS[:1, :4], num_beams=2, max_new_tokens=4
        )
    monkeypatch.setattr(transformers.PreTrainedModel, "device", property(lambda model: torch.device("cuda")))
    with pytest.raises(ValueError, match="invariant: expected a model on a CPU, got cuda"):
        language_model(llama, invariant=True)


def test_a_model_that_changes() -> None:
    """A look exchanges the functions of new modules, and refuses what it cannot."""
    model = model_of("llama")
    decoder = SpeculativeDecoder(model, invariant=True)
    decoder.generate(TOKENS[:, :4], max_new_tokens=2)
    model.lm_head = copy.deepcopy(model.lm_head)
    for layer in model.model.layers:
        layer.mlp.up_proj = nn.Linear(32, 148)
    output = decoder.generate(TOKENS[:, :4], max_new_tokens=9, logprobs="raw")
    logits = invariant_forward(model)(output.sequences).logits
    logprobs = torch_specops.raw_logprobs(logits[:, :-1], output.sequences[:, 1:])
    assert torch.equal(logprobs[:, 3:], output.logprobs[:, 4:])
    model.lm_head.forward = lambda x: F.linear(x, model.lm_head.weight)
    with pytest.raises(ValueError, match=r"target: invariant: lm_head \(Linear\) has a forward"):
        decoder.generate(TOKENS[:, :4], max_new_tokens=2)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.no_grad()
def test_a_long_text_of_a_real_model(dtype: torch.dtype) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2_directory(), dtype=dtype)
    tokens = torch.randint(3, 40000, (2, 2000), generator=torch.Generator().manual_seed(0))
    adapter = language_model(model, invariant=True)
    adapter.start(2, 2000)
    adapter.begin_texts(torch.full((2,), 2000))
    start = 2000 - sum(PIECES)
    adapter.forward(tokens[:, :start], torch.arange(start).expand(2, -1), 1)
    found = []
    for size in PIECES:
        positions = torch.arange(start, start + size).expand(2, -1)
        found.append(adapter.forward(tokens[:, start : start + size], positions))
        start += size
    whole = invariant_forward(model)(tokens[1:]).logits[:, -sum(PIECES) :]
    assert torch.equal(torch.cat(found, 1)[1:], whole)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_lora() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model_of("llama"), config)
    assert differing(adapted.get_base_model(), invariant=True) == 0
    assert differing(adapted.merge_and_unload(), invariant=True) == 0
    config = peft.LoraConfig(r=4, target_parameters=["mlp.experts.down_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(unlisted("Mixtral"), config)
    assert differing(adapted.get_base_model(), invariant=True) == 0
