"""MTP layers after images rotate at the positions that the model gives its tokens in time, height and width."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny_images import IMAGE, Prompt, batch, images, prompts, vision_model
from tiny_loops import GREEDY, Recording
from tiny_mtp import add_mtp_layer
from torch import Tensor
from transformers import AutoModelForImageTextToText

from torch_specops import Request, SpeculativeDecoder
from torch_specops.drafts import MTP

FAMILY = "qwen3_5"


class Recorder(Recording, MTP):
    pass


def positions_of(row: Prompt, count: int) -> Tensor:
    """[3, count], of a prompt and text after it: an image stands in one moment, and its tokens in a grid."""
    grids = [] if not row.images else images(FAMILY, [row])["image_grid_thw"].tolist()
    found: list[list[int]] = []
    following = 0
    while len(found) < count:
        if len(found) < len(row.tokens) and row.tokens[len(found)] == IMAGE:
            _, height, width = grids.pop(0)
            places = [(following, following + i, following + j) for i in range(height // 2) for j in range(width // 2)]
            found += [list(place) for place in places]
            following = max(max(place) for place in places) + 1
        else:
            found.append([following] * 3)
            following += 1
    return torch.tensor(found[:count]).T


@torch.no_grad()
def plain_logits(model: Any, row: Prompt, text: Tensor, drafts: Tensor) -> Tensor:
    """[K, V]: what K drafts after a text [N] were drawn from; the layer is the model's own second one."""
    given, decoder = batch(FAMILY, [row._replace(tokens=tuple(text.tolist()))]), model.model.language_model
    hidden = model.model(**given).last_hidden_state[:, :-1]
    scale = 1 + torch.ones(hidden.shape[-1], dtype=torch.float64)

    def norm(x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + decoder.config.rms_norm_eps).rsqrt() * scale

    tokens, logits = torch.cat([text, drafts])[None], []
    for _ in drafts:
        count = hidden.shape[1]
        read = norm(decoder.embed_tokens(tokens[:, 1 : 1 + count])) + norm(hidden)
        angles = decoder.rotary_emb(read, positions_of(row, count)[:, None])
        seen = torch.ones(count, count, dtype=torch.bool).tril()[None, None]
        output = norm(decoder.layers[1](read, position_embeddings=angles, attention_mask=seen))
        logits.append(model.lm_head(output[0, -1]))
        hidden = torch.cat([hidden, output[:, -1:]], 1)
    return torch.stack(logits).float()


def test_drafts_are_those_of_a_plain_computation(tmp_path: Path) -> None:
    """Of texts with two images and none, and one in a row that is filled again."""
    vision_model(FAMILY).save_pretrained(tmp_path)
    add_mtp_layer(tmp_path, "model.language_model.")
    model = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float64).eval()
    rows = prompts(FAMILY)[:3]
    draft = Recorder.from_pretrained(model)
    options: dict[str, Any] = {"sampling": GREEDY, "num_draft_tokens": 2, "schedule": "constant", "compile": False}
    decoder = SpeculativeDecoder(model, draft, **options)
    requests = [Request(list(row.tokens), 6, inputs=images(FAMILY, [row]) or None, eos_token_id=()) for row in rows]
    list(decoder.generate_many(requests, batch_size=2))
    checked = dict.fromkeys(rows, 0)
    for tokens, lengths, proposed in draft.seen:
        for index, length in enumerate(lengths.tolist()):
            text = tokens[index, :length]
            (row,) = [each for each in rows if tuple(text[: len(each.tokens)].tolist()) == each.tokens]
            if length < len(row.tokens) + 6:
                expected = plain_logits(model, row, text, proposed.tokens[index])
                assert proposed.logits is not None
                # The states of hybrids are float32 inside transformers.
                torch.testing.assert_close(proposed.logits[index], expected, rtol=1e-3, atol=1e-3)
                checked[row] += 1
    assert min(checked.values()) >= 2
