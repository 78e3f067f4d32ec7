"""One call: prompts in, sequences out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ..drafts import AnyDraft, LanguageModel
from ..sampling import SamplingParams
from ..schedules import Schedule
from .decoder import SpeculativeDecoder
from .inputs import EosTokenIds, Seed
from .output import GenerationOutput, Streamer

__all__ = ["generate"]


def generate(
    target: LanguageModel | nn.Module,
    input_ids: Tensor,
    *,
    draft: AnyDraft = None,
    attention_mask: Tensor | None = None,
    max_new_tokens: int | Sequence[int] = 128,
    num_draft_tokens: int = 5,
    schedule: str | Schedule = "constant",
    sampling: SamplingParams | None = None,
    seed: Seed = None,
    eos_token_id: EosTokenIds = None,
    pad_token_id: int | None = None,
    verify: str = "exact",
    lenience: float = 1.0,
    argmax_lenience: float = 1.0,
    compile: bool | str = "auto",
    inputs: Mapping[str, Tensor] | None = None,
    logprobs: str | None = None,
    num_return_sequences: int = 1,
    stop_strings: str | Sequence[str] | None = None,
    tokenizer: Any = None,
    streamer: Streamer | None = None,
) -> GenerationOutput:
    """Continue prompts with a target model, faster with a draft, and with exactly the target's law.

    This makes a `SpeculativeDecoder` for one batch. For many batches use that class: it keeps its compiled code, while
    every call of this function compiles again (on CUDA, steps are compiled unless `compile=False`).

    Arguments, result and errors are those of `SpeculativeDecoder` and its `generate`. Only the eos and pad tokens of a
    transformers model's generation config are used; `SamplingParams.from_generation_config` takes its temperature,
    filters and penalties. Beam search is `torch_specops.beam.beam_search`.

    Example:
        >>> import torch, transformers, torch_specops
        >>> config = transformers.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        ...     num_attention_heads=4, num_key_value_heads=2, eos_token_id=None)
        >>> target = transformers.LlamaForCausalLM(config).eval()
        >>> prompts = torch.tensor([[5, 6, 7, 5, 6], [0, 0, 9, 8, 9]])
        >>> mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
        >>> output = torch_specops.generate(target, prompts, attention_mask=mask, max_new_tokens=[8, 4], seed=0,
        ...     draft=torch_specops.drafts.PromptLookup(), sampling=torch_specops.SamplingParams(temperature=0.0))
        >>> output.lengths
        tensor([13,  7])
    """
    decoder = SpeculativeDecoder(
        target,
        draft,
        num_draft_tokens=num_draft_tokens,
        schedule=schedule,
        sampling=sampling,
        verify=verify,
        lenience=lenience,
        argmax_lenience=argmax_lenience,
        compile=compile,
    )
    return decoder.generate(
        input_ids,
        attention_mask=attention_mask,
        max_new_tokens=max_new_tokens,
        seed=seed,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
        inputs=inputs,
        logprobs=logprobs,
        num_return_sequences=num_return_sequences,
        stop_strings=stop_strings,
        tokenizer=tokenizer,
        streamer=streamer,
    )
