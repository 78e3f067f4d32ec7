"""The same bits: a copy of a model whose logits after a text depend on that text alone, to the last bit.

The modules of the copy that compute otherwise for other numbers of tokens get the functions of `ops/invariant.py`. A
model is refused unless every other module is known to work token by token, and at first use a few tokens are read in
pieces and compared with the same tokens read at once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2CLS
from transformers.pytorch_utils import Conv1D

from ..ops import invariant
from .architecture import architecture_key
from .references import is_foreign

if TYPE_CHECKING:
    from .models import TransformersModel

# Families whose modules were read, and which the tests compare bit for bit.
FAMILIES = {
    "gemma",
    "gemma3_text",
    "gpt2",
    "gpt_neox",
    "granite",
    "granitemoe",
    "llama",
    "mistral",
    "mixtral",
    "olmo2",
    "olmoe",
    "opt",
    "phi",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "smollm3",
    "stablelm",
    "starcoder2",
}
DTYPES = (torch.float32, torch.bfloat16)
WEIGHTS = ("weight", "gate_up_proj", "down_proj")
# Modules without children that compute token by token as they are: these classes and containers, and classes of
# transformers whose names end like this.
AS_THEY_ARE = (nn.Embedding, nn.LayerNorm, nn.Dropout, nn.Identity, nn.ModuleList, nn.ModuleDict, nn.ParameterDict)
ENDINGS = ("RMSNorm", "RotaryEmbedding", "ScaledWordEmbedding", "LearnedPositionalEmbedding")
ACTIVATIONS = {each[0] if isinstance(each, tuple) else each for each in ACT2CLS.values()} - {nn.Identity}
# The check reads successive pieces of this many tokens.
PIECES = (1, 2, 3, 5, 7)

Forward = Callable[..., Any]
# Architectures that passed the check, with the code of their modules and torch's settings.
_passed: set[Hashable] = set()


def refuse_family(model: PreTrainedModel) -> None:
    """Raise ValueError if the tests do not compare the bits of the model's family."""
    if model.config.model_type not in FAMILIES:
        raise ValueError(
            f"invariant: expected a model of {', '.join(sorted(FAMILIES))}, got {type(model).__name__} "
            f"({model.config.model_type}), whose bits may depend on what is read with a token"
        )


def refuse_modules(model: PreTrainedModel) -> None:
    """Raise ValueError, by name, for what may depend on what is read with a token."""
    refuse_family(model)
    config = model.config
    if model.device.type != "cpu":
        raise ValueError(f"invariant: expected a model on a CPU, got {model.device}")
    if model.dtype not in DTYPES:
        raise ValueError(f"invariant: expected a model in float32 or bfloat16, got {model.dtype}")
    if config._attn_implementation != "sdpa":
        raise ValueError(f"invariant: expected attention 'sdpa', got {config._attn_implementation!r}")
    for field in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, field, None) is not None:
            raise ValueError(f"invariant: expected {field} None, got {getattr(config, field)}")
    for name, module in model.named_modules():
        why = _why_not(module)
        if why is not None:
            raise ValueError(f"invariant: {name or 'the model'} ({type(module).__name__}) {why}")


def _why_not(module: nn.Module) -> str | None:
    kind = type(module)
    if "forward" in vars(module) or is_foreign(kind):
        return "has a forward of another package, or one that was set on it, which was not compared"
    if _forward_of(kind) not in (None, _activation):
        weights = [getattr(module, name) for name in WEIGHTS if hasattr(module, name)]
        if any(type(weight) is not nn.Parameter or weight.dtype not in DTYPES for weight in weights):
            return "is quantised: expected weights in float32 or bfloat16"
        return None
    is_known = kind in AS_THEY_ARE or (kind.__name__.endswith(ENDINGS) and kind.__module__.startswith("transformers."))
    if is_known or (kind in ACTIVATIONS and not module._parameters):
        return None
    if module._modules and not module._parameters:
        return None
    return "may depend on what is read with a token"


def _linear(module: nn.Linear, x: Tensor) -> Tensor:
    return invariant.linear(x, module.weight, module.bias)


def _conv1d(module: Conv1D, x: Tensor) -> Tensor:
    return invariant.linear(x, module.weight.t(), module.bias)


def _activation(module: nn.Module, x: Tensor) -> Tensor:
    return invariant.pointwise(partial(type(module).forward, module), x)


def _router(module: Any, x: Tensor) -> tuple[Tensor, ...]:
    return invariant.by_rows(partial(type(module).forward, module), x, module.weight)


def _experts(module: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """x [N, I], the experts [N, k] that each token chose, and their weights [N, k]. What they give a token is added in
    the order of the experts, which depends on the token alone."""
    output = torch.zeros_like(x, dtype=torch.float32)
    # The gradient of each slice would be as large as the weights of all experts.
    ups, downs = module.gate_up_proj.unbind(), module.down_proj.unbind()
    for expert in chosen.unique().tolist():
        tokens, places = (chosen == expert).nonzero(as_tuple=True)
        hidden = module._apply_gate(invariant.linear(x[tokens], ups[expert]))
        found = invariant.linear(hidden, downs[expert]).float() * weights[tokens, places, None]
        output.index_add_(0, tokens, found)
    return output.to(x.dtype)


def _with_shared_expert(module: Any, x: Tensor) -> Any:
    rows = x.flatten(0, -2)
    _, weights, chosen = module.gate(rows)
    gates = invariant.pointwise(torch.sigmoid, module.shared_expert_gate(rows))
    return (module.experts(rows, chosen, weights) + gates * module.shared_expert(rows)).view_as(x)


# The class of a module -> its forward in the copy.
FORWARDS: dict[type, Forward] = dict.fromkeys(ACTIVATIONS, _activation) | {nn.Linear: _linear, Conv1D: _conv1d}
# The same for the classes of transformers whose names end like this.
EXPERTS: dict[str, Forward] = {
    "TopKRouter": _router,
    "Experts": _experts,
    "Qwen2MoeSparseMoeBlock": _with_shared_expert,
}


def _forward_of(kind: type) -> Forward | None:
    if kind in FORWARDS or not kind.__module__.startswith("transformers."):
        return FORWARDS.get(kind)
    return next((forward for ending, forward in EXPERTS.items() if kind.__name__.endswith(ending)), None)


def exchange(copy: nn.Module) -> None:
    """Exchange the forwards of modules in a model's copy (`ShadowModel`)."""
    for module in copy.modules():
        if (forward := _forward_of(type(module))) is not None:
            vars(module)["forward"] = MethodType(forward, module)


def refuse_autocast() -> None:
    if torch.is_autocast_enabled("cpu"):
        raise ValueError("invariant: expected no torch.autocast, in which products have another dtype")


# The copy may be checked in the middle of a call, which computes in inference mode.
@torch.inference_mode(False)
@torch.no_grad()
def check_bits(adapter: TransformersModel) -> None:
    """Compare tokens that are read in pieces with the same tokens in one forward, at the first use of an architecture
    and of torch's settings.

    Raises:
        RuntimeError: bits differ; names the first module whose output does.
    """
    # Other packages may replace the forward of a class.
    forwards = tuple(dict.fromkeys(type(module).forward for module in adapter.model.modules()))
    key = architecture_key(adapter.model), forwards, invariant.settings()
    if key in _passed:
        return
    adapter = type(adapter)(adapter.model, invariant=True, is_checked=True)
    count = min(sum(PIECES), adapter.max_length or sum(PIECES))
    tokens = torch.arange(count) * 37 % adapter.vocab_size
    with _outputs(adapter.prepared) as whole:
        whole["the result"] = adapter.prepared(input_ids=tokens.unsqueeze(0), use_cache=False).logits
    # Two rows, because some kernels take other routines for a batch of one.
    adapter.start(2, count)
    adapter.begin_texts(torch.full((2,), count))
    first = 0
    for size in PIECES:
        part = slice(first, min(first + size, count))
        positions = torch.arange(count)[part].expand(2, -1)
        with _outputs(adapter.prepared) as pieces:
            pieces["the result"] = adapter.forward(tokens[part].expand(2, -1), positions)
        for name in [name for name in whole if name in pieces]:
            output, expected = pieces[name], whole[name][:, part]
            # Masks have another shape.
            is_of_tokens = output.shape[1:] == expected.shape[1:] and whole[name].shape[1] == count
            if is_of_tokens and not torch.equal(output, expected.expand_as(output)):
                raise RuntimeError(
                    f"invariant: of the modules of {type(adapter.model).__name__}, {name} is the first that has other "
                    f"bits in a forward of {positions.shape[1]} tokens than in one of {count}; expected invariant=False"
                )
        first += size
    _passed.add(key)


@contextmanager
def _outputs(copy: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Collects the inputs and outputs of the modules by name, in the order in which the modules end. If an input is
    the first to differ, so does what the module's parent has computed by itself, such as attention."""
    found: dict[str, Tensor] = {}

    def keep(name: str, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        label = f"{name} ({type(module).__name__})"
        outputs = output if isinstance(output, tuple) else (output,)
        for key, values in ((f"the input of {label}", arguments), (label, outputs)):
            if values and isinstance(values[0], Tensor) and values[0].dim() > 2:
                found[key] = values[0]

    handles = [module.register_forward_hook(partial(keep, name)) for name, module in copy.named_modules() if name]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
