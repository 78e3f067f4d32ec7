"""Speculative decoding for `model.generate(..., custom_generate="OWNER/REPOSITORY", trust_remote_code=True)`."""

from typing import Any

from transformers import GenerationMixin

from torch_specops.hf import custom_generate


def generate(model: Any, *arguments: Any, **options: Any) -> Any:
    """What `model.generate` takes, and what `torch_specops.hf.custom_generate` takes besides, `draft_model` and
    `num_draft_tokens` for example."""
    # Not `model.generate`, which may be what has called this: Whisper's, or this function itself in a repository with
    # weights.
    return GenerationMixin.generate(model, *arguments, custom_generate=custom_generate, **options)
