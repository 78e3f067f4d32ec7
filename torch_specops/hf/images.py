"""Image-text models: the model's own forward reads the prompt, and all later tokens are text."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..models.base import RowState, placed
from .cache import RaggedCache
from .hybrid import HybridModel
from .models import TransformersModel

# The tests compare these models with transformers' decoding. Other models are compared when they first get an image.
TESTED_MODELS = {"gemma3", "idefics3", "llava", "qwen2_5_vl", "qwen3_5", "qwen3_vl", "smolvlm"}
# The names of image arguments in forwards, and of the type ids that mark image tokens.
IMAGES = (
    *("pixel_values", "pixel_attention_mask", "image_grid_thw", "image_sizes", "image_position_ids"),
    *("spatial_shapes", "batch_num_images"),
)
TYPE_IDS = ("token_type_ids", "mm_token_type_ids")


def image_inputs(model: PreTrainedModel) -> list[str]:
    """The names of the images and type ids that a model's forward takes."""
    parameters = inspect.signature(type(model).forward).parameters
    return [name for name in (*IMAGES, *TYPE_IDS) if name in parameters]


def reads_images(model: PreTrainedModel) -> bool:
    has_placeholder = isinstance(getattr(model.config, "image_token_id", None), int)
    return has_placeholder and "pixel_values" in image_inputs(model)


def mrope_of(model: PreTrainedModel) -> nn.Module | None:
    """The rotary embedding of a model's decoder, if it uses positions in time, height and width (mRoPE); else None."""
    rotary = getattr(model.get_decoder(), "rotary_emb", None)
    return rotary if hasattr(rotary, "mrope_section") else None


@contextmanager
def _heard(rotary: nn.Module | None, hear: Callable[[Tensor], object]) -> Iterator[None]:
    """Inside the block, `hear` gets the positions [3, A, n] of each call of a copied rotary embedding."""
    if rotary is None:
        yield
        return
    # The copy may share its dict of hooks with the user's model, so give the copy a new dict.
    hooks = rotary._forward_pre_hooks
    rotary._forward_pre_hooks = OrderedDict(hooks, **{"torch_specops.positions": lambda _, given: hear(given[1])})
    try:
        yield
    finally:
        rotary._forward_pre_hooks = hooks


class PositionOffsets(RowState):
    """Positions in time, height and width minus the slot.

    Attributes:
        values: [3, B, capacity] int64, at one address for all batches of the same size.
    """

    values: Tensor

    def start(self, batch: int, capacity: int, like: Tensor) -> None:
        zeros = like.new_zeros(3, batch, capacity, dtype=torch.int64)
        self.values = placed(getattr(self, "values", None), zeros)

    def clear_rows(self, rows: Tensor) -> None:
        self.values.index_fill_(1, rows, 0)

    def copy_rows(self, sources: Tensor, width: int) -> None:
        self.values.copy_(self.values[:, sources])

    def static_tensors(self) -> list[Tensor]:
        return [self.values]


class ImageTextModel(TransformersModel):
    """A causal transformers model that reads images at the positions of a prompt token, the placeholder.

    The model's own forward reads all prompts with images at once, padded on the right, and computes their masks and
    positions. An image may take fewer positions than it has tokens, and its tokens have positions in time, height and
    width (mRoPE); `offsets_at` returns their offsets. A placeholder after the prompt is an ordinary token.

    Attributes:
        undrafted: the placeholder, which lookups do not propose.
    """

    reads_images = True

    # Unread images, each with the rows whose prompts contain them.
    _images: list[tuple[Sequence[int], Mapping[str, Tensor]]]
    _num_copies = 1
    # The offsets of positions from slots; None = positions equal slots.
    _offsets: PositionOffsets | None = None
    _of_calls: ClassVar[Sequence[str]] = ("_images", "_num_copies", "_offsets")

    def _understand(self) -> None:
        super()._understand()
        self._placeholder: int = self.model.config.image_token_id
        self._names = image_inputs(self.model)
        self._image_names = [name for name in self._names if name in IMAGES]
        self._is_compared = self.model.config.model_type in TESTED_MODELS

    @property
    def undrafted(self) -> tuple[int, ...]:  # type: ignore[override]
        return (self._placeholder,)

    def check_images(
        self, tokens: Tensor, lengths: Tensor, inputs: Mapping[str, Tensor] | None, attention_mask: Tensor | None
    ) -> dict[str, Tensor] | None:
        """The images of prompts [B, P] of `lengths` [B], with the mask of the prompts [B, P]; None = no images.

        Args:
            inputs: as a processor returns them. Type ids are optional, and aligned with `attention_mask` [B, P].

        Raises:
            TypeError, ValueError: an input that the model does not take or that is not a tensor; placeholders without
                images, or images without placeholders; type ids that do not mark the placeholders; a prompt that ends
                with a placeholder.
        """
        images, inside = dict(inputs or {}), torch.arange(tokens.shape[1], device="cpu") < lengths.unsqueeze(1)
        is_image = (tokens == self._placeholder) & inside
        self._check_names(images)
        for name, value in (inputs or {}).items():
            if not isinstance(value, Tensor):
                raise TypeError(f"inputs: expected {name} as a tensor, got {type(value)}")
            if name in TYPE_IDS:
                types, mask = images.pop(name).cpu(), inside if attention_mask is None else attention_mask.bool().cpu()
                if types.shape != mask.shape or not torch.equal(types[mask].long(), is_image[inside].long()):
                    raise ValueError(
                        f"inputs: expected {name} {list(mask.shape)}, 1 for the placeholders of images (token "
                        f"{self._placeholder}) and 0 for other tokens, got others"
                    )
        if not images and not bool(is_image.any()):
            return None
        if "pixel_values" not in images:
            raise ValueError(
                f"inputs: expected {', '.join(self._image_names)} for the placeholders of images (token "
                f"{self._placeholder}) in input_ids, got {', '.join(images) or 'none'}"
            )
        if not bool(is_image.any()):
            raise ValueError(f"input_ids: expected placeholders (token {self._placeholder}) for the images, got none")
        if bool((tokens.gather(1, lengths.unsqueeze(1) - 1) == self._placeholder).any()):
            raise ValueError(
                f"input_ids: expected text behind the last image, got a prompt that ends with token {self._placeholder}"
            )
        return images | {"attention_mask": inside}

    def start(self, batch: int, capacity: int, inputs: Mapping[str, Tensor] | None = None) -> None:
        self._offsets = None if self._position_module() is None else self._offsets or PositionOffsets()
        super().start(batch, capacity)
        self._images, self._num_copies = [], 1
        if inputs:
            self._num_copies = batch // len(inputs["attention_mask"])
            self._take(range(0, batch, self._num_copies), inputs)

    def replace_inputs(self, row: int, inputs: Mapping[str, Tensor]) -> None:
        self._images = [(rows, images) for rows, images in self._images if row not in rows]
        if inputs:
            self._take([row], inputs)

    def _take(self, rows: Sequence[int], inputs: Mapping[str, Tensor]) -> None:
        self._check_names(inputs.keys() - {"attention_mask"})
        # A draft that is too small for the prompt reads no images, only the tokens that fit.
        if inputs["attention_mask"].shape[1] <= self._require_cache().capacity:
            self._images.append((rows, inputs))

    def _check_names(self, names: Iterable[str]) -> None:
        others = sorted(set(names) - set(self._names))
        if others:
            raise ValueError(
                f"inputs: {type(self.model).__name__} gets images alone here, as {', '.join(self._image_names)}; "
                f"got {', '.join(others)}"
            )

    def read_images(self, tokens: Tensor, rows: Sequence[int], num_unread: int) -> list[int]:
        """`LanguageModel.read_images`. Also raises ValueError for a model whose steps after images do not give the
        logits of its own forward."""
        given = [each for each in self._images if set(each[0]) <= set(rows)]
        self._images = [each for each in self._images if not set(each[0]) <= set(rows)]
        for own_rows, images in given:
            index, mask = torch.tensor(own_rows, device=self.device), images["attention_mask"].to(self.device)
            images = {name: value.to(self.device) for name, value in images.items() if name in IMAGES}
            own = tokens[index, : mask.shape[1]]
            self._read_prompts(own, mask, images, index, num_unread)
            if not self._is_compared:
                self._compare(own, mask, images, index, num_unread)
        copies, self._num_copies = self._num_copies, 1
        if not given or copies == 1:
            return [row for own_rows, _ in given for row in own_rows]
        self.copy_rows(torch.arange(len(tokens), device=tokens.device) // copies * copies, mask.shape[1])
        return list(range(len(tokens)))

    def _read_prompts(
        self, tokens: Tensor, mask: Tensor, images: Mapping[str, Tensor], rows: Tensor, num_unread: int
    ) -> None:
        """Read the whole prompts [A, P] of rows [A], because an image must not be split."""
        cache, slots = self._require_cache(), torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
        written = cache.writing_at(slots, mask.shape[1], rows if len(rows) < cache.batch else None)
        with written, self.reading_at(self._lengths_at(slots)):
            _, positions, deltas = self._own_forward(tokens, mask, images, cache)
        if self._offsets is not None:
            later = torch.zeros_like(rows).unsqueeze(1) if deltas is None else deltas
            self._offsets.values[:, rows] = later
            if positions is not None:
                self._offsets.values[:, rows, : mask.shape[1]] = torch.where(mask, positions - slots, later)

    def _own_forward(
        self, tokens: Tensor, mask: Tensor, images: Mapping[str, Tensor], cache: RaggedCache | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Run the model's own forward. Returns its logits (with a cache, only the last token's), the positions
        [3, A, P] that it gave the tokens in time, height and width, and the shift of later positions, [A, 1]."""
        types = ((tokens == self._placeholder) & mask).long()
        arguments = {"input_ids": tokens, "attention_mask": mask.long(), self._cache_argument: cache, **images}
        arguments |= {name: types for name in self._names if name in TYPE_IDS}
        module, given = self._position_module(), list[Tensor]()
        if module is not None:
            vars(module)["rope_deltas"] = None
        try:
            kept = self._logits_to_keep(tokens.shape[1], None if cache is None else 1)
            with _heard(mrope_of(self.prepared), given.append):
                output = self.prepared(**arguments, use_cache=cache is not None, logits_to_keep=kept)
        except torch.OutOfMemoryError:
            raise
        except (AttributeError, IndexError, RuntimeError, StopIteration, TypeError, ValueError) as error:
            raise ValueError(f"inputs: {type(self.model).__name__} cannot read these images: {error}") from error
        deltas = None if module is None else vars(module)["rope_deltas"]
        positions = given[0] if given and len(given[0]) == 3 else None
        return output.logits, positions, deltas

    def _compare(
        self, tokens: Tensor, mask: Tensor, images: Mapping[str, Tensor], rows: Tensor, num_unread: int
    ) -> None:
        """Compare a step's logits of the prompts' last tokens with those of a forward without a cache."""
        last = mask.sum(1, keepdim=True) - 1
        logits, _, _ = self._own_forward(tokens, mask, images, None)
        expected = logits[torch.arange(len(rows), device=rows.device), last.squeeze(1)].float()
        index = torch.arange(tokens.shape[1], device=tokens.device)
        behind = ((tokens == self._placeholder) & mask).mul(index + 1).amax(1, keepdim=True)
        # Read the last `num_unread` tokens as the next step will, but none before the end of the last image.
        positions = torch.maximum(last + torch.arange(1 - num_unread, 1, device=tokens.device), behind)
        found = self.forward(tokens.gather(1, positions), positions, 1, rows)[:, 0]
        difference = float((found - expected).abs().amax())
        if not difference <= self.rounding_of(expected):
            raise ValueError(
                f"model: {type(self.model).__name__} does not read text behind images right: its logits differ by "
                f"{difference:.1e} from its own; decode with transformers alone"
            )
        self._is_compared = True

    def _position_module(self) -> nn.Module | None:
        """The copied module that keeps the shift of positions after images; None = there is none."""
        return next((each for each in self.prepared.modules() if "rope_deltas" in vars(each)), None)

    def _position_ids(self, positions: Tensor) -> Tensor:
        if self._offsets is None:
            return positions
        # Only text is read here, and its positions are the same on all axes.
        return positions + self.offsets_at(positions, self._require_cache())[0]

    def offsets_at(self, slots: Tensor, cache: RaggedCache) -> Tensor:
        """Positions in time, height and width minus the slot, [3, A, n] int64, at slots [A, n] of the sequences that
        the cache writes."""
        if self._offsets is None:
            return slots.new_zeros(3, *slots.shape)
        return self._offsets.values[:, cache.owners, slots]

    def _row_states(self) -> list[RowState]:
        return [*super()._row_states(), *([] if self._offsets is None else [self._offsets])]


class HybridImageModel(ImageTextModel, HybridModel):
    """An image-text model in which some layers keep a state (Qwen3.5). The model reads each prompt alone, because no
    token after a prompt may be read together with the prompt."""

    def _read_prompts(
        self, tokens: Tensor, mask: Tensor, images: Mapping[str, Tensor], rows: Tensor, num_unread: int
    ) -> None:
        counts = (tokens == self._placeholder).logical_and(mask).sum(1).tolist()
        for index, (length, own) in enumerate(zip(mask.sum(1).tolist(), self._split(images, counts), strict=True)):
            begin, row = max(length - num_unread, 1), rows[index : index + 1]
            # Read the last image to its end. A draft goes on from `begin`, so copy the states after the image to there.
            end = begin + int((tokens[index, begin:length] == self._placeholder).sum())
            with self._require_cache().beginning(row):
                prompt = tokens[index : index + 1, :end], mask[index : index + 1, :end]
                super()._read_prompts(*prompt, own, row, num_unread)
            self._require_cache().repeat_states(row, end, begin)

    def _split(self, images: Mapping[str, Tensor], counts: Sequence[int]) -> Sequence[Mapping[str, Tensor]]:
        """Split images by prompt, given the number of placeholders in each prompt."""
        if len(counts) == 1:
            return [images]
        grids = images.get("image_grid_thw")
        if grids is None:
            raise ValueError(
                f"inputs: {type(self.model).__name__} keeps a state of its text, and which images a prompt has is not "
                "known without image_grid_thw; expected a batch of one"
            )
        patches = grids.prod(1)
        # The numbers of placeholders, then of patches, up to the end of each image.
        placeholders = (patches // self.model.config.vision_config.spatial_merge_size**2).cumsum(0).tolist()
        ends, split, first, total = [0, *patches.cumsum(0).tolist()], [], 0, 0
        for count in counts:
            total += count
            last = sum(each <= total for each in placeholders)
            own = {
                "image_grid_thw": grids[first:last],
                "pixel_values": images["pixel_values"][ends[first] : ends[last]],
            }
            split.append(own if last > first else {})
            first = last
        if total != (placeholders or [0])[-1]:
            raise ValueError(
                f"inputs: expected images for {total} placeholders in input_ids, got some for {placeholders[-1]}"
            )
        return split
