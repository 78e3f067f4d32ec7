"""One step of speculative decoding by hand: draft, read, verify.

python examples/verify_one_step.py
python examples/verify_one_step.py --target HuggingFaceTB/SmolLM2-360M --draft HuggingFaceTB/SmolLM2-135M
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import torch_specops


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="a model's directory or hub id; default: tiny random models")
    parser.add_argument("--draft", help="a smaller model with the same vocabulary")
    parser.add_argument("--prompt", default="The capital of France is")
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if (args.target is None) != (args.draft is None):
        parser.error("--target and --draft go together")

    if args.target is None:
        target, draft = tiny_pair()
        text, names = torch.tensor([[5, 6, 7, 5, 6]]), [f"<{token}>" for token in range(64)]
    else:
        target = AutoModelForCausalLM.from_pretrained(args.target).eval()
        draft = AutoModelForCausalLM.from_pretrained(args.draft).eval()
        tokenizer = AutoTokenizer.from_pretrained(args.target)
        text = tokenizer(args.prompt, return_tensors="pt")["input_ids"]
        names = tokenizer.convert_ids_to_tokens(range(target.config.vocab_size))

    # The random numbers of a step depend on the row's seed and length alone. Each of the three streams has its use.
    seeds, lengths = torch.tensor([args.seed]), torch.tensor([text.shape[1]])
    temperature = torch.tensor([args.temperature])
    propose = torch_specops.uniforms(seeds, lengths, args.num_draft_tokens, "propose")

    # 1. The draft proposes K tokens, one after another. Keep the very logits that were sampled, and their logsumexp.
    read, draft_logits, draft_lse = text, [], []
    for uniforms in propose.unbind(1):
        logits = draft(read).logits[:, -1]
        token, lse = torch_specops.sample(logits, uniforms, temperature)
        read = torch.cat([read, token.unsqueeze(1)], 1)
        draft_logits.append(logits)
        draft_lse.append(lse)
    draft_tokens = read[:, text.shape[1] :]

    # 2. The target reads them all in one forward: what it says after the text, and after each draft.
    target_logits = target(read).logits[:, text.shape[1] - 1 :]

    # 3. Verify: a prefix of the drafts is accepted, and the next token is drawn so that all have the target's law.
    output_tokens, num_accepted = torch_specops.verify_exact(
        target_logits,
        draft_tokens,
        torch.stack(draft_logits, 1),
        torch_specops.uniforms(seeds, lengths, args.num_draft_tokens, "accept"),
        torch_specops.uniforms(seeds, lengths, 1, "sample")[:, 0],
        temperature=temperature,
        draft_lse=torch.stack(draft_lse, 1),
    )

    # -1 marks places after the next token.
    emitted = [token for token in output_tokens[0].tolist() if token >= 0]
    print("drafts: ", *(names[token] for token in draft_tokens[0].tolist()))
    print("emitted:", *(names[token] for token in emitted))
    print(
        f"{int(num_accepted)} of {args.num_draft_tokens} drafts accepted, {len(emitted)} tokens for one target forward"
    )


def tiny_pair() -> tuple[nn.Module, nn.Module]:
    """Random weights, so that the example runs anywhere; the draft is the target with some noise."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    target, draft = LlamaForCausalLM(config).eval(), LlamaForCausalLM(config).eval()
    draft.load_state_dict({name: value + 0.02 * torch.randn_like(value) for name, value in target.state_dict().items()})
    return target, draft


if __name__ == "__main__":
    main()
