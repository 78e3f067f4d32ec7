"""What the Wagner tables rest on: the closed form of what `verify_sigmoid` emits, and the methods measured in turns."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tiny_models import VOCAB, perturbed, tiny
from torch import Tensor
from transformers import GenerationMixin

import torch_specops
from torch_specops.laws import chi_square

PAPERS = Path(__file__).parents[1] / "benchmarks" / "papers"
V, TRIALS = 5, 20_000
GENERATOR = torch.Generator().manual_seed(3)
Z_P, Z_Q = torch.randn(2, 1, V, generator=GENERATOR).double() * 3


@pytest.fixture
def laws(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(PAPERS)
    return importlib.import_module("wagner_laws")


def drawn(scale: float | None, lenience: float = 1.0) -> tuple[Tensor, float]:
    """How often each token was emitted first, and how many drafts were accepted."""
    generator = torch.Generator().manual_seed(9)
    drafts = torch.multinomial(Z_Q.softmax(-1)[0], TRIALS, replacement=True, generator=generator).unsqueeze(1)
    rows = Z_P.float().expand(TRIALS, 2, V), drafts, Z_Q.float().expand(TRIALS, 1, V)
    uniforms = torch.rand(TRIALS, 1, generator=generator), torch.rand(TRIALS, generator=generator)
    if scale is None:
        output, n = torch_specops.verify_exact(*rows, *uniforms, lenience=lenience)
    else:
        output, n = torch_specops.verify_sigmoid(*rows, *uniforms, -scale, scale)
    return torch.bincount(output[:, 0], minlength=V), float(n.double().mean())


@pytest.mark.parametrize("scale", [0.5, 10.0, 1e3])
def test_the_law_of_sigmoid_scores_is_that_of_the_op(laws: ModuleType, scale: float) -> None:
    scores = (laws.score(z, -scale, 2 * scale) for z in (Z_P, Z_Q))
    law, accepted = laws.emitted_law(Z_Q.softmax(-1), *scores)
    counts, found = drawn(scale)
    assert chi_square(counts, law[0]) > 1e-3
    assert chi_square(counts, Z_P.softmax(-1)[0]) < 1e-9
    assert abs(found - float(accepted)) < 4 * (0.25 / TRIALS) ** 0.5


@pytest.mark.parametrize("lenience", [0.5, 0.1])
def test_the_law_of_lenience_is_that_of_the_op(laws: ModuleType, lenience: float) -> None:
    law, accepted = laws.lenient_law(Z_P.softmax(-1), Z_Q.softmax(-1), lenience)
    counts, found = drawn(None, lenience)
    assert chi_square(counts, law[0]) > 1e-3
    assert chi_square(counts, Z_P.softmax(-1)[0]) < 1e-9
    assert abs(found - float(accepted)) < 4 * (0.25 / TRIALS) ** 0.5


def test_distances_of_what_is_known(laws: ModuleType) -> None:
    """Softmax has the target's law; at a huge scale the draft's is left; masked tokens are never emitted."""
    generator = torch.Generator().manual_seed(4)
    z_p, z_q = torch.randn(2, 40, 30, generator=generator).double() * 2
    found = laws.distances(laws.filtered(z_p, 0), laws.filtered(z_q, 0))
    apart = float(laws.total_variation(z_p.softmax(-1), z_q.softmax(-1)).mean())
    assert found["softmax"]["distance"] < 1e-12 and abs(found["softmax"]["accepted"] - 1 + apart) < 1e-6
    assert abs(found["sigmoid, +-100000"]["distance"] - apart) < 1e-4
    assert found["sigmoid, offset own lse + 10"]["distance"] < 1e-4 < found["sigmoid, offset own lse + 0"]["distance"]
    assert abs(found["the draft alone"]["distance"] - apart) < 1e-6
    best = laws.best_constants(z_p, z_q)
    assert best["distance"] < 1.05 * best["distance_of_draft"]

    few_p, few_q = laws.filtered(z_p, 5), laws.filtered(z_q, 5)
    assert (few_p.isfinite().sum(-1) == 5).all()
    for name, target_scores, draft_scores in laws.score_pairs(few_p, few_q):
        law, accepted = laws.emitted_law(few_q.softmax(-1), target_scores, draft_scores)
        assert torch.equal(law > 0, (law > 0) & few_p.isfinite()), name
        torch.testing.assert_close(law.sum(-1), torch.ones(40).double())
        assert ((accepted >= 0) & (accepted <= 1 + 1e-12)).all()


def test_an_encoder_decoder_draft_needs_a_mask_of_its_prompt() -> None:
    """What wagner_asr.py passes, and why: without it, transformers hands the draft its whole text again in every step,
    behind what its cache holds already. A version that does not fails here, and the trap can be struck out."""
    target = tiny("whisper")
    draft = perturbed(target)
    draft.generation_config.num_assistant_tokens = 3
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    prompt = torch.tensor([[1, 17, 5]])
    features = torch.randn(1, 8, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def most_read(**mask: Tensor) -> tuple[int, int]:
        """The longest text that the draft had before it, and the length of the text."""
        lengths = []

        def remember(_: object, __: tuple[()], named: dict[str, Any]) -> None:
            lengths.append(named["decoder_input_ids"].shape[1] + named["past_key_values"].get_seq_length())

        handle = draft.register_forward_pre_hook(remember, with_kwargs=True)
        torch.manual_seed(0)
        # Whisper's own `generate` is for audio of 30 seconds.
        output = GenerationMixin.generate(
            target,
            input_features=features,
            decoder_input_ids=prompt,
            assistant_model=draft,
            do_sample=True,
            max_new_tokens=10,
            **mask,
        )
        handle.remove()
        return max(lengths), output.shape[1]

    read, length = most_read(decoder_attention_mask=torch.ones_like(prompt))
    assert read < length
    read, length = most_read()
    assert read > length


def test_the_methods_take_turns_on_the_same_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(PAPERS)
    methods = importlib.import_module("wagner_methods")
    target = tiny("llama")
    draft = perturbed(target, 0.1)
    draft.generation_config.num_assistant_tokens = 3
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    prompts = torch.tensor([[1, 17, 5], [1, 8, 9]])

    def decode(text: int, seed: int) -> list[int]:
        ids = prompts[text : text + 1]
        torch.manual_seed(seed)
        output = target.generate(
            ids, attention_mask=torch.ones_like(ids), assistant_model=draft, do_sample=True, max_new_tokens=12
        )
        return output[0, 3:].tolist()

    chosen = methods.EAGER | {"sigmoid 10": {"method": "sigmoid", "alpha": -10.0, "beta": 10.0}}
    found = methods.measure(chosen, decode, 2, range(3), VOCAB, "cpu")
    assert list(found) == list(chosen)
    baseline, exact = found[methods.BASELINE], found[methods.EXACT]
    assert baseline["outputs"] == [decode(text, seed) for text in range(2) for seed in range(3)]
    assert exact["outputs"] == baseline["outputs"] and exact["identical"] == baseline["identical"] == 6
    assert found[methods.UNIFORM]["identical"] < 6 and found[methods.SIGMOID]["identical"] < 6
    for own in found.values():
        assert own["new_tokens"] == 72 and 0 < own["accepted"] <= own["drafted"] and own["steps"] >= 12
        assert own["seconds"] == pytest.approx(own["steps"] * own["step_ms"] / 1e3)
        assert 0 < own["seconds"] < own["wall_seconds"]
    for name in ("steps", "accepted", "drafted"):
        assert exact[name] == baseline[name]
    kept = methods.without_outputs(found)
    assert all("outputs" not in own and own["steps"] > 0 for own in kept.values())
    assert methods.reduction(0.25, 1.0) == "75.0%" and methods.reduction(1.5, 1.0) == "-50.0%"
    rows = [("tiny", {name: own | {"quality": 0.5} for name, own in kept.items()})]
    assert methods.steps_table("title", "WER", iter(rows)).row_count == len(chosen)
