"""Tokenizers of five kinds with small vocabularies, made without a download."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

TEXTS = [
    "It was not to be, she said: the naïve façade of 東京 isn't big .",
    "Hello   big world 🙂🙂 été",
    "don't ' quote ' n't\nshe'd said she would not be there\tbig",
]


def _fast(core: Tokenizer, special: list[str], **options: Any) -> Any:
    core.add_special_tokens(special)
    return PreTrainedTokenizerFast(tokenizer_object=core, additional_special_tokens=special, **options)


def byte_level(**options: Any) -> Any:
    """BPE of bytes: GPT-2, Llama 3, Qwen."""
    core, special = Tokenizer(models.BPE()), ["<s>", "</s>"]
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(TEXTS * 3, trainer)
    return _fast(core, special, **options)


def byte_fallback(tokens: list[str] | None = None, **options: Any) -> Any:
    """BPE of SentencePiece, with tokens for single bytes: Llama 2, Mistral. Or with these tokens."""
    special, merges = ["<unk>", "<s>", "</s>"], []
    if tokens is None:
        tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefghijklmnopqrstuvwxyzIHT,.'"]
        merges = [("▁", "b"), ("▁b", "i"), ("▁bi", "g"), ("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("l", "l")]
        tokens += [left + right for left, right in merges]
    vocab = {token: index for index, token in enumerate(tokens)}
    core = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = decoders.Strip(" ", 1, 0)
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    return _fast(core, special, **options)


def unigram(**options: Any) -> Any:
    """Unigram of SentencePiece: T5."""
    core, special = Tokenizer(models.Unigram()), ["<pad>", "</s>"]
    core.pre_tokenizer, core.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=80, special_tokens=[*special, "<unk>"], unk_token="<unk>", show_progress=False
    )
    core.train_from_iterator(TEXTS * 3, trainer)
    return _fast(core, special, **options)


def word_piece(**options: Any) -> Any:
    """WordPiece: BERT."""
    core, special = Tokenizer(models.WordPiece(unk_token="[UNK]")), ["[PAD]", "[CLS]", "[SEP]"]
    core.pre_tokenizer, core.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=[*special, "[UNK]"], show_progress=False)
    core.train_from_iterator(TEXTS * 3, trainer)
    return _fast(core, special, **options)


def austen(**options: Any) -> Any:
    """Bytes: the package's pair of models."""
    return AutoTokenizer.from_pretrained(files("torch_specops") / "data" / "austen_bytes" / "target", **options)


KINDS: list[Callable[..., Any]] = [byte_level, byte_fallback, unigram, word_piece, austen]
