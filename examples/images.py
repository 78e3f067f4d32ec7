"""A model of images and text decodes with drafts from the prompt's own text.

python examples/images.py

With a published model, `batch` is what its processor gives:

    model = Qwen3VLForConditionalGeneration.from_pretrained("Qwen/Qwen3-VL-4B-Instruct")
    processor = AutoProcessor.from_pretrained("Qwen/Qwen3-VL-4B-Instruct", padding_side="left")
    batch = processor(text=texts, images=images, return_tensors="pt", padding=True)
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

import torch_specops
from torch_specops import SamplingParams
from torch_specops.drafts import PromptLookup

IMAGE = 60


def main() -> None:
    model = tiny()
    # Two prompts, of which the first has an image of four tokens and the second, padded on the left, has none.
    prompts = torch.tensor([[5, 6, IMAGE, IMAGE, IMAGE, IMAGE, 7, 5, 6], [0, 0, 0, 0, 9, 4, 3, 9, 4]])
    batch = {"input_ids": prompts, "attention_mask": (prompts != 0).long(), "pixel_values": torch.randn(1, 3, 16, 16)}
    # For Qwen3-VL also "image_grid_thw".
    images = {"pixel_values": batch["pixel_values"]}
    options = {"max_new_tokens": 40, "pad_token_id": 0}
    greedy = {
        "sampling": SamplingParams(temperature=0.0),
        "draft": PromptLookup(2, 1),
        "attention_mask": batch["attention_mask"],
    }
    output = torch_specops.generate(model, prompts, inputs=images, **greedy, **options)

    alone = model.generate(**{name: value[:1] for name, value in batch.items()}, do_sample=False, **options)
    same = output.new_tokens(0) == alone[0, prompts.shape[1] :].tolist()
    # The same behind transformers' own interface.
    hidden = model.generate(
        **batch,
        custom_generate=torch_specops.hf.custom_generate,
        draft_model=PromptLookup(2, 1),
        do_sample=False,
        **options,
    )
    same &= all(output.new_tokens(row) == hidden[row, prompts.shape[1] :].tolist() for row in range(2))
    print(f"identical to transformers: {same}")
    print(f"{output.stats.mean_acceptance_length:.2f} tokens per step")


def tiny() -> LlavaForConditionalGeneration:
    """Random weights, so that the example runs anywhere."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = LlamaConfig(vocab_size=64, eos_token_id=None, initializer_range=0.2, **sizes)
    vision = {"model_type": "clip_vision_model", "image_size": 16, "patch_size": 8} | sizes
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE, vision_feature_layer=-1)
    torch.manual_seed(0)
    return LlavaForConditionalGeneration(config).eval()


if __name__ == "__main__":
    main()
