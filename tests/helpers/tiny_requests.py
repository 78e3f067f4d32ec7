"""Requests, each decoded alone or with others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from torch_specops import Completion, GenerationOutput, Request, SpeculativeDecoder

# Fields of a request that no argument of `generate` has, or that `generate` takes for a batch.
_OF_REQUESTS = ("input_ids", "max_time")


def alone(decoder: SpeculativeDecoder, request: Request, **options: Any) -> GenerationOutput:
    """What `generate` returns for the request's prompt and settings."""
    fields = {name: value for name, value in vars(request).items() if name not in _OF_REQUESTS}
    return decoder.generate(torch.as_tensor(request.input_ids).unsqueeze(0), **fields, **options)


def texts_alone(decoder: SpeculativeDecoder, requests: Iterable[Request]) -> list[list[int]]:
    return [alone(decoder, request).new_tokens(0) for request in requests]


def in_order(completions: Iterable[Completion]) -> list[Completion]:
    return sorted(completions, key=lambda completion: completion.index)


def texts(completions: Iterable[Completion]) -> list[list[int]]:
    return [completion.new_tokens.tolist() for completion in in_order(completions)]


def many(decoder: SpeculativeDecoder, requests: Sequence[Request], batch_size: int, **options: Any) -> list[list[int]]:
    """The new tokens of each request, in the order of the requests."""
    found = in_order(decoder.generate_many(requests, batch_size=batch_size, **options))
    assert [completion.index for completion in found] == list(range(len(requests)))
    return texts(found)
