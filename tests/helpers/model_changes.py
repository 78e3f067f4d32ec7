"""What users do to a model between two calls. changes_table.py says what each of these changes does to a decoder."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any, ClassVar

import torch
from tiny_hybrids import tiny_hybrid
from tiny_models import VOCAB, tiny
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import dropout, linear
from torch.nn.utils import parametrizations, parametrize
from transformers import GraniteConfig, GraniteForCausalLM, PreTrainedModel

Apply = Callable[[Any], Any]
NEW_WORDS = 4

llama = partial(tiny, "llama", num_hidden_layers=1)


def made_with(apply: Apply) -> PreTrainedModel:
    model = llama()
    apply(model)
    return model


# Weights.


def noise(weight: Tensor) -> Tensor:
    return torch.randn(weight.shape, dtype=weight.dtype) * 0.2


def optimizer_step(model: PreTrainedModel) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    tokens = torch.arange(3, 9).unsqueeze(0)
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def load_state_dict(model: PreTrainedModel) -> None:
    model.load_state_dict({name: value + noise(value) for name, value in model.state_dict().items()})


def new_parameters(model: PreTrainedModel) -> None:
    for layer in (model.lm_head, model.model.layers[0].mlp.up_proj):
        layer.weight = nn.Parameter(layer.weight.detach() + noise(layer.weight))


def tie(model: PreTrainedModel) -> None:
    model.lm_head.weight = model.get_input_embeddings().weight


# Modules.


def replace_head(model: PreTrainedModel) -> None:
    model.lm_head = nn.Linear(32, VOCAB, bias=False, dtype=model.dtype)


def replace_in_a_layer(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp = nn.Sequential(model.model.layers[0].mlp, nn.Linear(32, 32, dtype=model.dtype))


def append_layer(model: PreTrainedModel) -> None:
    layers = model.model.layers
    layers.append(type(layers[0])(model.config, layer_idx=len(layers)).to(model.dtype).eval())
    for weight in layers[-1].parameters():
        if weight.dim() > 1:
            nn.init.normal_(weight, std=0.35)
    model.config.num_hidden_layers = len(layers)


def remove_layer(model: PreTrainedModel) -> None:
    del model.model.layers[-1]
    model.config.num_hidden_layers = len(model.model.layers)


def replace_attention(model: PreTrainedModel) -> None:
    model.model.layers[0].self_attn = llama(num_key_value_heads=4).model.layers[0].self_attn


# A hybrid's module that keeps a state.


def hybrid(**fields: object) -> PreTrainedModel:
    return tiny_hybrid(
        "qwen3_5_text", num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], **fields
    )


def state_module(model: PreTrainedModel) -> Any:
    return model.model.layers[0].linear_attn


def replace_states(model: PreTrainedModel) -> None:
    model.model.layers[0] = hybrid(seed=9, linear_num_value_heads=2).model.layers[0]


def double_by_class(model: PreTrainedModel) -> None:
    module, own = state_module(model), type(state_module(model))
    body = {"forward": lambda self, *args, **kwargs: 2 * own.forward(self, *args, **kwargs)}
    module.__class__ = type("Doubled", (own,), body)


def double_by_forward(model: PreTrainedModel) -> None:
    module = state_module(model)
    own = module.forward
    module.forward = lambda *args, **kwargs: 2 * own(*args, **kwargs)


def double_by_hook(model: PreTrainedModel) -> None:
    state_module(model).register_forward_hook(lambda module, given, output: 2 * output)


# Adapters.


class Adapter(nn.Module):
    """Takes the place of a linear layer, and reads attributes of all kinds that PEFT's layers have."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.changes = nn.ModuleDict(
            {name: nn.Linear(base.in_features, base.out_features, dtype=base.weight.dtype) for name in "abc"}
        )
        self.is_on, self.only, self.active, self.merged = True, "", ["a"], list[str]()
        self.scaling = {"a": 1.0, "b": 2.0, "c": 3.0}

    def forward(self, states: Tensor) -> Tensor:
        result = self.base(states)
        for name in [self.only] if self.only else self.active:
            if self.is_on and name not in self.merged:
                result = result + self.scaling[name] * self.changes[name](states)
        return result


def adapted() -> PreTrainedModel:
    model = llama()
    attention = model.model.layers[0].self_attn
    attention.o_proj = Adapter(attention.o_proj)
    return model


def adapter_of(model: PreTrainedModel) -> Any:
    return model.model.layers[0].self_attn.o_proj


def merge(model: PreTrainedModel) -> None:
    adapter = adapter_of(model)
    with torch.no_grad():
        adapter.base.weight.add_(adapter.changes["a"].weight)
    adapter.merged.append("a")


# Code.


def add_hook(model: PreTrainedModel) -> None:
    model.lm_head.register_forward_hook(lambda module, given, output: output.flip(-1) * 0.5)


def add_pre_hook(model: PreTrainedModel) -> None:
    model.model.layers[-1].register_forward_pre_hook(lambda module, given: (given[0] * 3, *given[1:]))


def backwards(module: nn.Linear, states: Tensor) -> Tensor:
    return linear(states, module.weight).flip(-1)


def set_forward(model: PreTrainedModel) -> None:
    model.lm_head.forward = MethodType(backwards, model.lm_head)


def wrap_forward(model: PreTrainedModel) -> None:
    own = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = own(*args, **kwargs)
        output.logits = output.logits.flip(-1)
        return output

    model.forward = forward


class Backwards(nn.Linear):
    forward = backwards


def set_class(model: PreTrainedModel) -> None:
    model.lm_head.__class__ = Backwards


class Flipped(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.flip(0) * 2


def add_parametrization(model: PreTrainedModel) -> None:
    parametrize.register_parametrization(model.lm_head, "weight", Flipped())


def weight_norm(model: PreTrainedModel) -> None:
    parametrizations.weight_norm(model.lm_head)
    with torch.no_grad():
        model.lm_head.parametrizations.weight.original0.mul_(0.3)


# Modes.


class Plain:
    """An object that nothing is known of."""

    def __init__(self, own: nn.Module) -> None:
        self.own = own

    def __call__(self) -> nn.Module:
        return self.own


class Dropping(nn.Module):
    """Drops states in training mode, which it reads from a module that it does not reach as a submodule."""

    def __init__(self, base: nn.Module, keep: Callable[[Any], Any]) -> None:
        super().__init__()
        self.base, self.own = base, nn.Dropout(0.5)
        self.kept = keep(self)
        # Dynamo asks no weak reference for its type.
        self.is_called = isinstance(self.kept, (weakref.ref, Plain))

    def forward(self, states: Tensor) -> Tensor:
        found = self.kept() if self.is_called else self.kept
        while not isinstance(found, nn.Module):
            found = found["own"] if isinstance(found, dict) else found[0]
        return dropout(self.base(states), 0.5, found.training)


def dropping(*ways: Callable[[Any], Any]) -> PreTrainedModel:
    model = llama()
    for keep in ways:
        model.model.layers[0].mlp = Dropping(model.model.layers[0].mlp, keep)
    return model.eval()


CONTAINERS: list[Callable[[Any], Any]] = [
    lambda module: [module.own],
    lambda module: {"own": module.own},
    lambda module: {"own": [(module.own,)]},
]


class OfAClass(nn.Module):
    """Reaches a module by an attribute of its class, which a copy shares."""

    kept: ClassVar = [nn.Dropout(0.5).eval()]

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, states: Tensor) -> Tensor:
        return self.kept[0](self.base(states))


class OfAWeakMethod(nn.Module):
    """Reaches a module by a method that it does not keep."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.drop = base, nn.Dropout(0.5)
        self.call = weakref.WeakMethod(self.drop.forward)

    def forward(self, states: Tensor) -> Tensor:
        return self.call()(self.base(states))


def with_mlp(kind: Callable[[nn.Module], nn.Module]) -> PreTrainedModel:
    model = llama()
    model.model.layers[0].mlp = kind(model.model.layers[0].mlp)
    return model.eval()


class Lora(nn.Module):
    """As PEFT hangs an adapter on a module: by a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def hook(self, module: nn.Module, given: tuple[Tensor], states: Tensor) -> Tensor:
        return states + self.drop(given[0])


def with_lora(hook_of: Callable[[Lora], Any]) -> PreTrainedModel:
    model = llama()
    mlp = model.model.layers[0].mlp
    mlp.lora = Lora()
    mlp.register_forward_hook(hook_of(mlp.lora))
    return model.eval()


def train(model: PreTrainedModel) -> Apply:
    model.train()
    return lambda model: model.eval()


# What is refused.


def resize(model: PreTrainedModel) -> Apply:
    model.resize_token_embeddings(VOCAB + NEW_WORDS, mean_resizing=False)
    for part in (model.lm_head, model.get_input_embeddings()):
        nn.init.normal_(part.weight[VOCAB:].detach(), std=0.5)
    return lambda model: model.resize_token_embeddings(VOCAB)


def lose_the_head(model: PreTrainedModel) -> Apply:
    head, model.lm_head = model.lm_head, None
    return lambda model: setattr(model, "lm_head", head)


def leave_for_meta(model: PreTrainedModel) -> Apply:
    weight = model.lm_head.weight.detach().clone()
    model.lm_head.to("meta")
    return lambda model: model.lm_head.to_empty(device="cpu").load_state_dict({"weight": weight})


def set_attention(name: str) -> Apply:
    def apply(model: PreTrainedModel) -> Apply:
        before = model.config._attn_implementation
        model.set_attn_implementation(name)
        return lambda model: model.set_attn_implementation(before)

    return apply


def showing_attention(name: str) -> PreTrainedModel:
    """Attention gives the same whatever computes it, but "eager" alone has weights to return."""
    model = llama(attention=name)
    model.model.layers[0].self_attn.register_forward_hook(
        lambda module, given, output: output if output[1] is None else (output[0] * 3, output[1])
    )
    return model


def shard(model: PreTrainedModel) -> None:
    mesh = init_device_mesh("cpu", (1,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    change_in_place(model)


def change_in_place(model: PreTrainedModel) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)


def granite() -> PreTrainedModel:
    """Of a family that is checked at its first use."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = GraniteForCausalLM(GraniteConfig(vocab_size=VOCAB, tie_word_embeddings=False, **sizes))
    for weight in model.parameters():
        if weight.dim() > 1:
            nn.init.normal_(weight, std=0.35)
    return model.double().eval()
