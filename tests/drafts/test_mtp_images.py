"""MTP layers after images rotate at the positions that the model gives its tokens in time, height and width."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_images import IMAGE, NEW, Prompt, alone, batch, expected, image_call, images, prompt, prompts, vision_model
from tiny_loops import GREEDY, Recording, new_tokens
from tiny_mtp import add_mtp_layer
from torch import Tensor
from transformers import AutoModelForImageTextToText, PreTrainedModel

from torch_specops import Request, SpeculativeDecoder
from torch_specops.drafts import MTP
from torch_specops.hf import custom_generate

FAMILY = "qwen3_5"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    """`vision_model` with an MTP layer beside it; no test changes it."""
    folder = tmp_path_factory.mktemp("model")
    vision_model(FAMILY).save_pretrained(folder)
    add_mtp_layer(folder, "model.language_model.")
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64).eval()
    model.generation_config.eos_token_id = None
    return model


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


def test_mtp_drafts_after_images(model: PreTrainedModel) -> None:
    """They equal a plain computation, for texts with two images and none, and for one in a row that is refilled."""
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


def test_mtp_with_images_gives_the_text_of_generate(model: PreTrainedModel) -> None:
    """The last prompt ends one token after an image: the two tokens that a draft leaves unread reach into it."""
    rows = [*prompts(FAMILY), prompt(FAMILY, 5, "1")]
    texts = [*expected(FAMILY), alone(vision_model(FAMILY), FAMILY, rows[-1])]
    decoder = SpeculativeDecoder(model, MTP.from_pretrained(model), sampling=GREEDY, num_draft_tokens=2)
    requests = [Request(list(row.tokens), NEW, inputs=images(FAMILY, [row]) or None) for row in rows]
    found = {each.index: each.new_tokens.tolist() for each in decoder.generate_many(requests, batch_size=2)}
    assert [found[index] for index in range(len(rows))] == texts
    output = decoder.generate(**image_call(FAMILY, rows))
    assert new_tokens(output) == texts and output.stats.num_proposed > 0
    target: Any = decoder.target
    for index, row in enumerate(rows):
        with torch.no_grad():
            states = model.model(**batch(FAMILY, [row])).last_hidden_state[0, :-1]
        torch.testing.assert_close(target.features[index, : len(states)], states)
    given = batch(FAMILY, rows, "right")
    options = {"do_sample": False, "max_new_tokens": NEW, "use_mtp": True, "custom_generate": custom_generate}
    assert model.generate(**given, **options)[:, given["input_ids"].shape[1] :].tolist() == texts
