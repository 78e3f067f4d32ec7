"""The ways to call a decoder of a transformers model, and how far their texts are from what the model itself gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from tiny_loops import GREEDY
from tiny_requests import in_order
from torch import Tensor
from transformers import PreTrainedModel

from torch_specops import Request, Session, SpeculativeDecoder
from torch_specops.beam import beam_search
from torch_specops.decode import Handle
from torch_specops.drafts import PromptLookup
from torch_specops.hf import custom_generate

# In both rows the first tokens come again.
PROMPTS = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5], [9, 4, 17, 33, 9, 4, 17, 33, 9]])
WIDTH = PROMPTS.shape[1]


class Found(NamedTuple):
    """Texts [2, L], the raw log-probabilities of their new tokens [2, n], whether all drafts were accepted."""

    texts: Tensor
    logprobs: Tensor | None
    all_accepted: bool = True


Way = Callable[[int], Found]


def by_generate(target: PreTrainedModel, draft: Any, compile: bool = False) -> Way:
    decoder = SpeculativeDecoder(target, draft, num_draft_tokens=3, sampling=GREEDY, compile=compile)

    def call(new: int) -> Found:
        output = decoder.generate(PROMPTS, max_new_tokens=new, eos_token_id=(), logprobs="raw")
        assert output.logprobs is not None
        accepted = output.stats.num_accepted == output.stats.num_proposed
        return Found(output.sequences, output.logprobs[:, WIDTH:], accepted)

    return call


def requests(new: int) -> list[Request]:
    return [Request(prompt, new, eos_token_id=()) for prompt in PROMPTS]


def found_of(completions: Any) -> Found:
    own = in_order(completions)
    for completion in own:
        if completion.error is not None:
            raise ValueError(completion.error)
    return Found(*(torch.stack([getattr(each, name) for each in own]) for name in ("tokens", "logprobs")))


def by_generate_many(target: PreTrainedModel, draft: Any, compile: bool = False) -> Way:
    decoder = SpeculativeDecoder(target, draft, num_draft_tokens=3, sampling=GREEDY, compile=compile)
    return lambda new: found_of(decoder.generate_many(requests(new), batch_size=2, max_length=40, logprobs="raw"))


def until_done(session: Session, *handles: Handle) -> list[Any]:
    while not all(handle.done for handle in handles):
        session.step()
    return [handle.result() for handle in handles]


def by_session(target: PreTrainedModel, draft: Any, compile: bool = False) -> Way:
    decoder = SpeculativeDecoder(target, draft, num_draft_tokens=3, sampling=GREEDY, compile=compile)
    session = decoder.session(2, max_length=40, logprobs="raw")
    return lambda new: found_of(until_done(session, *map(session.submit, requests(new))))


def by_custom_generate(target: PreTrainedModel, draft: Any, compile: bool = False) -> Way:
    options: dict[str, Any] = {"custom_generate": custom_generate, "draft_model": draft, "num_draft_tokens": 3}
    options |= {"compile": compile, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(PROMPTS)}
    # Steps that keep logits are not compiled.
    options |= {"return_dict_in_generate": True, "output_logits": not compile}

    def call(new: int) -> Found:
        output = target.generate(PROMPTS, max_new_tokens=new, **options)
        if compile:
            return Found(output.sequences, None)
        logprobs = torch.stack(output.logits, 1).log_softmax(-1)
        return Found(output.sequences, logprobs.gather(2, output.sequences[:, WIDTH:, None]).squeeze(2))

    return call


def by_beam_search(target: PreTrainedModel, draft: Any) -> Way:
    return lambda new: beam_search(target, PROMPTS, num_beams=2, max_new_tokens=new)


# How a way is made, and its draft.
WAYS: dict[str, tuple[Callable[..., Way], Any]] = {
    "generate": (by_generate, None),
    "generate with PromptLookup": (by_generate, PromptLookup(min_ngram=1)),
    "generate with a model": (by_generate, "model"),
    "generate_many": (by_generate_many, "model"),
    "session": (by_session, "model"),
    "custom_generate": (by_custom_generate, "model"),
}


def own_logprobs(model: PreTrainedModel, texts: Tensor) -> Tensor:
    """Of all tokens after each token of texts [2, L], from the model itself in the mode that it is in."""
    torch.manual_seed(0)
    with torch.no_grad():
        return model(texts, use_cache=False).logits.float().log_softmax(-1)


def difference(found: Found, model: PreTrainedModel, start: int = WIDTH) -> float:
    """How far the log-probabilities of the tokens from a place on are from the model's in evaluation mode, and these
    tokens from its greedy ones."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    expected = own_logprobs(model, found.texts)[:, start - 1 : -1]
    for module, training in modes:
        module.training = training
    own = expected.gather(2, found.texts[:, start:, None]).squeeze(2)
    differences = [expected.amax(2) - own]
    if found.logprobs is not None:
        differences.append((found.logprobs - own).abs())
    return float(torch.stack(differences).amax())
