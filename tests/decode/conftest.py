"""Fixtures of the decoding loop's tests."""

from __future__ import annotations

from functools import partial
from importlib.resources import files
from typing import Any

import pytest
from tiny_loops import Late
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from torch_specops import compilation
from torch_specops.compilation import compile_piece
from torch_specops.decode import batch


@pytest.fixture(params=[False, True], ids=["at once", "late"])
def late(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the host reads each step one step late, as on CUDA."""
    if request.param:
        monkeypatch.setattr(batch, "RecordReader", Late)
    return request.param


@pytest.fixture
def without_inductor(fresh_dynamo: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces are traced, and then run as they are."""
    monkeypatch.setattr(compilation, "compile_piece", partial(compile_piece, backend="eager"))


@pytest.fixture(scope="session")
def austen() -> tuple[PreTrainedModel, PreTrainedModel, Any]:
    """A target, a draft and their tokenizer. A token is a byte, so every string spans several. Byte 0 never comes."""
    folder = files("torch_specops") / "data" / "austen_bytes"
    target, draft = (AutoModelForCausalLM.from_pretrained(folder / name) for name in ("target", "draft"))
    target.generation_config.eos_token_id = target.generation_config.pad_token_id = 0
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    tokenizer.pad_token, tokenizer.padding_side = tokenizer.convert_ids_to_tokens(0), "left"
    return target, draft, tokenizer
