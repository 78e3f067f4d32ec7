"""The commands of `torch-specops`: a demo, a comparison with transformers, and the environment for bug reports. The
module `torch_specops_command` has the program around them."""

from __future__ import annotations

import typer

from . import bench, demo, env

__all__ = ["app"]

# As in `torch_specops_command`.
app = typer.Typer(add_completion=False, rich_markup_mode=None)

# Typer prints the lines after "\b" without wrapping them.
app.command(
    epilog="""\b
Examples:
  torch-specops demo
  torch-specops demo --temperature 0.7 --seed 3
  torch-specops demo --target austen-bytes --draft austen-bytes-draft
  torch-specops demo --prompt "Write a haiku." --max-new-tokens 40
  torch-specops demo --target ./model --draft ./small-model""",
)(demo.demo)
app.command(
    epilog="""\b
Examples:
  torch-specops bench
  torch-specops bench --batch-sizes 1 --json result.json
  torch-specops bench --target ./model --draft ./small-model
  torch-specops bench --prompts examples/prompts.jsonl --plot speed.png
  torch-specops bench --device cuda --dtype bfloat16 --batch-sizes 1,8,32""",
)(bench.bench)
app.command()(env.env)
