"""What a model's owner may have hidden from a look: code in hooks, classes and functions, and what belongs to them."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from tiny_models import raised, tiny
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from torch_specops import SamplingParams, SpeculativeDecoder, compilation
from torch_specops.compilation import compile_piece
from torch_specops.hf import language_model

PROMPTS = torch.tensor([[5, 6, 7, 5], [9, 4, 17, 9]])
GREEDY = SamplingParams(temperature=0.0)
global_hook = nn.modules.module.register_module_forward_hook


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(compilation, "compile_piece", partial(compile_piece, backend="eager"))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def llama() -> PreTrainedModel:
    return tiny("llama", num_hidden_layers=1)


def decoder_of(model: PreTrainedModel, compile: bool = False) -> SpeculativeDecoder:
    return SpeculativeDecoder(model, sampling=GREEDY, compile=compile)


def difference(decoder: SpeculativeDecoder, model: PreTrainedModel) -> float:
    """How far log-probabilities of new tokens are from the model's own, which is in evaluation mode for this."""
    output = decoder.generate(PROMPTS, max_new_tokens=3, eos_token_id=(), logprobs="raw")
    modes = [(module, module.training) for module in model.modules()]
    with torch.no_grad():
        expected = model.eval()(output.sequences, use_cache=False).logits.float().log_softmax(-1)
    for module, training in modes:
        module.training = training
    own = expected[:, 3:-1].gather(2, output.sequences[:, 4:, None]).squeeze(2)
    return float((output.logprobs[:, 4:] - own).abs().max())


def test_configs_that_are_replaced_again_and_again() -> None:
    model = tiny("qwen3")
    adapter = language_model(model)
    for number in range(40):
        config = copy.deepcopy(model.config)
        config.note = {"number": [number]}
        model.config = model.model.config = config
        adapter.look()
        copied = adapter.prepared.config
        assert copied is adapter.prepared.model.config is not config
        assert {name: vars(copied)[name] for name in ("note", "layer_types", "rope_parameters")} == {
            name: vars(config)[name] for name in ("note", "layer_types", "rope_parameters")
        }
    # Only those that the modules have now.
    assert len(adapter._copy.newest.configs) <= 3
    config.lengths = torch.arange(2)
    assert difference(decoder_of(model), model) < 1e-4
    config.lock = (number for number in range(2))
    with pytest.raises(ValueError, match="model: Qwen3Config cannot be copied: cannot pickle 'generator'"):
        adapter.look()


class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def hook(self, module: nn.Module, given: tuple[Tensor], states: Tensor) -> Tensor:
        return states + self.drop(given[0])


def by_a_method(lora: Lora) -> Any:
    return lora.hook


def by_a_partial(lora: Lora) -> Any:
    return partial(Lora.hook, lora)


@pytest.mark.parametrize("make", [by_a_method, by_a_partial])
def test_hooks_of_a_model_in_training_drop_nothing(make: Callable[[Lora], Any]) -> None:
    model = llama()
    mlp = model.model.layers[0].mlp
    mlp.lora = Lora()
    decoder = decoder_of(model)
    handle = mlp.register_forward_hook(make(mlp.lora))
    # Notes are the owner's.
    seen = list[Any]()
    model.lm_head.register_forward_hook(lambda *call: seen.append((call, setattr(model, "newest", call))))
    model.train()
    for _ in range(2):
        num_seen = len(seen)
        assert difference(decoder, model) < 1e-4
        assert len(seen) > num_seen and model.newest is seen[-1][0]
    handle.remove()
    assert difference(decoder, model) < 1e-4


class OfAClass(nn.Module):
    kept: ClassVar = [nn.Dropout(0.5)]

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, states: Tensor) -> Tensor:
        return self.kept[0](self.base(states))


class OfAWeakMethod(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.drop = base, nn.Dropout(0.5)
        self.call = weakref.WeakMethod(self.drop.forward)

    def forward(self, states: Tensor) -> Tensor:
        return self.call()(self.base(states))


def test_modules_that_cannot_be_followed_are_found_in_training() -> None:
    def use(kind: type[nn.Module]) -> None:
        model = llama()
        model.model.layers[0].mlp = kind(model.model.layers[0].mlp)
        decoder_of(model.train())

    cases = [
        (OfAClass, ValueError, "model: OfAClass.kept may call modules"),
        (OfAWeakMethod, ValueError, "model: OfAWeakMethod.call may call modules"),
    ]
    assert raised(use, cases) == []


class Reads(nn.Linear):
    def forward(self, states: Tensor) -> Tensor:
        return super().forward(states) * getattr(self.function, "scale", 1.0)


def test_functions_keep_their_attributes() -> None:
    for kind in ("function", "partial"):
        model = llama()
        head, decoder = model.lm_head, decoder_of(model)
        function: Any = (lambda head=head: head) if kind == "function" else partial(lambda head: head, head)
        function.scale = 0.3
        head.__class__, head.function = Reads, function
        assert difference(decoder, model) < 1e-4
    # A cache of functions has no attributes to copy, and is left alone.
    model.cached = functools.lru_cache(maxsize=None)(model.get_input_embeddings)
    assert difference(decoder, model) < 1e-4


def call_with_or_without_names(module: nn.Module, given: Any, *rest: Any) -> Tensor:
    return rest[-1] * (0.5 if len(rest) == 2 else 1.0)


@pytest.mark.usefixtures("traced")
def test_compiled_steps_see_other_code(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    handle = model.lm_head.register_forward_hook(call_with_or_without_names)
    decoder = decoder_of(model, compile=True)
    found = [difference(decoder, model)]
    handle.remove()
    # The same function, which gets another call.
    model.lm_head.register_forward_hook(call_with_or_without_names, with_kwargs=True)
    found.append(difference(decoder, model))
    of_all = global_hook(lambda module, given, output: output * 2 if isinstance(module, LlamaMLP) else None)
    found.append(difference(decoder, model))
    of_all.remove()
    own = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, states: own(self, states) * 2)
    found.append(difference(decoder, model))
    assert max(found) < 1e-4


class OwnMask(LlamaAttention):
    """Right for one text alone."""

    def forward(self, hidden_states: Tensor, attention_mask: Any = None, **named: Any) -> Any:
        return super().forward(hidden_states, attention_mask=None, **named)


def test_an_attention_of_ones_own_is_checked() -> None:
    model = llama()
    decoder = decoder_of(model)
    decoder.generate(PROMPTS, max_new_tokens=1)
    model.model.layers[0].self_attn.__class__ = OwnMask
    for use in (lambda: decoder.generate(PROMPTS), lambda: decoder_of(model)):
        with pytest.raises(ValueError, match="LlamaForCausalLM does not read ragged rows right"):
            use()
    model.model.layers[0].self_attn.__class__ = LlamaAttention
    assert difference(decoder, model) < 1e-4


@pytest.mark.usefixtures("quick_collection")
def test_what_was_removed_is_not_kept() -> None:
    model = llama()
    decoder, own = decoder_of(model), model.lm_head.forward
    weight = torch.zeros(3)
    model.lm_head.forward = lambda *given, kept=weight, **named: own(*given, **named)
    difference(decoder, model)
    freed = weakref.ref(weight)
    del model.lm_head.forward, weight
    difference(decoder, model)
    difference(decoder, model)
    gc.collect()
    assert freed() is None


def test_modules_without_weights_and_scripts_are_refused() -> None:
    def use(head: nn.Module) -> None:
        model = llama()
        model.lm_head = head
        language_model(model)

    cases = [
        (nn.LazyLinear(64), ValueError, "model: LazyLinear has no weights yet"),
        (torch.jit.script(nn.Linear(2, 2)), ValueError, "model: expected modules of Python"),
    ]
    assert raised(use, cases) == []
