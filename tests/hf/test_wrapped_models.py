"""Models that training programs have wrapped, adapted or left in training mode, read in evaluation mode."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_loops import GREEDY
from tiny_models import TOKENS, VOCAB, full_logits, raised, tiny, untested
from torch import Tensor, nn

import torch_specops
from torch_specops import drafts, hf
from torch_specops.drafts import EarlyExit

CAPACITY = 32
CALL: dict[str, Any] = {"input_ids": TOKENS[:, :6], "max_new_tokens": 8, "eos_token_id": ()}
POSITIONS = torch.arange(24).expand(3, -1)


def greedy(model: nn.Module, draft: Any = None) -> Tensor:
    return torch_specops.generate(model, **CALL, draft=draft, sampling=GREEDY).sequences


def test_a_training_model_is_read_without_dropout() -> None:
    evaluated, training = (tiny("llama", attention_dropout=0.5) for _ in range(2))
    # A model that is compiled by itself is read in the same way.
    training.train().compile(backend="eager")
    expected = greedy(evaluated, evaluated)
    for model in (training, torch.compile(training, backend="eager")):
        assert torch.equal(greedy(model, model), expected)
    with pytest.raises(TypeError, match=r"target: .*DataParallel.*; of a wrapper, pass the model inside"):
        torch_specops.SpeculativeDecoder(nn.DataParallel(evaluated))


def around_forward(module: nn.Module) -> None:
    own = module.forward
    module.forward = lambda *args, **kwargs: own(*args, **kwargs)


def as_a_default(module: nn.Module) -> None:
    module.forward = lambda *args, own=module.forward, **kwargs: own(*args, **kwargs)


def as_hooks_of_accelerate(module: nn.Module) -> None:
    for each in module.modules():
        each._old_forward = each.forward

        def forward(each: Any, *args: object, **kwargs: object) -> object:
            return each._old_forward(*args, **kwargs)

        each.forward = functools.update_wrapper(functools.partial(forward, each), each._old_forward)


def as_the_head_of_trl(module: nn.Module) -> None:
    own = module.forward

    @functools.wraps(type(module).forward)
    def forward(self: nn.Module, *args: object, fused: bool = False, **kwargs: object) -> object:
        return self.fused(*args) if fused else own(*args, **kwargs)

    module.forward = MethodType(forward, module)


class Converted:
    """As accelerate's ConvertOutputsToFp32."""

    def __init__(self, forward: Callable[..., object]) -> None:
        self.forward = forward
        functools.update_wrapper(self, forward)

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self.forward(*args, **kwargs)


def as_prepared_by_accelerate(module: nn.Module) -> None:
    as_the_head_of_trl(module)
    converted = Converted(torch.autocast("cpu", enabled=False)(module.forward.__func__))
    module.forward = MethodType(lambda *args, **kwargs: converted(*args, **kwargs), module)


def as_one_of_a_list(module: nn.Module) -> None:
    kept = [weakref.ref(module), {"own": module.forward}]
    module.forward = lambda *args, **kwargs: kept[1]["own"](*args, **kwargs)


def as_compiled(module: nn.Module) -> None:
    module.forward = torch.compile(module.forward, backend="eager")
    for index in range(2):
        module.model.layers[index] = torch.compile(module.model.layers[index], backend="eager")


WRAPPERS = (
    around_forward,
    as_a_default,
    as_hooks_of_accelerate,
    as_the_head_of_trl,
    as_prepared_by_accelerate,
    as_one_of_a_list,
)


@pytest.mark.parametrize("wrap", [*WRAPPERS, as_compiled])
def test_wrapped_training_model_without_dropout(wrap: Callable[[nn.Module], None]) -> None:
    model = tiny("llama", attention_dropout=0.5)
    with torch.no_grad():
        expected = full_logits(model, TOKENS)
        wrap(model)
        if wrap is not as_compiled:
            model.train()._set_gradient_checkpointing(gradient_checkpointing_func=lambda *call: 1 / 0)
        model.train()
        adapter = hf.language_model(model)
        forwards = []
        for _ in range(2):
            adapter.start(3, CAPACITY)
            logits = adapter.forward(TOKENS, POSITIONS)
            torch.testing.assert_close(logits, expected)
            forwards.append(vars(adapter.prepared)["forward"])
        # Another object would be compiled again. The loop compiles its own steps.
        assert forwards[0] is forwards[1] and adapter.prepared.forward is not model.forward
        assert wrap is not as_compiled or forwards[0].__func__ is type(model).forward
        # The layers that run are the copy's, which an early exit shortens.
        first = adapter.first_layers(1)
        first.start(3, CAPACITY)
        assert not torch.equal(first.forward(TOKENS, POSITIONS), logits)


def test_a_wrapper_writes_to_its_own_variables() -> None:
    model, count = tiny("llama"), 0
    own = model.forward

    def forward(*args: object, **kwargs: object) -> object:
        nonlocal count
        count += 1
        return own(*args, **kwargs)

    model.forward = forward
    adapter, before = hf.language_model(model), count
    adapter.start(3, CAPACITY)
    adapter.forward(TOKENS, POSITIONS)
    assert count == before + 1
    # A call that counts is no other forward.
    adapter.start(3, CAPACITY)
    assert count == before + 1
    # Two functions of the same variables are two.
    model.forward = lambda *args, **kwargs: own(*args, **kwargs)
    adapter.start(3, CAPACITY)
    model.forward = lambda *args, **kwargs: own(*args, **kwargs) and 1 / 0
    # A new forward is checked.
    with pytest.raises(ZeroDivisionError):
        adapter.start(3, CAPACITY)


def test_unfollowable_forward_needs_evaluation_mode() -> None:
    model = tiny("llama", attention_dropout=0.5)
    expected = greedy(model)
    kept = SimpleNamespace(own=model.forward)
    scope: dict[str, Any] = {"own": model.forward}

    def with_an_attribute(*args: object, **kwargs: object) -> object:
        return with_an_attribute.own(*args, **kwargs)

    with_an_attribute.own = model.forward
    for forward in (
        with_an_attribute,
        lambda *args, **kwargs: kept.own(*args, **kwargs),
        # A global, as in a notebook.
        eval("lambda *args, **kwargs: own(*args, **kwargs)", scope),
    ):
        model.eval()
        model.forward = forward
        decoder = torch_specops.SpeculativeDecoder(model, model, sampling=GREEDY)
        assert torch.equal(decoder.generate(**CALL).sequences, expected)
        model.train()
        for target, draft in ((decoder.target, None), (tiny("llama"), model)):
            with pytest.raises(ValueError, match=r"LlamaForCausalLM.forward .* in training mode .*model\.eval\(\)"):
                greedy(target, draft)
        model.eval()
        assert torch.equal(decoder.generate(**CALL).sequences, expected)
        with pytest.raises(ValueError, match=r"LlamaForCausalLM.forward .* reads others"):
            torch_specops.SpeculativeDecoder(model, EarlyExit(1))
        del model.forward


def test_an_untested_family_is_read_under_autocast() -> None:
    model = untested("Granite", intermediate_size=48, num_key_value_heads=2)
    for weight in model.get_decoder().layers.parameters():
        # Rounding to 16 bits then shows.
        nn.init.normal_(weight, std=0.35)
    model.forward = MethodType(torch.autocast("cpu", dtype=torch.bfloat16)(type(model).forward), model)
    adapter = hf.language_model(model)
    adapter.start(1, CAPACITY)
    tokens = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        expected = model(tokens).logits
        found = adapter.forward(tokens, torch.arange(3).unsqueeze(0))
        assert (found - expected).abs().max() <= 2**-7 * expected.abs().max()
    assert expected.dtype == torch.bfloat16


class LowRank(nn.Module):
    """A layer that a LoRA adapter takes the place of."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.dropout, self.is_on = base, nn.Dropout(0.5), True
        self.change = nn.Linear(base.in_features, base.out_features, dtype=base.weight.dtype)

    def forward(self, states: Tensor) -> Tensor:
        return self.base(states) + (self.change(self.dropout(states)) if self.is_on else 0)


class Adapted(nn.Module):
    """What this package asks a PeftModel for."""

    def __init__(self, base: nn.Module, is_prompt_learning: bool = False, kind: str = "LORA") -> None:
        super().__init__()
        self.base_model = base
        self.active_peft_config = SimpleNamespace(is_prompt_learning=is_prompt_learning, peft_type=kind)

    def get_base_model(self) -> nn.Module:
        return self.base_model


def test_a_model_with_an_adapter_is_its_base() -> None:
    model = tiny("llama")
    layer = model.model.layers[0].self_attn.q_proj = LowRank(model.model.layers[0].self_attn.q_proj)
    wrapper = Adapted(model).train()
    for draft in (None, wrapper, EarlyExit(1)):
        decoder = torch_specops.SpeculativeDecoder(wrapper, draft, sampling=GREEDY)
        texts = []
        for is_on in (True, False):
            layer.is_on = is_on
            texts.append(decoder.generate(**CALL).sequences)
            assert torch.equal(texts[-1], greedy(copy.deepcopy(model).eval()))
        assert not torch.equal(*texts)
    for refused in (Adapted(model, is_prompt_learning=True, kind="PREFIX_TUNING"), Adapted(model, kind="POLY")):
        for use in (hf.language_model, lambda draft: torch_specops.SpeculativeDecoder(model, draft)):
            with pytest.raises(ValueError, match=r"model: a PeftModel with P.* peft_model.get_base_model\(\)"):
                use(refused)


def test_drafts_take_transformers_models() -> None:
    target, draft = tiny("llama"), tiny("llama", seed=3)
    expected, twins = greedy(target), torch.arange(VOCAB)
    for model in (draft, Adapted(draft), torch.compile(draft, backend="eager")):
        assert isinstance(hf.language_model(model), drafts.LanguageModel)
        mapped = drafts.TokenMap(model, twins)
        for made in (
            drafts.HierarchicalDraft(model, model),
            drafts.HierarchicalDraft(mapped, drafts.ModelDraft(model)),
        ):
            assert torch.equal(greedy(target, made), expected)
    places = drafts.ModelDraft, drafts.HierarchicalDraft, lambda model: drafts.TokenMap(model, twins)
    error = "model: expected a transformers model or a LanguageModel, got .*Linear"
    cases = [(place, TypeError, error) for place in places]
    assert raised(lambda place: place(nn.Linear(2, 2)), cases) == []
