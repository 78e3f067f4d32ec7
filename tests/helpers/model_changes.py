"""What users do to a model between two calls, by the rows of the table in docs/models.md."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from tiny_models import VOCAB, tiny
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import dropout, linear
from torch.nn.utils import parametrizations, parametrize
from transformers import GraniteConfig, GraniteForCausalLM, PreTrainedModel

Apply = Callable[[Any], object]
NEW_WORDS = 4

llama = partial(tiny, "llama", num_hidden_layers=1)


@dataclass(frozen=True)
class Change:
    """A change of a model.

    Attributes:
        apply: makes it. Of one that is refused, returns a function that takes it back.
        make: the model before.
        of: the models that change: "both", "target" or "draft".
        error: the message with which it is refused, a pattern.
        tolerance: of log-probabilities.
        swaps_weights: as `changed` takes it.
    """

    apply: Apply
    make: Callable[[], PreTrainedModel] = llama
    of: str = "both"
    error: str = ""
    tolerance: float = 1e-4
    swaps_weights: bool = False

    @property
    def needs_draft(self) -> bool:
        """True = a draft that is a model, because without it nothing is refused."""
        return self.of == "draft" or self.error.startswith("draft")


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


CHANGES: dict[str, dict[str, Change]] = {
    "weights in place": {"optimizer": Change(optimizer_step), "load_state_dict": Change(load_state_dict)},
    "other weights": {"parameters": Change(new_parameters), "tied": Change(tie)},
    "the dtype": {"bfloat16": Change(lambda model: model.to(torch.bfloat16), tolerance=0.25)},
    "a submodule replaced": {"head": Change(replace_head), "in a layer": Change(replace_in_a_layer)},
    "layers or heads": {
        "heads": Change(replace_attention),
        "appended": Change(append_layer),
        "removed": Change(remove_layer, partial(tiny, "llama")),
    },
    "an adapter": {
        name: Change(apply, adapted)
        for name, apply in {
            "off": lambda model: setattr(adapter_of(model), "is_on", False),
            "a string": lambda model: setattr(adapter_of(model), "only", "b"),
            "a list in place": lambda model: adapter_of(model).active.append("b"),
            "a dict in place": lambda model: adapter_of(model).scaling.update(a=5.0),
            "merged": merge,
        }.items()
    },
    "a field of the config": {
        "sliding_window": Change(
            lambda model: setattr(model.config, "sliding_window", 2), partial(tiny, "mistral", num_hidden_layers=1)
        ),
        "final_logit_softcapping": Change(
            lambda model: setattr(model.config, "final_logit_softcapping", 1.0),
            partial(tiny, "gemma2", num_hidden_layers=1),
        ),
        "logits_scaling": Change(lambda model: setattr(model.config, "logits_scaling", 4.0), granite),
    },
    "the attention implementation": {
        "eager": Change(set_attention("eager"), partial(showing_attention, "sdpa")),
        "sdpa": Change(set_attention("sdpa"), partial(showing_attention, "eager")),
    },
    "a hook": {
        "added": Change(add_hook),
        "before a layer": Change(add_pre_hook),
        "removed": Change(lambda model: model.lm_head._forward_hooks.clear(), partial(made_with, add_hook)),
    },
    "a forward of its own": {
        "set": Change(set_forward),
        "of the model": Change(wrap_forward),
        "removed": Change(lambda model: delattr(model.lm_head, "forward"), partial(made_with, set_forward)),
    },
    "the class of a module": {
        "__class__": Change(set_class),
        "parametrize": Change(add_parametrization),
        "weight_norm": Change(weight_norm),
        "spectral_norm": Change(lambda model: parametrizations.spectral_norm(model.lm_head)),
    },
    "train() and eval()": {
        "dropout in attention": Change(train, partial(llama, attention_dropout=0.5)),
        "lists, dicts and tuples": Change(train, partial(dropping, *CONTAINERS)),
        "a weak reference": Change(train, partial(dropping, lambda module: weakref.ref(module.own))),
        "itself in a list": Change(train, partial(dropping, lambda module: [module])),
    },
    "train() with a module in a plain object": {
        "refused": Change(
            train,
            partial(dropping, lambda module: Plain(module.own)),
            of="target",
            error=r"(?s).*training mode.*model\.eval\(\)",
        )
    },
    "the vocabulary": {"resized": Change(resize)},
    "the vocabulary of the target or the draft alone": {
        of: Change(resize, of=of, error="draft: expected the vocabulary of the target") for of in ("target", "draft")
    },
    "a model that cannot be read any more": {
        "no head": Change(lose_the_head, of="target", error="(model|target): expected a model with a language head"),
        "a draft without a head": Change(lose_the_head, of="draft", error="draft: expected a model with a language"),
        "on meta": Change(leave_for_meta, of="target", error="(model|target): expected all weights"),
        "a draft on meta": Change(leave_for_meta, of="draft", error="draft: expected all weights on one device"),
        "flex attention": Change(
            set_attention("flex_attention"), of="target", error="(model|target): attention 'flex_"
        ),
    },
    "FSDP2": {
        "after the decoder was made": Change(shard, swaps_weights=True),
        "before": Change(change_in_place, partial(made_with, shard), swaps_weights=True),
    },
}
