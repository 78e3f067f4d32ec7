"""A trainer's forward with the bits of the loop's logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .adapter import language_model
from .invariant import check_bits, refuse_autocast

# Arguments that would place tokens elsewhere than at their slots, or read a cache that holds them elsewhere.
REFUSED = ("past_key_values", "position_ids", "cache_position", "inputs_embeds", "labels")


class InvariantForward:
    """`torch_specops.invariant_forward`."""

    def __init__(self, model: nn.Module) -> None:
        self._adapter = language_model(model, invariant=True)

    def __call__(self, input_ids: Tensor, attention_mask: Tensor | None = None, **arguments: Any) -> Any:
        refuse_autocast()
        for name in REFUSED:
            if arguments.get(name) is not None:
                raise ValueError(f"{name}: expected None, because a token's place in its text decides its bits")
        if attention_mask is not None and attention_mask.dim() != 2:
            raise ValueError(f"attention_mask: expected [B, P], got {list(attention_mask.shape)}")
        self._adapter.look()
        check_bits(self._adapter)
        arguments["use_cache"] = False
        if attention_mask is None:
            return self._adapter.prepared(input_ids=input_ids, **arguments)
        # Move texts to slot 0. The places of left padding get the logits of the padding that is then after the text.
        is_padding = attention_mask == 0
        order = is_padding.long().argsort(stable=True)
        if torch.equal(order, torch.arange(order.shape[1], device=order.device).expand_as(order)):
            return self._adapter.prepared(input_ids=input_ids, attention_mask=attention_mask, **arguments)
        keep = arguments.pop("logits_to_keep", 0)
        if not isinstance(keep, int):
            raise ValueError(f"logits_to_keep: expected an int with padding on the left, got {type(keep).__name__}")
        places = order.argsort(1)[:, -keep:]
        # The places to keep may begin earlier in a text that was moved.
        first = int(places.min())
        moved = {"input_ids": input_ids.gather(1, order), "attention_mask": attention_mask.gather(1, order)}
        output = self._adapter.prepared(**moved, **arguments, logits_to_keep=order.shape[1] - first)
        rows = torch.arange(len(order), device=order.device).unsqueeze(1)
        output.logits = output.logits[rows, places - first]
        return output
