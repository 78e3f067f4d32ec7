"""Requests, each decoded alone or with others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from tiny_loops import new_tokens, streamed

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


TWO_PROMPTS = torch.tensor([[1, 2], [3, 4]])


def in_session(decoder: SpeculativeDecoder) -> list[list[int]]:
    with decoder.session(2, max_length=16) as session:
        handles = [session.submit(Request(prompt, 9)) for prompt in TWO_PROMPTS]
        while not session.is_idle:
            session.step()
    return [handle.result(0).new_tokens.tolist() for handle in handles]


# Every way to call a decoder: nine new tokens of each of the two prompts.
CALLS: dict[str, Callable[[SpeculativeDecoder], list[list[int]]]] = {
    "generate": lambda decoder: new_tokens(decoder.generate(TWO_PROMPTS, max_new_tokens=9)),
    "stream": lambda decoder: streamed(list(decoder.stream(TWO_PROMPTS, max_new_tokens=9)), 2),
    "generate_many": lambda decoder: many(decoder, [Request(prompt, 9) for prompt in TWO_PROMPTS], 2),
    "session": in_session,
}
