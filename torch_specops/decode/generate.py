"""One call: prompts in, sequences out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from ..drafts import DraftSource, LanguageModel
from ..sampling import SamplingParams
from ..schedules import Schedule
from .beam import beam_search
from .decoder import SpeculativeDecoder
from .output import GenerationOutput
from .prompts import EosTokenIds
from .records import Streamer

__all__ = ["generate"]


def generate(
    target: LanguageModel | nn.Module,
    input_ids: Tensor,
    *,
    draft: DraftSource | LanguageModel | nn.Module | None = None,
    attention_mask: Tensor | None = None,
    max_new_tokens: int | Sequence[int] = 128,
    num_draft_tokens: int = 5,
    schedule: str | Schedule = "constant",
    sampling: SamplingParams | None = None,
    seed: int | Tensor | None = None,
    eos_token_id: EosTokenIds = None,
    pad_token_id: int | None = None,
    verify: str = "exact",
    lenience: float = 1.0,
    argmax_lenience: float = 1.0,
    compile: bool | str = "auto",
    inputs: Mapping[str, Tensor] | None = None,
    streamer: Streamer | None = None,
    num_beams: int | None = None,
    draft_beams: int | None = None,
    num_return_sequences: int = 1,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
) -> GenerationOutput:
    """Continue prompts with a target model, faster with a draft, and with exactly the target's law.

    A `SpeculativeDecoder` for one batch. Use that class where prompts come again and again: what a call compiles (on
    CUDA every call does, unless `compile=False`) is gone with it. The arguments are those of the class and of its
    `generate`, and so are the result and the errors.

    With `num_beams` it is beam search instead, and the result a `BeamOutput`; the arguments from there on are those of
    `beam_search`. What beam search has no use for is refused: a temperature above 0; a `schedule`, a `verify` or a
    lenience other than the default; `compile=True`; a `streamer`. No random number is drawn, so `seed` changes nothing.

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
    if num_beams is not None:
        _check_defaults(
            "beam search has no use for it",
            schedule=(schedule, "constant"),
            verify=(verify, "exact"),
            lenience=(lenience, 1.0),
            argmax_lenience=(argmax_lenience, 1.0),
            compile=("auto" if compile is False else compile, "auto"),
            streamer=(streamer, None),
        )
        if sampling is not None and bool((sampling.temperatures(len(input_ids)) > 0).any()):
            raise ValueError(f"sampling: beam search samples nothing; expected temperature 0, got {sampling}")
        return beam_search(
            target,
            input_ids,
            num_beams=num_beams,
            draft=draft,
            draft_beams=draft_beams,
            attention_mask=attention_mask,
            max_new_tokens=max_new_tokens,
            num_draft_tokens=num_draft_tokens,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            num_return_sequences=num_return_sequences,
            eos_token_id=eos_token_id,
            pad_token_id=pad_token_id,
            inputs=inputs,
        )
    _check_defaults(
        "it needs num_beams",
        draft_beams=(draft_beams, None),
        num_return_sequences=(num_return_sequences, 1),
        length_penalty=(length_penalty, 1.0),
        early_stopping=(early_stopping, False),
    )
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
        streamer=streamer,
    )


def _check_defaults(reason: str, **choices: tuple[object, object]) -> None:
    for name, (value, default) in choices.items():
        if value != default:
            raise ValueError(f"{name}: {reason}; expected {default!r}, got {value!r}")
