"""Train the byte-level pair of `torch_specops/data/austen_bytes`: a target, and a draft that is cheaper and worse.

    python benchmarks/train_byte_pair.py TEXT... [--megabytes 10] [--draft-megabytes 6] [--max-minutes 40]
                                         [--model-type qwen3_5_text] [--out DIR] [--heldout-sample FILE.txt]

TEXT    text files, or the `Rdata.rdb` of the Debian package r-cran-janeaustenr (six novels of Jane Austen, in the
        public domain): `apt-get download r-cran-janeaustenr && dpkg -x r-cran-janeaustenr_*.deb x`, then
        `x/usr/lib/R/site-library/janeaustenr/data/Rdata.rdb`

A token is a byte. Both models have tied embeddings and no end token. They are plain Llamas; `--model-type qwen3_5_text`
makes hybrids of the same shapes, with gated delta rules in three layers of four. The last 200 kB of the text are held
out. Matrices are trained by Muon, embeddings and norms by AdamW, with a cosine schedule over the bytes or the minutes
allowed, whichever end comes first. Contexts grow from 256 to 1024 bytes, because short ones are cheaper and the model
still has to see long ones.

What is measured on the held-out text, with the weights rounded to float16 as they are stored and computed in float32:
nats per byte of both models, alpha = mean over positions of sum_x min(p(x), q(x)) at temperature 1, which is the
acceptance rate of exact verification (Leviathan et al. 2023, theorem 3.5), and how often both have the same argmax.
The figures go to `metrics.json`; `README.md` beside it is written by hand, and a test compares its numbers.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import zlib
from collections.abc import Iterator
from datetime import datetime, timezone
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.progress import Progress
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional as F
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[1]
MAX_LENGTH = 1024
HELDOUT_BYTES = 200_000
SAMPLE_BYTES = 40_000
# The part of the sample that a test measures again.
SAMPLE_WINDOWS = 8
WINDOW = 512
TOKENS_PER_STEP = 2048
# Context length from this share of the schedule on.
CONTEXTS = ((0.0, 256), (0.6, 512), (0.8, MAX_LENGTH))
WARMUP = 0.02

SHAPES = {
    "target": {"hidden_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4, "intermediate_size": 344},
    "draft": {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 256},
}


class Muon(torch.optim.Optimizer):
    """Momentum, then the nearest orthogonal matrix as the update (Jordan et al. 2024), in float32.

    `torch.optim.Muon` iterates in bfloat16, one matrix at a time: on a CPU without that type it takes longer than the
    backward pass. Here matrices of one shape are iterated together.
    """

    def __init__(self, params: list[Tensor], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for param in group["params"]:
                by_shape.setdefault(param.shape, []).append(param)
            for shape, params in by_shape.items():
                updates = torch.stack([self.nesterov(param, group["momentum"]) for param in params])
                step_size = group["lr"] * math.sqrt(max(1.0, shape[0] / shape[1]))
                for param, update in zip(params, orthogonalize(updates), strict=True):
                    param.add_(update, alpha=-step_size)

    def nesterov(self, param: Tensor, momentum: float) -> Tensor:
        if "average" not in self.state[param]:
            self.state[param]["average"] = torch.zeros_like(param)
        average = self.state[param]["average"].lerp_(param.grad, 1 - momentum)
        return param.grad.lerp(average, momentum)


def orthogonalize(matrices: Tensor) -> Tensor:
    """`matrices` float32 [N, rows, columns] with every singular value brought near 1, by a Newton-Schulz iteration."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


def strings_of_rdb(path: Path) -> Iterator[str]:
    """The character vectors of an R lazy-load database, each joined by line ends. The file is a row of blocks, each a
    length of 4 bytes and a zlib stream of R's serialisation; a string in it has flags that end in 00 09, a big-endian
    length, and its bytes."""
    raw, position = path.read_bytes(), 0
    while position < len(raw):
        stream = zlib.decompressobj()
        block = stream.decompress(raw[position + 4 :])
        position = len(raw) - len(stream.unused_data)
        lines, start = [], 0
        while (found := block.find(b"\x00\x09", start)) >= 0:
            begin = found + 6
            length = int.from_bytes(block[found + 2 : begin], "big", signed=True)
            if 0 <= length < 100_000 and begin + length <= len(block):
                lines.append(block[begin : begin + length].decode())
                start = begin + length
            else:
                start = found + 1
        yield "\n".join(lines)


def read_texts(paths: list[Path]) -> bytes:
    texts = (strings_of_rdb(path) if path.suffix == ".rdb" else [path.read_text(encoding="utf-8")] for path in paths)
    return "\n\n\n".join(chain.from_iterable(texts)).encode()


def split(text: bytes) -> tuple[bytes, bytes]:
    """Training text and held-out text, cut after a line end."""
    if len(text) < 2 * HELDOUT_BYTES:
        raise SystemExit(f"the texts have {len(text)} bytes; at least {2 * HELDOUT_BYTES} are needed")
    cut = text.index(b"\n", len(text) - HELDOUT_BYTES) + 1
    return text[:cut], text[cut:]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose ids are the values of the bytes.

    A byte-level BPE without merges. Its vocabulary is written in the alphabet of `ByteLevel`: a byte that prints in
    Latin-1 is its own character, and the others follow from U+0100 on in their order.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    vocab = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    how = {"model_max_length": MAX_LENGTH, "clean_up_tokenization_spaces": False}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **how)


def new_model(role: str, model_type: str = "llama") -> PreTrainedModel:
    torch.manual_seed(0)
    shape = SHAPES[role]
    no_tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    how: dict[str, Any] = {"vocab_size": 256, "max_position_embeddings": MAX_LENGTH, "tie_word_embeddings": True}
    if model_type == "qwen3_5_text":
        num_heads, num_layers = shape["num_attention_heads"], shape["num_hidden_layers"]
        numbers = ("num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads")
        sizes = ("head_dim", "linear_key_head_dim", "linear_value_head_dim")
        how |= dict.fromkeys(numbers, num_heads) | dict.fromkeys(sizes, shape["hidden_size"] // num_heads)
        # Every fourth layer attends, counted from the last one, so that a short model has such a layer too.
        how["layer_types"] = (["linear_attention"] * 3 + ["full_attention"]) * -(-num_layers // 4)
        how["layer_types"] = how["layer_types"][-num_layers:]
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**shape, **how, **no_tokens))


def train(model: PreTrainedModel, role: str, text: bytes, megabytes: float, max_minutes: float) -> dict[str, Any]:
    """Train `model`; returns what it took."""
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    optimizers = (Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=5e-3, betas=(0.9, 0.95), weight_decay=0.0))
    base_rates = [o.param_groups[0]["lr"] for o in optimizers]
    generator = torch.Generator().manual_seed(0)
    trained: dict[str, Any] = {"bytes_seen": 0, "steps": 0, "seconds": 0.0}
    model.train()
    recent = math.nan
    started = time.monotonic()
    with Progress() as bar:
        task = bar.add_task(role, total=1.0)
        while (progress := max(trained["bytes_seen"] / (megabytes * 1e6), trained["seconds"] / (max_minutes * 60))) < 1:
            context = next(length for start, length in reversed(CONTEXTS) if progress >= start)
            starts = torch.randint(len(data) - context, (TOKENS_PER_STEP // context, 1), generator=generator)
            batch = data[starts + torch.arange(context + 1)].long()
            logits = model(input_ids=batch[:, :-1], use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            model.zero_grad()
            loss.backward()
            factor = min(1.0, progress / WARMUP) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
            for o, base_rate in zip(optimizers, base_rates, strict=True):
                o.param_groups[0]["lr"] = base_rate * factor
                o.step()
            trained["bytes_seen"] += TOKENS_PER_STEP
            trained["steps"] += 1
            trained["seconds"] = time.monotonic() - started
            recent = loss.item() if math.isnan(recent) else 0.98 * recent + 0.02 * loss.item()
            note = f"{role}, {trained['bytes_seen'] / 1e6:.2f} MB, context {context}, {recent:.3f} nats/byte"
            bar.update(task, completed=progress, description=note)
    return trained


@torch.no_grad()
def measure(target: PreTrainedModel, draft: PreTrainedModel, text: bytes) -> dict[str, float]:
    """Both models on the whole windows of `text`; every byte of a window but its first is predicted."""
    num_windows = len(text) // WINDOW
    windows = torch.frombuffer(bytearray(text), dtype=torch.uint8)[: num_windows * WINDOW].view(-1, WINDOW).long()
    totals = dict.fromkeys(("target_nats_per_byte", "draft_nats_per_byte", "alpha", "greedy_agreement"), 0.0)
    for batch in windows.split(8):
        following = batch[:, 1:, None]
        log_p, log_q = (
            model(input_ids=batch, use_cache=False).logits[:, :-1].log_softmax(-1) for model in (target, draft)
        )
        for name, log_probs in (("target_nats_per_byte", log_p), ("draft_nats_per_byte", log_q)):
            totals[name] -= log_probs.gather(-1, following).sum(dtype=torch.float64).item()
        totals["alpha"] += torch.minimum(log_p, log_q).exp().sum(dtype=torch.float64).item()
        totals["greedy_agreement"] += (log_p.argmax(-1) == log_q.argmax(-1)).sum().item()
    positions = num_windows * (WINDOW - 1)
    rates = {name: round(total / positions, 5) for name, total in totals.items()}
    return {"windows": num_windows, "window_bytes": WINDOW, **rates}


def write_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> PreTrainedModel:
    """Store float16 weights, and return the model that a user gets from them: float32, because the config says so."""
    model.half().save_pretrained(folder)
    # safetensors writes a file that only its owner can read, and a package would be built with that mode.
    (folder / "model.safetensors").chmod(0o644)
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = "float32"
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tokenizer.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="+", type=Path, metavar="TEXT")
    parser.add_argument("--megabytes", type=float, default=10.0, help="text that the target sees")
    parser.add_argument("--draft-megabytes", type=float, default=6.0, help="text that the draft sees")
    parser.add_argument("--max-minutes", type=float, default=40.0, help="for each model; the schedule ends by then")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model-type", choices=("llama", "qwen3_5_text"), default="llama")
    parser.add_argument("--out", type=Path, help="default for a Llama: the folder of the pair in the package")
    parser.add_argument("--heldout-sample", type=Path, default=ROOT / "tests/data/austen_heldout.txt")
    args = parser.parse_args(argv)
    if args.out is None and args.model_type != "llama":
        parser.error(f"--out: expected a folder for a pair of {args.model_type}, got none")
    out = args.out or ROOT / "torch_specops/data/austen_bytes"
    torch.set_num_threads(args.threads)

    text = read_texts(args.texts)
    training_text, heldout_text = split(text)
    megabytes = {"target": args.megabytes, "draft": args.draft_megabytes}
    new = {role: new_model(role, args.model_type) for role in SHAPES}
    trained = {role: train(new[role], role, training_text, megabytes[role], args.max_minutes) for role in SHAPES}

    tokenizer = byte_tokenizer()
    target, draft = (write_model(new[role], tokenizer, out / role) for role in SHAPES)
    sample = heldout_text[: heldout_text.index(b"\n", SAMPLE_BYTES) + 1]
    args.heldout_sample.parent.mkdir(parents=True, exist_ok=True)
    args.heldout_sample.write_bytes(sample)
    metrics = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "text_bytes": len(text),
        "heldout_bytes": len(heldout_text),
        "target": {"parameters": target.num_parameters(), **trained["target"]},
        "draft": {"parameters": draft.num_parameters(), **trained["draft"]},
        "heldout": measure(target, draft, heldout_text),
        "heldout_sample": measure(target, draft, sample[: SAMPLE_WINDOWS * WINDOW]),
    }
    (out / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    print(json.dumps(metrics, indent=2))


if __name__ == "__main__":
    main()
