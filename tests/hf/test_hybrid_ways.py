"""Every way into the loop with a hybrid: the tokens are those of `generate`, whatever happens beside it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from marks import slow
from tiny_dflash import new_head as new_drafter
from tiny_dspark import DSPARK
from tiny_dspark import new_head as new_dspark
from tiny_eagle3 import new_head
from tiny_grammars import Allowing, by_turns
from tiny_hybrids import tiny_hybrid
from tiny_loops import GREEDY, Pauses, new_tokens
from tiny_models import VOCAB, greedy_alone, padded, perturbed, tiny
from tiny_requests import many
from torch import Tensor, nn
from transformers import PreTrainedModel

from torch_specops import Request, SpeculativeDecoder
from torch_specops.beam import beam_search
from torch_specops.drafts import DFlash, Eagle3, EarlyExit, PromptLookup, SuffixLookup
from torch_specops.drafts.hierarchical import HierarchicalDraft
from torch_specops.drafts.token_map import TokenMap
from torch_specops.hf import custom_generate, language_model

PROMPTS = ([5, 6, 7, 8, 5, 6, 7, 8, 9, 5, 6], [3], [11, 12, 13, 11, 12, 13, 11, 12], [4, 9])
NEW = 12
IDS, MASK = padded(PROMPTS, "left")
CALL: dict[str, Any] = {"attention_mask": MASK, "max_new_tokens": NEW, "pad_token_id": 0}


def hybrid(seed: int = 0, **fields: Any) -> PreTrainedModel:
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    return tiny_hybrid("qwen3_5_text", seed, **(layers | fields))


shared = cache(hybrid)


def rows_of(model: PreTrainedModel) -> list[list[int]]:
    return [greedy_alone(model, prompt, NEW) for prompt in PROMPTS]


expected = cache(lambda: rows_of(shared()))


def loop(draft: Any = None, target: Any = None, num_drafts: int = 3, **options: Any) -> SpeculativeDecoder:
    target = shared() if target is None else target
    return SpeculativeDecoder(
        target, draft, num_draft_tokens=num_drafts, sampling=GREEDY, **({"schedule": "constant"} | options)
    )


def found(decoder: SpeculativeDecoder, **options: Any) -> list[list[int]]:
    return new_tokens(decoder.generate(IDS, **(CALL | options)))


def draft(scale: float = 0.02) -> PreTrainedModel:
    return perturbed(shared(), scale)


def state_module(model: Any) -> nn.Module:
    return model.model.layers[0].linear_attn


DRAFTS: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "hybrid": draft,
    "attention": lambda: tiny("llama", seed=3),
    "early exit": lambda: EarlyExit(1),
    "lookup": lambda: PromptLookup(1, 1),
    "suffix lookup": SuffixLookup,
    "hierarchical": lambda: HierarchicalDraft(draft(), draft(0.05)),
    "over attention": lambda: HierarchicalDraft(tiny("llama", seed=3), draft()),
    "eagle 3": lambda: Eagle3(new_head()),
    "dflash": lambda: DFlash(new_drafter(num_target_layers=None)),
    "dspark": lambda: DFlash(new_dspark(DSPARK), confidence=0.3),
    "token map": lambda: TokenMap(draft(), torch.where(torch.arange(VOCAB) % 3 == 0, -1, torch.arange(VOCAB)), 5),
}


REQUESTS = [Request(prompt, NEW - 2 * row) for row, prompt in enumerate((*PROMPTS, [7], [8, 8]))]


@cache
def expected_of_requests() -> list[list[int]]:
    return [greedy_alone(shared(), request.input_ids, request.max_new_tokens) for request in REQUESTS]


# The other lookup, drafter and order of models of a kind that is quick.
SLOW = ("suffix lookup", "dspark", "over attention")


@pytest.mark.parametrize("kind", [slow(kind) if kind in SLOW else kind for kind in DRAFTS])
def test_drafts_schedules_and_requests(kind: str) -> None:
    """More requests than rows, prompts of one and two tokens among them; steps without drafts between others."""
    assert found(loop(DRAFTS[kind](), schedule=Pauses())) == expected()
    assert many(loop(DRAFTS[kind]()), REQUESTS, 2) == expected_of_requests()


def test_a_hybrid_drafts_for_attention() -> None:
    target = tiny("llama")
    assert found(loop(shared(), target)) == rows_of(target)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("make", [lambda model: model, lambda model: HierarchicalDraft(model, draft())])
def test_states_of_a_draft_are_never_lost(make: Callable[[Any], Any]) -> None:
    """The target as its own draft is never rejected, not even behind repeated steps and steps without drafts, between
    which a step is compiled."""
    for options in ({"schedule": Pauses()}, {"compile": True}, {"schedule": Pauses(), "compile": True}):
        output = loop(make(shared()), **options).generate(IDS, **CALL)
        assert new_tokens(output) == expected()
        assert output.stats.num_accepted == output.stats.num_proposed > 0


def test_a_cancelled_request_leaves_its_row() -> None:
    session = loop(draft()).session(batch_size=2, max_length=64)
    handles = [session.submit(Request(prompt, NEW)) for prompt in PROMPTS]
    completions = session.step()
    handles[0].cancel()
    while not all(handle.done for handle in handles):
        completions += session.step()
    texts = {each.index: each.new_tokens.tolist() for each in completions}
    assert [texts[row] for row in (1, 2, 3)] == expected()[1:]


def test_more_drafts_in_the_same_room() -> None:
    model = language_model(shared())
    for num_drafts, limit in ((2, NEW), (4, NEW - 2), (8, NEW - 6)):
        texts = found(loop(draft(), model, num_drafts), max_new_tokens=limit)
        assert texts == [row[:limit] for row in expected()]


def test_copied_decoders() -> None:
    decoder = loop(draft())
    assert found(decoder) == expected()
    for copied in (copy.deepcopy(decoder), pickle.loads(pickle.dumps(decoder))):
        assert found(copied) == expected()


@pytest.mark.parametrize(
    "named",
    [{"assistant_model": draft}, {"prompt_lookup_num_tokens": lambda: 3}, {"assistant_early_exit": lambda: 1}],
)
def test_drafts_by_the_names_of_transformers(named: dict[str, Callable[[], Any]]) -> None:
    """transformers itself refuses them for models that keep a state."""
    given = {name: make() for name, make in named.items()}
    call = CALL | {"do_sample": False, "schedule": "constant", "custom_generate": custom_generate}
    output = shared().generate(IDS, **call, **given, return_dict_in_generate=True)
    assert output.sequences[:, IDS.shape[1] :].tolist() == expected() and output.stats.num_proposed > 0
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        shared().generate(IDS, **CALL, **given)


def test_grammars_force_tokens() -> None:
    texts = [found(loop(each), grammar=[Allowing(by_turns) for _ in PROMPTS]) for each in (None, draft())]
    plain = [found(loop(None, num_drafts=1, compile=False), grammar=[Allowing(by_turns) for _ in PROMPTS])]
    for row, prompt in enumerate(PROMPTS):
        text = list(prompt)
        for _ in range(NEW):
            with torch.no_grad():
                logits = shared()(torch.tensor([text]), use_cache=False).logits[0, -1]
            allowed = by_turns(tuple(text[len(prompt) :]))
            text.append(allowed[int(logits[allowed].argmax())])
        assert all(each[row] == text[len(prompt) :] for each in (*texts, *plain))


def test_an_interrupt_in_a_forward_leaves_nothing() -> None:
    model = hybrid()
    decoder = loop(draft(), model)
    for place in (1, 4):
        handle = model.model.layers[1].register_forward_pre_hook(
            mock.Mock(side_effect=[*[None] * place, KeyboardInterrupt])
        )
        with pytest.raises(KeyboardInterrupt):
            found(decoder)
        handle.remove()
        assert found(decoder) == expected()


def test_states_of_another_kind_beside_texts_that_run() -> None:
    model = hybrid()
    session = loop(None, model).session(batch_size=2, max_length=64)
    session.submit(Request(PROMPTS[0], 30))
    session.step()
    model.model.layers[0] = hybrid(9, linear_num_value_heads=2).model.layers[0]
    session.submit(Request(PROMPTS[2], 10))
    with pytest.raises(RuntimeError, match=r"forward: what was read since start has .* states \[.*, and this forward"):
        session.step()


def test_beam_search_is_refused() -> None:
    for target, other in ((shared(), None), (tiny("llama"), shared())):
        with pytest.raises(ValueError, match="Qwen3_5ForCausalLM keeps a state of its text, and beam search"):
            beam_search(target, IDS, attention_mask=MASK, num_beams=2, max_new_tokens=4, draft=other)


def test_a_ring_without_memory_says_its_size() -> None:
    # The check of a new architecture needs memory too.
    model = language_model(hybrid())
    model.expect(3)
    model.start(2, 16)
    with mock.patch.object(Tensor, "new_zeros", side_effect=torch.OutOfMemoryError("no memory")):
        message = r"model: no memory for the states .*: \d+ MB for a layer, \[2, 4, .* torch.float"
        with torch.no_grad(), pytest.raises(RuntimeError, match=message):
            model.forward(torch.tensor([[5, 6], [7, 8]]), torch.arange(2).expand(2, -1))
