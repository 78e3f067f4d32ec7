"""transformers' `generate` with drafts of every kind that the installed release has, one text after the other."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from engines import NUM_DRAFT_TOKENS, VOCAB, Row, law_of, randomised, tiny_pair
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from torch_specops import SamplingParams

SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 128}
NO_ENDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}


class Generate:
    """`generate` of the target that `make` gives, with the keywords that `make` gives."""

    def __init__(self, make: Callable[[], tuple[PreTrainedModel, dict[str, Any]]]) -> None:
        self._target, self._helper = make()
        self.law = law_of(self._target)
        self._calls = 0
        self._target.register_forward_pre_hook(self._count)
        self.steps = self.tokens = 0

    def __call__(
        self, prompts: Sequence[list[int]], params: Sequence[SamplingParams], seeds: Sequence[int], length: int
    ) -> list[list[int]]:
        texts, before = [], self._calls
        for prompt, each, seed in zip(prompts, params, seeds, strict=True):
            torch.manual_seed(seed)
            sampling: dict[str, Any] = {"do_sample": False}
            if each.temperature > 0:
                sampling = {"do_sample": True, "temperature": each.temperature}
                sampling |= {"top_k": each.top_k, "top_p": each.top_p}
            ids = torch.tensor([prompt])
            limits = {"max_new_tokens": length, "pad_token_id": 0}
            output: Tensor = self._target.generate(
                ids, attention_mask=torch.ones_like(ids), **limits, **sampling, **self._helper
            )
            texts.append(output[0, len(prompt) :].tolist())
        # With an early exit the drafts are forwards of the target too.
        if "assistant_early_exit" not in self._helper:
            self.steps += self._calls - before
            self.tokens += sum(map(len, texts))
        return texts

    def _count(self, *_: Any) -> None:
        self._calls += 1


def with_constant_drafts(draft: PreTrainedModel) -> PreTrainedModel:
    draft.generation_config.num_assistant_tokens = NUM_DRAFT_TOKENS
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    return draft


def no_draft() -> tuple[PreTrainedModel, dict[str, Any]]:
    return tiny_pair()[0], {}


def draft_model(**more: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
    target, draft = tiny_pair()
    return target, {"assistant_model": with_constant_drafts(draft), **more}


def draft_defaults() -> tuple[PreTrainedModel, dict[str, Any]]:
    target, draft = tiny_pair()
    return target, {"assistant_model": draft}


def prompt_lookup() -> tuple[PreTrainedModel, dict[str, Any]]:
    return tiny_pair()[0], {"prompt_lookup_num_tokens": NUM_DRAFT_TOKENS}


def early_exit() -> tuple[PreTrainedModel, dict[str, Any]]:
    target = with_constant_drafts(tiny_pair()[0])
    return target, {"assistant_early_exit": 1}


def mtp() -> tuple[PreTrainedModel, dict[str, Any]]:
    """A GLM-4 MoE of two layers with two MTP layers, loaded from a folder that has them in the published names."""
    from transformers.modeling_layers import MtpModel

    layers = 2
    sizes = SIZES | NO_ENDS | {"head_dim": 16, "num_hidden_layers": layers}
    sizes |= {"num_nextn_predict_layers": NUM_DRAFT_TOKENS, "n_group": 1, "topk_group": 1}
    sizes |= {"moe_intermediate_size": 16, "n_routed_experts": 2, "num_experts_per_tok": 1, "n_shared_experts": 1}
    config = transformers.Glm4MoeConfig(**sizes, first_k_dense_replace=layers)
    whole = randomised(AutoModelForCausalLM.from_config(config), 0)
    heads = randomised(MtpModel(whole, NUM_DRAFT_TOKENS), 1)
    # The folder lives as long as the model, which reads it again in every call.
    folder = tempfile.TemporaryDirectory(prefix="mtp_")
    file = Path(folder.name) / "model.safetensors"
    whole.save_pretrained(folder.name)
    weights = load_file(file)
    for name, tensor in heads.layers.state_dict().items():
        number, part, rest = name.split(".", 2)
        part = {"mtp_block": "", "post_norm": "shared_head.norm."}.get(part, f"{part}.")
        weights[f"model.layers.{layers + int(number)}.{part}{rest}"] = tensor.clone()
    save_file(weights, file, metadata={"format": "pt"})
    target = AutoModelForCausalLM.from_pretrained(folder.name, dtype=torch.float32).eval()
    target.generation_config.eos_token_id = None
    target._folder = folder
    # The class names the layers of the published models, 46 and 92.
    target._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{layers + i}\..*" for i in range(NUM_DRAFT_TOKENS)]
    return target, {"use_mtp": True}


def dflash() -> tuple[PreTrainedModel, dict[str, Any]]:
    """A drafter that proposes blocks."""
    own = {"block_size": NUM_DRAFT_TOKENS + 1, "mask_token_id": VOCAB - 1, "target_layer_ids": [0, 1]}
    own |= {"head_dim": 16, "num_hidden_layers": 1, "sliding_window": 4, "layer_types": ["full_attention"]}
    config = transformers.MuseGlimmerAssistantConfig(**(SIZES | NO_ENDS | own))
    drafter = randomised(transformers.MuseGlimmerAssistantModel(config), 1)
    return tiny_pair()[0], {"assistant_model": drafter, "speculation_type": "dflash"}


def gemma4_assistant() -> tuple[PreTrainedModel, dict[str, Any]]:
    sizes = SIZES | NO_ENDS | {"head_dim": 16, "global_head_dim": 16, "num_hidden_layers": 2, "sliding_window": 64}
    sizes |= {"layer_types": ["sliding_attention", "full_attention"], "hidden_size_per_layer_input": 0}
    sizes |= {"vocab_size_per_layer_input": 0, "tie_word_embeddings": False}
    target = randomised(transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**sizes)), 0)
    own = transformers.Gemma4AssistantConfig(
        text_config=transformers.Gemma4TextConfig(**sizes, num_kv_shared_layers=2),
        backbone_hidden_size=SIZES["hidden_size"],
        tie_word_embeddings=False,
    )
    drafter = randomised(transformers.Gemma4AssistantForCausalLM(own), 1)
    drafter.generation_config.num_assistant_tokens = NUM_DRAFT_TOKENS
    return target, {"assistant_model": drafter}


# name -> what the table says, how it is made, the class of transformers that it needs
WAYS: dict[str, tuple[str, Callable[[], tuple[PreTrainedModel, dict[str, Any]]], str]] = {
    "no-draft": ("generate, no draft", no_draft, "PreTrainedModel"),
    "draft": ("assisted generation, draft model", draft_model, "PreTrainedModel"),
    "draft-defaults": ("the same, default schedule and confidence", draft_defaults, "PreTrainedModel"),
    "ensemble": (
        "the same, assistant_ensemble_weight 0.5, lossy by design",
        partial(draft_model, assistant_ensemble_weight=0.5),
        "PreTrainedModel",
    ),
    "lookup": ("prompt lookup", prompt_lookup, "PreTrainedModel"),
    "early-exit": ("assistant_early_exit", early_exit, "PreTrainedModel"),
    "mtp": ("use_mtp, Glm4Moe with two MTP layers", mtp, "Glm4MoeForCausalLM"),
    "dflash": ('speculation_type "dflash", Muse Glimmer assistant', dflash, "MuseGlimmerAssistantModel"),
    "gemma4": ("Gemma 4 with its assistant", gemma4_assistant, "Gemma4AssistantForCausalLM"),
}


def make(way: Callable[[], tuple[PreTrainedModel, dict[str, Any]]], needed: str) -> Generate:
    if not hasattr(transformers, needed):
        raise ImportError(f"transformers {transformers.__version__} has no {needed}")
    return Generate(way)


ROWS = {
    f"transformers-{name}": Row("transformers", words, partial(make, way, needed), 800)
    for name, (words, way, needed) in WAYS.items()
}
