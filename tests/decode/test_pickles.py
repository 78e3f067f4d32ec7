"""What copies, pickles and other processes get of a decoder: what it was made of, and nothing of a call."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import tiny_dflash
import tiny_dspark
import tiny_eagle3
import torch
import transformers
from tiny_hybrids import tiny_hybrid
from tiny_images import FAMILIES, batch, images, prompts
from tiny_loops import DRAFTS, GREEDY, new_tokens
from tiny_models import PROMPTS, VOCAB, encoder_inputs, padded, perturbed, shared_tiny, sharp_model, tiny
from tiny_mtp import tiny_mtp
from tiny_requests import CALLS
from torch import Tensor, multiprocessing, nn

from torch_specops import Request, SpeculativeDecoder
from torch_specops.decode import GenerationStats
from torch_specops.drafts import (
    MTP,
    DFlash,
    Eagle3,
    EarlyExit,
    HierarchicalDraft,
    NGram,
    PEagle,
    PromptLookup,
    SuffixLookup,
    TokenMap,
)
from torch_specops.hf import TransformersModel

IDS, MASK = padded(PROMPTS, "left")
TEXT: dict[str, Any] = {"input_ids": IDS, "attention_mask": MASK, "max_new_tokens": 12}
OPTIONS: dict[str, Any] = {"num_draft_tokens": 3, "schedule": "constant", "sampling": GREEDY, "compile": False}


def llama(draft: Callable[[str], Any]) -> SpeculativeDecoder:
    return SpeculativeDecoder(tiny("llama"), draft("llama"), **OPTIONS)


def of_encoder(family: str, draft: Callable[[], Any]) -> SpeculativeDecoder:
    return SpeculativeDecoder(shared_tiny(family), draft(), **OPTIONS)


def mtp() -> SpeculativeDecoder:
    model = tiny_mtp("qwen3_next", 1).model
    return SpeculativeDecoder(model, MTP.from_pretrained(model), **OPTIONS)


def hybrid() -> SpeculativeDecoder:
    return SpeculativeDecoder(tiny_hybrid("qwen3_5_text"), perturbed(tiny_hybrid("qwen3_5_text")), **OPTIONS)


def rereading() -> SpeculativeDecoder:
    """It has a cache for short texts, and one for long texts."""
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 10_000.0}
    rope["original_max_position_embeddings"] = 12
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "pad_token_id": 0, "original_max_position_embeddings": 12}
    model = sharp_model(transformers.Phi3Config(**sizes, rope_parameters=rope, max_position_embeddings=96))
    return SpeculativeDecoder(model, PromptLookup(), **OPTIONS)


def of_images(family: str) -> SpeculativeDecoder:
    # Not a shared model: transformers keeps a tensor in a model that has decoded an image.
    model = sharp_model(FAMILIES[family].config(), auto=transformers.AutoModelForImageTextToText)
    return SpeculativeDecoder(model, EarlyExit(1), **OPTIONS)


def image_text(family: str) -> dict[str, Any]:
    given = batch(family, prompts(family))
    given = {name: given[name] for name in ("input_ids", "attention_mask")}
    return given | {"inputs": images(family, prompts(family)), "max_new_tokens": 4}


# Not the shared models: where a test has asked them for hidden states, transformers has hung hooks on them, which no
# pickle holds.
OVER_MODELS: dict[str, Callable[[str], Any]] = {
    "model": lambda family: perturbed(tiny(family)),
    "hierarchical": lambda family: HierarchicalDraft(perturbed(tiny(family))),
    "over a model": lambda family: HierarchicalDraft(perturbed(tiny(family)), tiny(family, seed=3)),
    "token map": lambda family: TokenMap(perturbed(tiny(family)), torch.arange(VOCAB)),
}
# A decoder with each kind of draft or adapter, and a call.
KINDS: dict[str, tuple[Callable[[], SpeculativeDecoder], dict[str, Any]]] = {
    **{name: (partial(llama, DRAFTS[name]), TEXT) for name in ("nothing", "prompt lookup", "n-gram", "early exit")},
    **{name: (partial(llama, draft), TEXT) for name, draft in OVER_MODELS.items()},
    "eagle 3": (partial(llama, lambda family: Eagle3(tiny_eagle3.new_head())), TEXT),
    "dflash": (partial(llama, lambda family: DFlash(tiny_dflash.new_head())), TEXT),
    "dflash 2": (partial(llama, lambda family: DFlash(tiny_dspark.new_head(tiny_dspark.DFLASH2))), TEXT),
    "p-eagle": (partial(llama, lambda family: PEagle(tiny_eagle3.new_head(mask_token_id=59), sampled=True)), TEXT),
    "dspark": (partial(llama, lambda family: DFlash(tiny_dspark.new_head(tiny_dspark.DSPARK), confidence=0.3)), TEXT),
    "suffix lookup": (partial(llama, lambda family: SuffixLookup(min_ngram=1)), TEXT),
    "mtp": (mtp, TEXT),
    "hybrid": (hybrid, TEXT),
    "rereading": (rereading, TEXT),
    **{
        f"{family}, {draft.__name__}": (
            partial(of_encoder, family, partial(draft, *arguments)),
            TEXT | {"inputs": encoder_inputs(family)},
        )
        for family in ("t5", "whisper")
        for draft, arguments in ((PromptLookup, ()), (EarlyExit, (1,)))
    },
    **{f"images, {family}": (partial(of_images, family), image_text(family)) for family in ("qwen2_5_vl", "qwen3_5")},
}


class Finder(pickle.Pickler):
    """Finds all tensors of what it pickles, and those that belong to modules, tables and maps of tokens."""

    def __init__(self, value: object) -> None:
        super().__init__(io.BytesIO())
        self.tensors: dict[int, Tensor] = {}
        self.settings: set[int] = set()
        self.dump(value)

    def reducer_override(self, value: Any) -> Any:
        owned: list[Any] = []
        if isinstance(value, Tensor):
            self.tensors[value.data_ptr()] = value
        elif isinstance(value, nn.Module):
            owned = [*value.parameters(), *value.buffers()]
        elif isinstance(value, (NGram, TokenMap)):
            owned = [each for each in vars(value).values() if isinstance(each, Tensor)]
        self.settings |= {each.data_ptr() for each in owned}
        return NotImplemented

    @property
    def others(self) -> list[torch.Size]:
        return [tensor.shape for key, tensor in self.tensors.items() if key not in self.settings]


@pytest.mark.parametrize("kind", KINDS)
def test_a_pickle_has_weights_and_settings_alone(kind: str) -> None:
    """torch shares the memory of tensors that it sends to other processes: these would all write to one cache."""
    make, text = KINDS[kind]
    decoder = make()
    unused = Finder(decoder)
    assert unused.others == [] and len(unused.tensors) > 0
    decoder.generate(**text)
    used = Finder(decoder)
    assert used.others == [] and used.tensors.keys() == unused.tensors.keys()


class Shifted(TransformersModel):
    """With settings that others have added, one of them in the constructor."""

    def __init__(self, model: transformers.PreTrainedModel, shift: int) -> None:
        super().__init__(model)
        self.shift = shift

    def forward(self, *arguments: Any) -> Tensor:
        return super().forward(*arguments).roll(self.shift, -1)


def test_copied_adapter_keeps_its_settings() -> None:
    adapter = Shifted(tiny("llama"), shift=3)
    adapter.note = "the user's"  # type: ignore[attr-defined]
    decoder = SpeculativeDecoder(adapter, **OPTIONS)
    expected = decoder.generate(**TEXT).sequences
    for copied in (copy.copy(adapter), copy.deepcopy(adapter), pickle.loads(pickle.dumps(adapter))):
        assert (copied.shift, copied.note) == (3, "the user's")
        assert torch.equal(SpeculativeDecoder(copied, **OPTIONS).generate(**TEXT).sequences, expected)


def test_a_copied_lookup_remembers_apart() -> None:
    lookup = SuffixLookup(memory=6)
    llama(lambda family: lookup).generate([[5, 6, 7]], max_new_tokens=2)
    kept = lookup._history.newest().tolist()
    copied = copy.copy(lookup)
    assert copied._history.newest().tolist() == kept and kept[:4] != [-1] * 4
    lookup.forget()
    assert copied._history.newest().tolist() == kept


def test_code_that_was_removed_is_not_pickled() -> None:
    model = tiny("llama")
    decoder = SpeculativeDecoder(model, **OPTIONS)
    hook = model.lm_head.register_forward_hook(lambda *call: None)
    model.model.norm.forward = lambda states, own=model.model.norm.forward: own(states)
    decoder.generate(**TEXT)
    hook.remove()
    del model.model.norm.forward
    assert pickle.loads(pickle.dumps(decoder)).generate(**TEXT).lengths.tolist() == [19, 13, 16]


@pytest.mark.parametrize("call", CALLS)
def test_decoders_are_copied_after_any_call(call: str) -> None:
    decoder = SpeculativeDecoder(tiny("llama"), tiny("llama", seed=3), sampling=GREEDY)
    expected = CALLS[call](decoder)
    open_session = decoder.session(2, max_length=16)
    open_session.submit(Request([1, 2], 9))
    open_session.step()
    for copied in (copy.deepcopy(decoder), pickle.loads(pickle.dumps(decoder))):
        assert copied.stats == GenerationStats(seeds=[])
        assert CALLS[call](copied) == expected and copied.stats.num_tokens == 18
    open_session.step()
    open_session.close()


SENT = ("nothing", "model", "hybrid", "eagle 3", "dflash", "suffix lookup")


def decode_all(decoders: list[SpeculativeDecoder], number: int, results: Any, barrier: Any) -> None:
    """The texts of a process. All begin a call at the same time."""
    torch.set_num_threads(1)
    texts = []
    for decoder in decoders:
        barrier.wait()
        texts.append([new_tokens(decoder.generate(**sent_text(number))) for _ in range(3)])
    results.put((number, texts))


def sent_text(number: int) -> dict[str, Any]:
    return {"input_ids": torch.where(MASK == 1, (IDS + 7 * number) % (VOCAB - 1), IDS), "attention_mask": MASK} | {
        "max_new_tokens": 24
    }


@pytest.mark.slow
def test_pickled_decoders_in_processes() -> None:
    """Three workers and their parent decode other texts of the same sizes at once."""
    decoders = [KINDS[kind][0]() for kind in SENT]
    expected = [[[new_tokens(each.generate(**sent_text(number)))] * 3 for each in decoders] for number in range(4)]
    context = multiprocessing.get_context("spawn")
    results, barrier = context.Queue(), context.Barrier(4)
    workers = [context.Process(target=decode_all, args=(decoders, n, results, barrier)) for n in (1, 2, 3)]
    for worker in workers:
        worker.start()
    decode_all(decoders, 0, results, barrier)
    found = dict(results.get(timeout=300) for _ in range(4))
    for worker in workers:
        worker.join(timeout=60)
        assert worker.exitcode == 0
    assert [found[number] for number in range(4)] == expected
