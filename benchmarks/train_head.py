r"""Train an EAGLE-3 head or an MTP layer for a transformers model, on text that the model writes itself.

    python benchmarks/train_head.py eagle3 [--target austen-bytes] [--out DIR] [--tokens 400000] [--steps 2500]
    python benchmarks/train_head.py mtp --target FOLDER --out FOLDER
    python benchmarks/train_head.py eagle3 --target smollm2-135m-instruct --out DIR --tokens 200000 --steps 1500 \
        --prompt $'<|im_start|>user\n' --turn $'<|im_end|>\n<|im_start|>assistant\n' --row 256 --draft-vocab 4096

The head is trained as it is used (Li et al. 2025, "training-time test"): from every position of a text it predicts
DEPTH tokens, each from its own output before, under the text that the target wrote. The loss aims at what is accepted:
-log sum_x min(p(x), q(x)), the logarithm of the acceptance rate of exact verification (as the LK losses do,
arXiv:2602.23881), after a first part of the run with the Kullback-Leibler divergence, whose gradient is the better one
as long as little is accepted. Matrices are trained by Muon, the rest by AdamW; the stored weights are the mean of the
last ones, in float16.

The text: half of the rows are sampled at temperature 1; the others begin with a piece of such a row, and go on at
temperature 0 or 0.5. With `--turn`, the text by which a chat model's turn begins, they begin with the first tokens of
such a row, and answer them. With `--draft-vocab` an EAGLE-3 head has the tokens that are commonest in the text. An MTP
layer is of the target's own kind, with the target's embeddings and output matrix. Measured on
`--text` is the acceptance rate of each draft given that those before it were right, at temperature 1
(sum_x min(p, q)) and 0 (the same argmax).
"""

from __future__ import annotations

import argparse
import copy
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

import torch
from rich.progress import Progress
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from train_byte_pair import Muon
from transformers import AttentionInterface, PreTrainedModel

from torch_specops import SamplingParams, SpeculativeDecoder
from torch_specops.cli.loading import AUSTEN, Tokenizer, load_model, load_tokenizer
from torch_specops.drafts.eagle3_head import Eagle3Config, Eagle3Head
from torch_specops.hf.mtp import QWEN, Found, MtpLayer

ROOT = Path(__file__).resolve().parents[1]
DEPTH = 4
# Later drafts are only verified if those before were accepted.
DECAY = 0.85
ROW, ROWS_PER_BATCH, TOKENS_PER_STEP = 512, 32, 2048
# A row that does not begin at temperature 1 has this much from one that does.
BEGINNING = 64
WARMUP, DIVERGENCE_UNTIL = 0.03, 0.3
WINDOWS_MEASURED = 8
# Pairs that the head sees in training, and from which share of the run on as many as a row has.
WINDOW, WHOLE_ROWS_FROM = 128, 0.8
MUON_RATE, ADAMW_RATE = 0.02, 0.003


class ChainAttention:
    """Attention of all chains of drafts at once, DEPTH deep, one of which begins at every pair.

    At depth 0 pairs attend to the pairs before them. At depth d, the draft that began at pair i stands at i + d: it
    sees the pairs up to i, and the drafts of its own chain.
    """

    def __init__(self) -> None:
        self.keys, self.values = [], []

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        group, count = queries.shape[1] // keys.shape[1], queries.shape[2]
        self.keys.append(keys.repeat_interleave(group, 1))
        self.values.append(values.repeat_interleave(group, 1))
        if len(self.keys) == 1:
            return F.scaled_dot_product_attention(queries, self.keys[0], self.values[0], is_causal=True)
        later = torch.ones(count, count, dtype=torch.bool).triu(1)
        scores = (queries @ self.keys[0].transpose(2, 3)).masked_fill(later, -torch.inf)
        own = torch.stack([(queries * drafted).sum(-1) for drafted in self.keys[1:]], -1)
        weights = (torch.cat([scores, own], -1) / math.sqrt(queries.shape[-1])).softmax(-1)
        of_text, *of_drafts = weights.split([count] + [1] * (len(self.keys) - 1), -1)
        drafted = zip(of_drafts, self.values[1:], strict=True)
        return of_text @ self.values[0] + sum(weight * values for weight, values in drafted)


# As transformers calls it, with queries, keys, values and a mask.
AttentionInterface.register(
    "chains", lambda layer, *heads, chains, **others: (chains(*heads[:3]).transpose(1, 2), None)
)


class Mtp(nn.Module):
    """One MTP layer of a model, with what it has of the model's, behind the methods of `Eagle3Head`. It begins with the
    model's last norm, and with the feature as its output."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        config = copy.deepcopy(model.config.get_text_config())
        config._attn_implementation = "chains"
        decoder = model.get_decoder()
        self.layer = MtpLayer(config, decoder.layers[-1], 0).float()
        # Not parameters of the layer.
        self.shared = [decoder.rotary_emb, model.get_output_embeddings().weight.detach().float()]
        begin(self.layer, self.layer.eh_proj, self.layer.norm, model)

    def read(self, hidden: Tensor, embedded: Tensor, positions: Tensor, attentions: Sequence[ChainAttention]) -> Tensor:
        """As `Eagle3Head.read`, but it stands at the position of token i + 1."""
        read, places = self.layer.fuse(embedded, hidden), positions + 1
        named = {"position_ids": places, "position_embeddings": self.shared[0](read, places)}
        return self.layer.norm(self.layer.block(read, attention_mask=None, **named, chains=attentions[0]))

    def feedback(self, output: Tensor) -> Tensor:
        return output

    fuse = feedback

    def logits(self, output: Tensor) -> Tensor:
        return F.linear(output, self.shared[1])


def begin(head: nn.Module, fc: nn.Linear, norm: nn.Module, model: PreTrainedModel) -> None:
    """The weights that a head begins with."""
    for name, parameter in head.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02 if "o_proj" not in name and "down_proj" not in name else 0.002)
    fc.weight.data[:, -len(fc.weight) :] += torch.eye(len(fc.weight))
    norm.weight.data.copy_(model.get_decoder().norm.weight)


def chain_logits(head: Eagle3Head | Mtp, features: Tensor, embedded: Tensor, depth: int) -> Iterator[Tensor]:
    """For each depth d the logits [B, N, draft_vocab_size] of token i + d + 2, given the features of tokens up to i and
    the tokens up to i + d + 1. The features are [B, N, F * H], the embeddings [B, >= N + depth, H]."""
    count, attention = features.shape[1], ChainAttention()
    hidden, positions = head.fuse(features), torch.arange(count).unsqueeze(0)
    for step in range(depth):
        output = head.read(hidden, embedded[:, step + 1 : step + 1 + count], positions + step, [attention])
        yield head.logits(output)
        hidden = head.feedback(output)


class Read(NamedTuple):
    """What training needs of the target, read once for all steps and kept in 16 bits: of rows [B, N] of text and a head
    with Vd tokens the features [B, N, F * H], the embedding of each token [B, N, H], log-probabilities of the head's
    tokens after each [B, N, Vd], and the likeliest token [B, N] as one of the head's, -1 = it does not have it."""

    features: Tensor
    embedded: Tensor
    log_p: Tensor
    best: Tensor


@torch.no_grad()
def read_text(model: PreTrainedModel, layers: Sequence[int], draft_of_target: Tensor, rows: Iterable[Tensor]) -> Read:
    """Read rows [N]. The features are the inputs of these layers; the number of layers stands for the output of the
    last norm. `draft_of_target` [V] has the head's number of each token, in ascending order, -1 = none."""
    found = []
    for row in rows:
        output = model(row.unsqueeze(0), output_hidden_states=True, use_cache=False)
        features = torch.cat([output.hidden_states[layer][0] for layer in layers], -1)
        log_p = output.logits[0].float().log_softmax(-1)
        best = draft_of_target[log_p.argmax(-1)]
        embedded = model.get_input_embeddings()(row)
        found.append((features.half(), embedded.half(), log_p[:, draft_of_target >= 0].half(), best))
    return Read(*map(torch.stack, zip(*found, strict=True)))


def drafted(head: Eagle3Head | Mtp, read: Read, window: int) -> Iterator[tuple[Tensor, ...]]:
    """For each depth the acceptance rate sum_x min(p(x), q(x)) [B, N], log p [B, N, Vd], log q and the target's
    likeliest token [B, N]. Rows are cut into windows, because the target reads whole rows; the last chain of a window
    ends inside of it."""
    features, embedded, log_p, best = (
        part.unfold(1, window, window - DEPTH).flatten(0, 1).movedim(-1, 1) for part in read
    )
    count = window - DEPTH
    for depth, logits in enumerate(chain_logits(head, features[:, :count].float(), embedded.float(), DEPTH)):
        after = slice(depth + 1, depth + 1 + count)
        own, log_q = log_p[:, after].float(), logits.float().log_softmax(-1)
        yield torch.minimum(own, log_q).exp().sum(-1), own, log_q, best[:, after]


def losses(head: Eagle3Head | Mtp, read: Read, window: int, divergence: float) -> Tensor:
    """The loss at each depth [DEPTH]; `divergence` is the share of the Kullback-Leibler divergence."""
    found = []
    for accepted, log_p, log_q, _ in drafted(head, read, window):
        loss = (1.0 - divergence) * -accepted.clamp(min=1e-6).log()
        if divergence > 0:
            loss = loss + divergence * (log_p.exp() * (log_p - log_q)).sum(-1)
        found.append(loss.mean())
    return torch.stack(found)


@torch.inference_mode()
def measure(head: Eagle3Head | Mtp, read: Read) -> dict[str, list[float]]:
    """The acceptance rate of each draft, given that those before it were right."""
    rates: dict[str, list[float]] = {"temperature 1": [], "greedy": []}
    for accepted, _, log_q, best in drafted(head, read, read.best.shape[1]):
        rates["temperature 1"].append(round(accepted.mean().item(), 4))
        rates["greedy"].append(round((best == log_q.argmax(-1)).float().mean().item(), 4))
    return rates


def held_out(tokenizer: Tokenizer, path: Path) -> Tensor:
    """[WINDOWS_MEASURED, ROW] of a text."""
    tokens = tokenizer(path.read_text(encoding="utf-8"), return_tensors="pt", verbose=False)["input_ids"][0]
    return tokens[: WINDOWS_MEASURED * ROW].view(WINDOWS_MEASURED, ROW)


def eagle3_head(model: PreTrainedModel, layers: Sequence[int], draft_of_target: Tensor) -> Eagle3Head:
    """A head as wide as the target. It begins with the target's last norm and output matrix, and with the feature of
    the last of the layers."""
    config, has = model.config.get_text_config(), draft_of_target >= 0
    same = ("vocab_size", "hidden_size", "intermediate_size", "num_key_value_heads", "head_dim")
    sizes = {name: getattr(config, name) for name in same}
    sizes |= {"num_heads": config.num_attention_heads, "target_hidden_size": config.hidden_size}
    sizes |= {"draft_vocab_size": int(has.sum()), "feature_layers": tuple(layers)}
    sizes |= {"norm_eps": config.rms_norm_eps, "rope_theta": config.rope_parameters["rope_theta"]}
    # Hidden states may be a hundred times as large as what the layer adds to them.
    head = Eagle3Head(Eagle3Config(**sizes, fc_norm=True), has_embedding=False)
    head.draft_of_target = draft_of_target
    begin(head, head.fc, head.norm, model)
    head.lm_head.weight.data.copy_(model.get_output_embeddings().weight[has])
    return head


def write_text(
    model: PreTrainedModel, prompt: Tensor, turn: Tensor | None, num_tokens: int, length: int, progress: Progress
) -> Tensor:
    """[N, length] of the target's own text after prompt [1, n]. `turn` [1, m] asks for an answer."""
    decoder = SpeculativeDecoder(model, compile=False)
    rows: list[Tensor] = []
    for seed in progress.track(range(max(num_tokens // (ROWS_PER_BATCH * length), 2)), description="text"):
        prompts, temperatures = prompt.expand(ROWS_PER_BATCH, -1), torch.ones(ROWS_PER_BATCH)
        if seed % 2 == 1:
            # The first tokens of the rows before, which the turn ends, or a piece from anywhere in them.
            starts = torch.randint(1 if turn is not None else length - BEGINNING, (ROWS_PER_BATCH, 1))
            pieces = rows[-1].gather(1, starts + torch.arange(BEGINNING))
            prompts = pieces if turn is None else torch.cat([pieces, turn.expand(ROWS_PER_BATCH, -1)], 1)
            temperatures = 0.5 * (torch.arange(ROWS_PER_BATCH) % 2)
        how = {"max_new_tokens": length - prompts.shape[1], "seed": seed, "eos_token_id": ()}
        rows.append(decoder.generate(prompts, sampling=SamplingParams(temperature=temperatures), **how).sequences)
    return torch.cat(rows)


def train(head: Eagle3Head | Mtp, read: Read, steps: int, progress: Progress) -> Eagle3Head | Mtp:
    """The mean of the last weights."""
    named = list(head.named_parameters())
    matrices = [p for name, p in named if p.dim() > 1 and "lm_head" not in name]
    others = [p for name, p in named if p.dim() == 1 or "lm_head" in name]
    adamw = torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0)
    optimizers: dict[float, torch.optim.Optimizer] = {MUON_RATE: Muon(matrices, MUON_RATE), ADAMW_RATE: adamw}
    (num_rows, length), mean = read.best.shape, copy.deepcopy(head)
    weights = DECAY ** torch.arange(DEPTH)
    size = max(TOKENS_PER_STEP // length, 1)
    batches = (batch for _ in range(steps) for batch in torch.randperm(num_rows).split(size))
    task = progress.add_task("training", total=steps)
    for step, batch in zip(range(steps), batches, strict=False):
        share = step / steps
        scale = min(1.0, (share + 1e-4) / WARMUP) * max(0.02, 0.5 * (1 + math.cos(math.pi * share)))
        for rate, optimizer in optimizers.items():
            optimizer.param_groups[0]["lr"] = rate * scale
            optimizer.zero_grad()
        window = WINDOW if share < WHOLE_ROWS_FROM else length
        of_batch = Read(*(part[batch] for part in read))
        found = losses(head, of_batch, window, max(0.0, 1.0 - share / DIVERGENCE_UNTIL))
        (found * weights / weights.sum()).sum().backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for optimizer in optimizers.values():
            optimizer.step()
        for averaged, parameter in zip(mean.parameters(), head.parameters(), strict=True):
            averaged.data.lerp_(parameter.data, max(0.005, 1 / (step + 1)))
        progress.update(task, advance=1, description=f"training, loss {found[0].item():.3f}")
    return mean


def save(head: Eagle3Head | Mtp, folder: Path) -> None:
    """Write model.safetensors and config.json of an EAGLE-3 head, as SpecForge does, or mtp.safetensors in the names of
    Qwen3-Next, which belongs into the folder of the target. The weights are stored, and then used, in float16.
    Embeddings are the target's."""
    for parameter in head.parameters():
        parameter.data.copy_(parameter.half())
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(head, Mtp):
        path, own = folder / "mtp.safetensors", Found(QWEN, [QWEN.root])
        weights = {own.names(f"layers.0.{name}", w, {})[0]: w.half() for name, w in head.layer.state_dict().items()}
    else:
        path, config = folder / "model.safetensors", head.config
        same = ("hidden_size", "intermediate_size", "num_key_value_heads", "head_dim", "rope_theta", "vocab_size")
        content = {name: getattr(config, name) for name in (*same, "draft_vocab_size", "fc_norm")}
        content |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
        content |= {"num_attention_heads": config.num_heads, "hidden_act": "silu", "rms_norm_eps": config.norm_eps}
        content |= {"tie_word_embeddings": False, "torch_dtype": "float16"}
        # Here layers are counted by their outputs.
        layers = [layer - 1 for layer in config.feature_layers or ()]
        content["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": layers, "use_aux_hidden_state": True}
        (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n")
        weights = {name: tensor.half() for name, tensor in head.state_dict().items()}
        if config.draft_vocab_size < config.vocab_size:
            weights["t2d"] = head.draft_of_target >= 0
            weights["d2t"] = weights["t2d"].nonzero()[:, 0] - torch.arange(config.draft_vocab_size)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, path)
    # safetensors writes a file that only its owner can read, and a package would be built with that mode.
    path.chmod(0o644)


def main(argv: list[str] | None = None) -> Tensor:
    """The text that the head was trained on, [N, row]."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["eagle3", "mtp"])
    parser.add_argument("--target", default=AUSTEN, help="a folder, a hub id, or a name that the command line knows")
    parser.add_argument("--prompt", default="\n", help="what the text begins with")
    parser.add_argument("--turn", help="ask for answers: what ends a turn of a chat and begins the model's")
    parser.add_argument("--row", type=int, default=ROW, help="tokens of a text")
    parser.add_argument("--tokens", type=int, default=400_000, help="of the target's own text")
    parser.add_argument("--steps", type=int, default=2500, help=f"of {TOKENS_PER_STEP} tokens")
    parser.add_argument("--layers", type=int, nargs="+", help="whose inputs EAGLE-3 reads; default 2, L/2 and L-3")
    parser.add_argument("--draft-vocab", type=int, help="the tokens of an EAGLE-3 head; default: all")
    parser.add_argument("--text", type=Path, default=ROOT / "tests/data/austen_heldout.txt", help="to measure on")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="default: the folder in the package")
    args = parser.parse_args(argv)
    if args.kind == "mtp" and (args.layers or args.draft_vocab):
        parser.error("--layers, --draft-vocab: only EAGLE-3 heads have them")
    is_eagle = args.kind == "eagle3"
    folder, metrics_name = ("eagle3", "metrics.json") if is_eagle else ("target", "mtp_metrics.json")
    args.out = args.out or ROOT / "torch_specops/data/austen_bytes" / folder
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)

    model, tokenizer = load_model(args.target).model, load_tokenizer(args.target)
    count, vocab_size = (getattr(model.config.get_text_config(), n) for n in ("num_hidden_layers", "vocab_size"))
    prompt, turn = (text and tokenizer(text, return_tensors="pt")["input_ids"] for text in (args.prompt, args.turn))
    with Progress() as progress:
        rows = write_text(model, prompt, turn, args.tokens, args.row, progress)
        counts = rows.flatten().bincount(minlength=vocab_size)
        common = counts.topk(args.draft_vocab or vocab_size).indices.sort().values
        draft_of_target = torch.full((vocab_size,), -1).scatter(0, common, torch.arange(len(common)))
        layers = (args.layers or (2, count // 2, count - 3)) if is_eagle else (count,)
        new = eagle3_head(model, layers, draft_of_target) if is_eagle else Mtp(model)
        read = read_text(model, layers, draft_of_target, progress.track(rows, description="reading"))
        head = train(new, read, args.steps, progress)
    save(head, args.out)
    text = read_text(model, layers, draft_of_target, held_out(tokenizer, args.text))
    metrics = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "torch": torch.__version__,
        "parameters": sum(parameter.numel() for parameter in head.parameters()),
        "text_tokens": rows.numel(),
        "steps": args.steps,
        "held_out_windows": WINDOWS_MEASURED,
        **measure(head, text),
    }
    (args.out / metrics_name).write_text(json.dumps(metrics, indent=2) + "\n")
    print(json.dumps(metrics, indent=2))
    return rows


if __name__ == "__main__":
    main()
