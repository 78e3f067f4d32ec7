"""The two interfaces of the package: `DraftSource`, which proposes tokens, and `LanguageModel`, which gives logits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from ..ops.tracing import is_eager_cpu
from ..sampling import SamplingTensors


@dataclass(frozen=True)
class Draft:
    """K proposed tokens per sequence, and the distribution they were drawn from.

    Args:
        tokens: [B, K] int64 or int32; -1 is padding, and drafts after the first padding are not verified. Where the
            padding of sampled drafts begins may depend on the text, and for draft j on the drafts before it and on its
            distribution q_j, but never on which token was drawn from q_j: that would change the law.
        logits: [B, K, V], the logits that the tokens were sampled from, after processors, before temperature and
            filters; None = the draft is deterministic (q is one-hot), or shares the target's noise.
        lse: [B, K] float32, the logsumexp that `sample` returned with each token; None where `logits` is None.
        matches: [B] int64, for drafts that were looked up: how many tokens at the end of each text also stand before
            the place where they were found; None = not known. `Auto` learns from it.
    """

    tokens: Tensor
    logits: Tensor | None = None
    lse: Tensor | None = None
    matches: Tensor | None = None


def stacked(drawn: Sequence[Sequence[Tensor | None]]) -> Draft:
    """K results of `SamplingTensors.draw` as a `Draft`."""
    parts = zip(*drawn, strict=True)
    return Draft(*(None if part[0] is None else torch.stack(part, 1) for part in parts))  # type: ignore[arg-type]


class DraftSource(ABC):
    """Where draft tokens come from. To write your own, derive from this class and write `propose`.

    In every method, `tokens` [B, W] int64 holds the sequences from index 0 on, and `lengths` [B] int64, 1..W, says
    where they end; ignore entries at or after a row's length. All methods but `propose` run eagerly.

    `propose` becomes part of a compiled step: it must be traceable by torch.compile and must not wait for the device.
    The loop checks what a `propose` of yours returns. It gets a copy of the text. Writing into it, and a token outside
    the vocabulary, are errors in an eager step on a CPU, and have no effect elsewhere. `propose` and `catch_up` may run
    in inference mode, where nothing should be made that a later call writes; the other methods run outside of it.

    Attributes:
        deterministic: True = proposals are a function of the text, and `Draft.logits` is None.
        looks_up: True = the source is deterministic and proposes in a small part of a step's time. An eager step on a
            CPU then asks for K drafts, and the schedule chooses how many of those that were found to verify.
        vocab_size: the number of tokens that the source can propose; None = any of the target's.
        device: where its tensors live; None = wherever the tokens are.
        max_length: the longest sequence it can read; None = no limit known. A longer row gets no drafts any more: in
            every method but `on_finished`, its length is then 1.
        default_draft_tokens: K where the caller names none; None = 5.
        max_draft_tokens: the largest K that it can be asked for; None = any.
        compiles_itself: True = `propose` compiles its own pieces, for the shapes that `compile` names; False = a
            compiled loop compiles `propose` as a whole.
        feature_layers: the layers of the target whose inputs the source reads in `FeatureModel.features`, counted
            from 0; the number of layers stands for what the head reads, after the last norm. () = none, and then the
            target keeps none.
        is_checked: True = the loop checks proposals. Set for each class: True for a `propose` outside this package.
    """

    deterministic: bool = True
    looks_up: bool = False
    vocab_size: int | None = None
    device: torch.device | None = None
    max_length: int | None = None
    default_draft_tokens: int | None = None
    max_draft_tokens: int | None = None
    compiles_itself: bool = False
    feature_layers: Sequence[int] = ()
    is_checked: bool = True

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.is_checked = not cls.propose.__module__.startswith("torch_specops.")

    def bind(self, target: LanguageModel) -> None:
        """Called when the source becomes the draft of a target, and before every `start`, because another decoder may
        have bound it in between."""

    def expect(self, num_draft_tokens: int) -> None:
        """Called before `start`: no step of the batch has more drafts than these."""

    def start(self, tokens: Tensor, lengths: Tensor, capacity: int, inputs: Mapping[str, Tensor] | None = None) -> None:
        """Read the prompts, before the first step of a batch. May wait for the device.

        Args:
            capacity: the most tokens that a sequence may ever have, drafts included.
            inputs: what the target reads besides the tokens, by name.
        """

    def compile(self, shape: Hashable | None) -> None:
        """Called before `start` if `compiles_itself` is True. `shape` is equal for batches that can use the same
        compiled graphs; None = the batch is decoded eagerly."""

    def catch_up(self, tokens: Tensor, lengths: Tensor, num_steps: int) -> None:
        """Called before `propose` if the last `num_steps` steps had no drafts: each of them gave every unfinished row
        one token. Must not wait for the device."""

    def restart(self, tokens: Tensor, lengths: Tensor, rows: Tensor) -> None:
        """The rows `rows` [A] int64 have new prompts: forget what was read of these rows, and read the prompts. Called
        between two steps of a session, also for the first prompts: `start` then gets rows of one meaningless token. May
        wait for the device.

        A source with a `start` of its own needs a `restart` for sessions and `generate_many`.
        """

    def replace_inputs(self, row: int, inputs: Mapping[str, Tensor]) -> None:
        """Called before `restart` with the target's new inputs of this row, as in `start` with a batch of one, if it
        reads something besides the tokens."""

    @property
    def can_restart(self) -> bool:
        """True = rows may get new prompts: the source has `restart`, or no `start`."""
        kind = type(self)
        return kind.start is DraftSource.start or kind.restart is not DraftSource.restart

    def on_finished(self, tokens: Tensor, lengths: Tensor) -> None:
        """Called with the sequences that end, and all tokens emitted; not if the caller stops earlier."""

    def static_tensors(self) -> Sequence[Tensor] | None:
        """The tensors that `propose` reads at the same addresses in every step (a cache, weights).

        A CUDA graph of a step is reused as long as they are the same. None = not known: every batch captures its steps
        again.
        """
        return None

    @abstractmethod
    def propose(
        self, tokens: Tensor, lengths: Tensor, num_draft_tokens: int, sampling: SamplingTensors, seeds: Tensor
    ) -> Draft:
        """Propose tokens to follow each sequence.

        Args:
            num_draft_tokens: K >= 1.
            sampling: the target's temperature, top-k, top-p and min-p. A source that samples must use all of them, as
                `sample(logits, draws, sampling.temperature, **sampling.filters)` does; otherwise the verified q is not
                the q that was sampled. If the target has processors, `sampling.process(logits, text, lengths)` applies
                them, with a text that includes the drafts so far; without them, fewer drafts are accepted.
            seeds: [B] int64; a source that samples takes `uniforms(seeds, lengths, K, "propose")` and no other stream.
                If `sampling.coupled`, the text does not depend on the drafts. Most are then accepted of a source that
                draws draft i with `sample_gumbel(logits, seeds, lengths + i, ..)`; `Draft.logits` are not read.
        """


def readable_lengths(source: DraftSource, tokens: Tensor, lengths: Tensor) -> Tensor:
    """Lengths [B] of texts in tokens [B, W] as a source gets them: 1 for those that are longer than it can read."""
    limit = _limit_within(source, tokens)
    return lengths if limit is None else torch.where(lengths > limit, 1, lengths)


def _limit_within(source: DraftSource, tokens: Tensor) -> int | None:
    """The most tokens that a source can read, if there is room for more."""
    limit = source.max_length
    return None if limit is None or tokens.shape[1] <= limit else limit


def proposal_of(
    source: DraftSource | None,
    tokens: Tensor,
    lengths: Tensor,
    num_draft_tokens: int,
    sampling: SamplingTensors,
    seeds: Tensor,
    vocab_size: int,
) -> Draft:
    """Ask a source for drafts as far as it can read each text; behind them comes padding, whose place depends on the
    text's length alone."""
    if source is None or num_draft_tokens == 0:
        return Draft(tokens[:, :0])
    arguments = tokens, readable_lengths(source, tokens, lengths), num_draft_tokens, sampling, seeds
    draft = _checked_proposal(source, vocab_size, *arguments) if source.is_checked else source.propose(*arguments)
    limit = _limit_within(source, tokens)
    if limit is None:
        return draft
    num_read = lengths.unsqueeze(1) + torch.arange(draft.tokens.shape[1], device=lengths.device)
    return replace(draft, tokens=torch.where(num_read <= limit, draft.tokens, -1))


def _checked_proposal(
    source: DraftSource, vocab_size: int, tokens: Tensor, lengths: Tensor, num_draft_tokens: int, *others: Any
) -> Draft:
    """The proposal of a user's class, checked: an error would otherwise show far from its cause, or as wrong text.
    Writing into the text is an error in eager steps on a CPU, where looking costs nothing."""
    text, ends, name = tokens.clone(), lengths.clone(), f"{type(source).__name__}.propose"
    draft = source.propose(text, ends, num_draft_tokens, *others)
    if not isinstance(draft, Draft):
        raise TypeError(f"draft: expected a Draft from {name}, got {type(draft)}")
    if not isinstance(draft.tokens, Tensor) or draft.tokens.dtype not in (torch.int64, torch.int32):
        found = getattr(draft.tokens, "dtype", type(draft.tokens))
        raise TypeError(f"draft: expected int64 or int32 tokens [B, K] from {name}, got {found}")
    shape, most = list(draft.tokens.shape), [len(tokens), num_draft_tokens]
    if len(shape) != 2 or shape[0] != most[0] or shape[1] > most[1]:
        raise ValueError(f"draft: expected tokens {most} or fewer from {name}, got shape {shape}")
    for part, value, expected in (
        ("logits", draft.logits, [*shape, vocab_size]),
        ("lse", draft.lse, shape),
        ("matches", draft.matches, shape[:1]),
    ):
        if value is not None and list(getattr(value, "shape", ())) != expected:
            found = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value)
            raise ValueError(f"draft: expected {part} {expected} from {name}, got {found}")
    if draft.matches is not None and draft.matches.dtype != torch.int64:
        raise TypeError(f"draft: expected int64 matches from {name}, got {draft.matches.dtype}")
    if is_eager_cpu(tokens, lengths):
        largest = int(draft.tokens.max()) if draft.tokens.numel() > 0 else -1
        if largest >= vocab_size:
            raise ValueError(
                f"draft: expected tokens in [0, {vocab_size}), or below 0 for padding, from {name}, got {largest}"
            )
        for part, copied, given in (("tokens", text, tokens), ("lengths", ends, lengths)):
            if not torch.equal(copied, given):
                raise ValueError(f"draft: {name} wrote into {part}; it may only read them")
    return replace(draft, tokens=draft.tokens.long())


@runtime_checkable
class LanguageModel(Protocol):
    """A causal language model over ragged rows: each sequence has its own length, and the model keeps a static cache
    that can be written at any position. examples/own_model.py has an example.

    Any class with these attributes and methods will do. It may be an `nn.Module`: a loop puts it into evaluation mode
    while it decodes. `forward` becomes part of a compiled step: it must be traceable by torch.compile and must not wait
    for the device.

    A `forward` may run in inference mode or in `torch.no_grad`, and the mode may change between two of them. What later
    forwards write, such as a cache, must be made outside inference mode, where `start`, `clear_rows`, `begin_texts` and
    `replace_inputs` run. A pickle should have no cache (`__getstate__`), because torch shares the memory of tensors
    that it sends to other processes.

    The other members are optional. `static_tensors()`, as in `DraftSource`, returns its cache and weights; without it,
    each batch captures its CUDA graphs again. `first_layers(num_layers)`, which `EarlyExit` needs, returns the model
    that stops after its first layers, with the same weights and its own cache. `clear_rows(rows)` clears rows [A] int64
    that begin new texts; it is needed if slots that no token sees must be finite, because 0 times NaN is NaN.
    `replace_inputs(row, inputs)` gives a row other inputs [1, ...] than `start` did; sessions call it.
    `begin_texts(lengths, rows)` is called before the prompts of rows [A] int64, None = all, are read, with the lengths
    [A] of these prompts; a model needs it if it reads a prompt differently from tokens added to it.

    Three are for a model that keeps a state of the text (linear attention, Mamba), from which a token cannot be taken
    back:

    - `keeps_states`: True = the first forward of a text begins at its first token and ends within its prompt. Prompts
      of different lengths are then read apart; otherwise a shorter row is read beyond its end.
    - `expect(num_tokens)` is called before `start`: at most the newest `num_tokens` positions of a text are read again,
      and none inside its prompt but the newest.
    - `state_bytes`, the memory of these states, is added to `stats.state_bytes`.

    Four are for a model that its owner may change between two calls, or while a session is open:

    - `look()` takes over what has changed since the last look. It is called before texts begin in rows: before `start`,
      and in a session before `clear_rows`, while other rows go on. It raises a ValueError if the model cannot be read
      any more, and a RuntimeError if it no longer fits what was read of texts. The RuntimeError is ignored before
      `start`, which forgets these texts.
    - `version` changes when a look finds a change. CUDA graphs from before are then captured anew.
    - `compile_key` is a hashable value of what a compiled forward depends on, and torch does not look at (hooks).
      Compiled code is used for an equal value only, and is kept.
    - `is_observed`: True = other code may keep what a forward computes, so that none runs in inference mode. It is read
      after each look.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def max_length(self) -> int | None:
        """The longest sequence the model can read; None = no limit known. No position beyond is read, and no larger
        capacity asked for, except by beam search, for the slots of its tree."""

    def start(self, batch: int, capacity: int, inputs: Mapping[str, Tensor] | None = None) -> None:
        """Make room for `batch` sequences of `capacity` tokens and forget what was read before.

        Args:
            inputs: what the model reads besides the tokens, by name: the input of an encoder, or images (`ImageModel`
                in drafts/images.py).
        """

    def forward(self, tokens: Tensor, positions: Tensor, num_logits: int | None = None) -> Tensor:
        """Read tokens [B, n] at positions [B, n] of their sequences; return logits [B, n, V] in float32, bfloat16 or
        float16, or the last num_logits of them.

        A token attends to what was last written at the positions up to its own: to roll back, read at an earlier
        position again. A position may occur twice in one call only with the same token.
        """


class FeatureModel(LanguageModel, Protocol):
    """A language model that exposes its hidden states, as a draft with `feature_layers` needs."""

    @property
    def num_layers(self) -> int: ...

    @property
    def hidden_size(self) -> int:
        """H, the width of a hidden state."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the hidden states."""

    def keep_features(self, layers: Sequence[int]) -> None:
        """From the next `start` on, keep the inputs of these layers, and for `num_layers` the input of the head; () =
        none. Called before every `start`."""

    @property
    def features(self) -> Tensor:
        """[B, capacity, len(layers) * H], the layers side by side: slot j has the feature of the token that was last
        read at position j. The tensor stays the same as long as batch and capacity do."""

    def embed(self, tokens: Tensor) -> Tensor:
        """The model's own embeddings [B, n, H] of tokens [B, n]."""

    @property
    def embeddings(self) -> Tensor:
        """[V, H], their weights, before any scale or norm. DFlash alone needs these and `head`."""

    def head(self, hidden: Tensor) -> Tensor:
        """The head alone: logits [B, n, V] in the dtype of `forward`, from what it reads [B, n, H]."""


def settings_of(part: object) -> dict[str, Any]:
    """The attributes of a model or a source that a copy or a pickle has too: those that its classes do not list in
    `_of_calls`. Tensors of a call must stay behind, because torch shares the memory of tensors that it sends to other
    processes, which would all write to one cache."""
    left = {name for kind in type(part).__mro__ for name in vars(kind).get("_of_calls", ())}
    return {name: value for name, value in vars(part).items() if name not in left}


# The kinds of draft that a loop accepts.
AnyDraft = DraftSource | LanguageModel | nn.Module | None


# The function of `hf`, which this layer cannot import. The package's `__init__` sets it.
language_model: Callable[[Any], LanguageModel] | None = None


def refuse_class(name: str, given: object) -> None:
    if isinstance(given, type):
        raise TypeError(f"{name}: expected an object, got the class {given.__name__}")


def as_language_model(name: str, model: LanguageModel | nn.Module) -> LanguageModel:
    """The model itself, or an adapter around a transformers model."""
    refuse_class(name, model)
    members = ("vocab_size", "device", "max_length", "start", "forward")
    missing = [member for member in members if not hasattr(model, member)]
    if not missing:
        return cast(LanguageModel, model)
    is_transformers = any(kind.__module__.startswith("transformers.") for kind in type(model).__mro__)
    # A PEFT model has a transformers model as its base.
    if is_transformers or hasattr(model, "get_base_model"):
        assert language_model is not None
        return language_model(model)
    # A result of `torch.compile` is read as its original; the loop compiles its own steps.
    original = getattr(model, "_orig_mod", None)
    if isinstance(original, nn.Module):
        return as_language_model(name, original)
    raise TypeError(
        f"{name}: expected a transformers model or a LanguageModel, got {type(model)} without {', '.join(missing)}"
        + ("; of a wrapper, pass the model inside" if isinstance(model, nn.Module) else "")
    )


def feature_model(target: LanguageModel, *others: str) -> FeatureModel:
    """The target, which must expose its hidden states, and have these other members."""
    # `features` has no value before the first `start`.
    names = ("num_layers", "hidden_size", "dtype", "keep_features", "embed", *others)
    missing = [name for name in names if not hasattr(target, name)]
    if missing:
        raise TypeError(
            f"target: the draft reads hidden states; expected a FeatureModel, got {type(target).__name__} "
            f"without {', '.join(missing)}"
        )
    return cast(FeatureModel, target)


def readable_length(model: LanguageModel) -> int | None:
    """The longest sequence that a model can read, which is not always the `max_length` that it was made for."""
    return None if getattr(model, "reads_beyond", False) else model.max_length


def readable_positions(model: LanguageModel, positions: Tensor) -> Tensor:
    """Positions that a model can read: the last that it can, where padding would stand behind it."""
    limit = readable_length(model)
    return positions if limit is None else positions.clamp(max=limit - 1)


def replace_inputs(model: LanguageModel, row: int, inputs: Mapping[str, Tensor]) -> None:
    """Let a model read other inputs [1, ...] for a row, if it reads something besides the tokens."""
    if hasattr(model, "replace_inputs"):
        model.replace_inputs(row, inputs)


def static_tensors_of(*parts: object) -> list[Tensor] | None:
    """The static tensors of models and draft sources together; None if any of them has unknown tensors."""
    tensors: list[Tensor] = []
    for part in parts:
        own = part.static_tensors() if hasattr(part, "static_tensors") else None
        if own is None:
            return None
        tensors += own
    return tensors
