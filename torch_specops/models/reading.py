"""Prefills some rows of a batch and leaves the others unchanged."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..ops.tracing import normal_tensors
from .base import LanguageModel

# The fixed cost of a forward on a CPU (reading all weights), in tokens. SmolLM2 135M in float32: 23 with one thread, 36
# with two.
FORWARD_COST = 32
# Rows are packed if reading packed rows costs at most this share of reading padded rows. The rest of the cost pays for
# packing.
PACKED_COST = 0.9


def begin_texts(model: LanguageModel, lengths: Tensor, rows: Tensor | None = None) -> None:
    """Clear rows [A] of a model (None = all, which `start` has cleared), and pass it the lengths [A] of their new
    prompts."""
    with normal_tensors():
        if rows is not None:
            model.clear_rows(rows)
        model.begin_texts(lengths, rows)


def read_texts(model: LanguageModel, tokens: Tensor, lengths: Tensor, rows: Tensor, num_unread: int) -> None:
    """Clear `rows` [A] and prefill their new prompts, except the `num_unread` newest tokens. Other rows do not change.
    May wait for the device."""
    begin_texts(model, lengths[rows], rows)
    if model.reads_images:
        with_images = model.read_images(tokens, rows.tolist(), num_unread)
        rows = rows[[row not in with_images for row in rows.tolist()]]
        if len(rows) == 0:
            return
    counts = (lengths[rows] - num_unread).tolist()
    # A model with states must read the first token of a sequence outside a step.
    counts = [max(count, 1) for count in counts] if model.keeps_states else counts
    if not model.reads_rows:
        index = torch.arange(max(*counts, 1), device=tokens.device)
        # Read at least one token, because the first forward reads new inputs and compiled steps do not. Other rows read
        # their newest token, which their next step reads again in any case.
        positions = (lengths - 1).unsqueeze(1).repeat(1, len(index))
        positions[rows] = index
        model.forward(tokens.gather(1, positions), positions, 1)
        return
    _read(model, tokens, counts, rows.tolist(), FORWARD_COST if tokens.device.type == "cpu" else None)


def read_beginnings(
    model: LanguageModel, tokens: Tensor, lengths: Tensor, num_unread: int, prompt_lengths: Tensor | None = None
) -> None:
    """Prefill all rows, of `lengths` [B] with prompts of `prompt_lengths` [B] (None = everything), except the
    `num_unread` newest tokens. At least one token is read, to allocate a cache. Equal rows are read once if the model
    `reads_rows`. May wait for the device."""
    # A model with states reads the whole sequence as a prompt.
    prompt_lengths = lengths if prompt_lengths is None or model.keeps_states else prompt_lengths
    begin_texts(model, prompt_lengths)
    if model.read_images(tokens, range(len(tokens)), num_unread):
        return
    counts = [max(count, 1) for count in (lengths - num_unread).tolist()]
    rows = list(range(len(tokens)))
    if len(tokens) > 1 and model.reads_rows:
        first: dict[tuple[int, ...], int] = {}
        width = max(counts)
        texts = zip(lengths.tolist(), prompt_lengths.tolist(), *tokens[:, :width].t().tolist(), strict=True)
        sources = [first.setdefault(text, row) for row, text in enumerate(texts)]
        if len(first) < len(sources):
            rows = list(first.values())
            _read(model, tokens, [counts[row] for row in rows], rows, None)
            model.copy_rows(torch.tensor(sources, device=tokens.device), width)
            return
    _read(model, tokens, counts, rows, None)


def _read(model: LanguageModel, tokens: Tensor, counts: list[int], rows: list[int], forward_cost: int | None) -> None:
    """Read the first `counts` tokens of these rows. A shorter row is read beyond its end, and its next tokens overwrite
    those slots. A state would keep them, so a model with states reads rows of one length at a time."""
    index = torch.arange(max(*counts, 1), device=tokens.device)
    for group in groups_by_length(counts, 0 if model.keeps_states else forward_cost):
        width = counts[group[0]]
        if width < 1:
            continue
        if len(group) == len(tokens) and rows == list(range(len(tokens))):
            model.forward(tokens[:, :width], index[:width].expand(len(tokens), -1), 1)
        else:
            chosen = torch.tensor([rows[each] for each in group], device=tokens.device)
            model.forward(tokens[chosen, :width], index[:width].expand(len(group), -1), 1, chosen)


def groups_by_length(counts: Sequence[int], forward_cost: int | None) -> list[list[int]]:
    """Groups of sequences, of `counts` tokens each, to read in one forward, longest first. A sequence joins a group
    while the group's padding costs at most another forward, `forward_cost` tokens; None = all in one forward."""
    groups: list[list[int]] = []
    padding = 0
    for index in sorted(range(len(counts)), key=counts.__getitem__, reverse=True):
        if groups:
            padding += counts[groups[-1][0]] - counts[index]
        if groups and (forward_cost is None or padding <= forward_cost):
            groups[-1].append(index)
        else:
            groups.append([index])
            padding = 0
    return groups


def read_ragged(
    target: LanguageModel, tokens: Tensor, positions: Tensor, num_proposed: Tensor, finished: Tensor, is_filled: bool
) -> Tensor:
    """Logits [B, n, V] of each row's newest token and `num_proposed` [B] drafts, in tokens [B, n] at positions [B, n].
    Padding after the drafts and `finished` [B] rows may be skipped; their logits are then 0 if `is_filled`, otherwise
    undefined.

    For eager steps on a CPU, where the time of a forward grows with the number of tokens.
    """
    counts = [0 if ended else count + 1 for count, ended in zip(num_proposed.tolist(), finished.tolist(), strict=True)]
    active, width = [row for row, count in enumerate(counts) if count > 0], tokens.shape[1]
    # Gathering rows from the cache costs less than attention over the other rows if at most half of the rows are read.
    is_gathered = 0 < 2 * len(active) <= len(counts)
    num_padded = (len(active) if is_gathered else len(counts)) * width
    pays = sum(counts) > 0 and sum(counts) + FORWARD_COST <= PACKED_COST * (num_padded + FORWARD_COST)
    rows = torch.tensor(active, device=tokens.device) if is_gathered else None
    if rows is not None:
        tokens, positions = tokens[rows], positions[rows]
    where: Tensor | None = rows
    if pays and target.packs_rows:
        where = torch.arange(width, device=tokens.device) < torch.tensor(counts, device=tokens.device).unsqueeze(1)
        part = target.forward_packed(tokens, positions, where if rows is None else where[rows], rows)
    else:
        part = target.forward(tokens, positions, width, *(() if rows is None else (rows,)))
    if where is None:
        return part
    # Empty memory costs nothing until it is touched.
    logits = (part.new_zeros if is_filled else part.new_empty)(len(counts), width, part.shape[-1])
    logits[where] = part
    return logits
