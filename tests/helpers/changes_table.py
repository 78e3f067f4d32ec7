"""The table of docs/models.md: when a decoder sees which change of a model, with examples of each kind of change."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from model_changes import (
    CONTAINERS,
    Apply,
    Lora,
    OfAClass,
    OfAWeakMethod,
    Plain,
    adapted,
    adapter_of,
    add_hook,
    add_parametrization,
    add_pre_hook,
    append_layer,
    change_in_place,
    double_by_class,
    double_by_forward,
    double_by_hook,
    dropping,
    granite,
    hybrid,
    leave_for_meta,
    llama,
    load_state_dict,
    lose_the_head,
    made_with,
    merge,
    new_parameters,
    optimizer_step,
    remove_layer,
    replace_attention,
    replace_head,
    replace_in_a_layer,
    replace_states,
    resize,
    set_attention,
    set_class,
    set_forward,
    shard,
    showing_attention,
    tie,
    train,
    weight_norm,
    with_lora,
    with_mlp,
    wrap_forward,
)
from tiny_models import tiny
from torch.nn.utils import parametrizations
from transformers import PreTrainedModel

# The table's words for when a change is seen.
YES, NOT_RECOMPILED, AS_IN_EVAL, REFUSED = "yes", "yes, as they are", "as in `eval()`", "refused"
NEXT_STEP, NEXT_TEXT, NO_TEXT_RUNS = "at the next step", "from the next text", "while no text runs"


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


@dataclass(frozen=True)
class Row:
    """A row of the table: when a change is seen.

    Attributes:
        next_call: by the next call.
        session: by an open session.
        compiled: by compiled steps.
        changes: changes of this kind, by name.
    """

    next_call: str
    session: str
    compiled: str
    changes: dict[str, Change]


def seen(changes: dict[str, Change], session: str = NEXT_TEXT, compiled: str = YES) -> Row:
    return Row(YES, session, compiled, changes)


def everywhere(promise: str, changes: dict[str, Change]) -> Row:
    return Row(promise, promise, promise, changes)


def of_target(apply: Apply, error: str, make: Callable[[], PreTrainedModel] = llama) -> Change:
    return Change(apply, make, of="target", error=error)


def of_draft(apply: Apply, error: str) -> Change:
    return Change(apply, of="draft", error=error)


def set_field(family: str, **fields: object) -> Change:
    def apply(model: PreTrainedModel) -> None:
        model.config.update(fields)

    return Change(apply, granite if family == "granite" else partial(tiny, family, num_hidden_layers=1))


_MERGED = {"merged": merge, "off": lambda model: setattr(adapter_of(model), "is_on", False)}
_SWITCHED = {
    "a string": lambda model: setattr(adapter_of(model), "only", "b"),
    "a list in place": lambda model: adapter_of(model).active.append("b"),
    "a dict in place": lambda model: adapter_of(model).scaling.update(a=5.0),
}
_OTHER_VOCABULARY = "draft: expected the vocabulary of the target"

# By what the table says before a colon.
ROWS: dict[str, Row] = {
    "weights in place": seen(
        {"optimizer": Change(optimizer_step), "load_state_dict": Change(load_state_dict)}, NEXT_STEP, NOT_RECOMPILED
    ),
    "other weights": seen({"parameters": Change(new_parameters), "tied": Change(tie)}),
    "the dtype": seen(
        {"bfloat16": Change(lambda model: model.to(torch.bfloat16), tolerance=0.25)}, session=NO_TEXT_RUNS
    ),
    "a submodule replaced": seen({"head": Change(replace_head), "in a layer": Change(replace_in_a_layer)}),
    "layers or heads": seen(
        {
            "heads": Change(replace_attention),
            "heads of states": Change(replace_states, hybrid),
            "appended": Change(append_layer),
            "removed": Change(remove_layer, partial(tiny, "llama")),
        },
        session=NO_TEXT_RUNS,
    ),
    "an adapter": seen({name: Change(apply, adapted) for name, apply in (_MERGED | _SWITCHED).items()}),
    "a field of the config": seen(
        {
            "sliding_window": set_field("mistral", sliding_window=2),
            "final_logit_softcapping": set_field("gemma2", final_logit_softcapping=1.0),
            "logits_scaling": set_field("granite", logits_scaling=4.0),
        }
    ),
    "the attention implementation": seen(
        {
            "eager": Change(set_attention("eager"), partial(showing_attention, "sdpa")),
            "sdpa": Change(set_attention("sdpa"), partial(showing_attention, "eager")),
        }
    ),
    "a hook": seen(
        {
            "added": Change(add_hook),
            "before a layer": Change(add_pre_hook),
            "of a hybrid": Change(double_by_hook, hybrid),
            "removed": Change(lambda model: model.lm_head._forward_hooks.clear(), partial(made_with, add_hook)),
        }
    ),
    "a forward of its own": seen(
        {
            "set": Change(set_forward),
            "of the model": Change(wrap_forward),
            "of a hybrid": Change(double_by_forward, hybrid),
            "removed": Change(lambda model: delattr(model.lm_head, "forward"), partial(made_with, set_forward)),
        }
    ),
    "the class of a module": seen(
        {
            "__class__": Change(set_class),
            "of a hybrid": Change(double_by_class, hybrid),
            "parametrize": Change(add_parametrization),
            "weight_norm": Change(weight_norm),
            "spectral_norm": Change(lambda model: parametrizations.spectral_norm(model.lm_head)),
        }
    ),
    "train() and eval()": everywhere(
        AS_IN_EVAL,
        {
            "dropout in attention": Change(train, partial(llama, attention_dropout=0.5)),
            "lists, dicts and tuples": Change(train, partial(dropping, *CONTAINERS)),
            "a weak reference": Change(train, partial(dropping, lambda module: weakref.ref(module.own))),
            "itself in a list": Change(train, partial(dropping, lambda module: [module])),
            "a hook that is a method": Change(train, partial(with_lora, lambda lora: lora.hook)),
            "a hook that is a partial": Change(train, partial(with_lora, lambda lora: partial(Lora.hook, lora))),
        },
    ),
    "train() with a module in a plain object": everywhere(
        REFUSED,
        {
            "a plain object": of_target(
                train,
                r"(?s).*training mode.*model\.eval\(\)",
                partial(dropping, lambda module: Plain(module.own)),
            ),
            "of the class": of_target(
                train, "(model|target): OfAClass.kept may call modules", partial(with_mlp, OfAClass)
            ),
            "a weak method": of_target(
                train, "(model|target): OfAWeakMethod.call may call modules", partial(with_mlp, OfAWeakMethod)
            ),
        },
    ),
    "the vocabulary": seen({"resized": Change(resize)}),
    "the vocabulary of the target or the draft alone": everywhere(
        REFUSED, {"target": of_target(resize, _OTHER_VOCABULARY), "draft": of_draft(resize, _OTHER_VOCABULARY)}
    ),
    "a model that cannot be read any more": everywhere(
        REFUSED,
        {
            "no head": of_target(lose_the_head, "(model|target): expected a model with a language head"),
            "a draft without a head": of_draft(lose_the_head, "draft: expected a model with a language"),
            "on meta": of_target(leave_for_meta, "(model|target): expected all weights"),
            "a draft on meta": of_draft(leave_for_meta, "draft: expected all weights on one device"),
            "flex attention": of_target(set_attention("flex_attention"), "(model|target): attention 'flex_"),
        },
    ),
    "FSDP2": seen(
        {
            "after the decoder was made": Change(shard, swaps_weights=True),
            "before": Change(change_in_place, partial(made_with, shard), swaps_weights=True),
        },
        compiled=REFUSED,
    ),
}
