"""What a language model has that reads images in the prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeGuard

from torch import Tensor

from .base import LanguageModel


class ImageModel(LanguageModel, Protocol):
    """A language model that reads images in the prompt. `start` and `replace_inputs` get the images of the prompts that
    come next, as `check_images` returns them; `read_images` reads these prompts."""

    @property
    def reads_images(self) -> bool:
        """True = this model does."""

    @property
    def undrafted(self) -> Sequence[int]:
        """The tokens that stand for images, which no lookup proposes."""

    def check_images(
        self, tokens: Tensor, lengths: Tensor, inputs: Mapping[str, Tensor] | None, attention_mask: Tensor | None
    ) -> Mapping[str, Tensor] | None:
        """The images of prompts [B, P] of `lengths` [B], in `inputs` as a caller gives them beside the `attention_mask`
        [B, P], None = no padding; None = there are none. Raises ValueError if they do not fit the prompts."""

    def replace_inputs(self, row: int, inputs: Mapping[str, Tensor]) -> None:
        """Take the images of the prompt that is read next in a row; {} = it has none."""

    def read_images(self, tokens: Tensor, rows: Sequence[int], num_unread: int) -> list[int]:
        """Read the prompts of `rows` in tokens [B, W] that images were taken for, but for at most the `num_unread`
        newest tokens, and free these images; returns their rows. Images in `start` belong to every prompt, whose
        sequences stand together. Raises ValueError if the model refuses the images."""


def reads_images(model: LanguageModel) -> TypeGuard[ImageModel]:
    return getattr(model, "reads_images", False)
