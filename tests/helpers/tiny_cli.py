"""The command line run in this process, on tiny models saved with a tiny tokenizer."""

from __future__ import annotations

import re
from pathlib import Path

from tiny_models import tiny
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from torch_specops_command import app

TEXT = "a stack of items: push an item, pop an item. être, 日本, 🙂"


def save_model(directory: Path, seed: int, vocab_size: int = 280) -> str:
    """Its tokenizer is a byte-level BPE with few merges: most characters beyond ASCII take several tokens."""
    bpe = Tokenizer(BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=["<eos>"], initial_alphabet=alphabet)
    bpe.train_from_iterator([TEXT], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>")
    tokenizer.save_pretrained(directory)
    ends = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": None}
    model = tiny("llama", seed, vocab=len(tokenizer), max_position_embeddings=256, **ends).float()
    model.generation_config.eos_token_id = 0
    model.save_pretrained(directory)
    return str(directory)


def run(*arguments: str, **environment: str) -> Result:
    # Wide enough that no word of the help is broken.
    environment = {"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"} | environment
    return CliRunner().invoke(app, list(arguments), env=environment)


def demo(target: str, *arguments: str) -> Result:
    return run("demo", "--target", target, "--prompt", TEXT, "--max-new-tokens", "20", *arguments)


def bench(target: str, *arguments: str) -> Result:
    prompt = [] if "--prompt" in arguments else ["--prompt", TEXT]
    return run("bench", "--target", target, "--max-new-tokens", "6", "--rounds", "2", *prompt, *arguments)


def row(result: Result, name: str) -> str:
    assert result.exit_code in (0, 130), result.output
    found = re.search(rf"^ *{re.escape(name)}  +(.*?) *$", result.stdout, re.MULTILINE)
    assert found, result.stdout
    return found[1]
