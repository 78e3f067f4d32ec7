"""The command `torch-specops`: a demo, a comparison with transformers, and the environment for bug reports."""

from __future__ import annotations

import sys
from typing import Annotated

from .. import __version__

try:
    import typer

    from . import bench, demo, env
except ModuleNotFoundError as missing:
    if missing.name not in ("typer", "rich"):
        raise
    print(f"torch-specops: error: {missing.name} is missing; run: pip install 'torch_specops[hf]'", file=sys.stderr)
    raise SystemExit(2) from None

__all__ = ["app", "main"]

app = typer.Typer(
    help="Speculative decoding: a cheap draft guesses tokens, and the target model checks several in one pass. "
    "The text has exactly the distribution of text from the target alone.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Turn rich off: its boxes would leave only half of 80 columns for the explanations.
    rich_markup_mode=None,
)

# Typer prints the lines after "\b" without wrapping them.
app.command(
    short_help="Write text by speculative decoding, drafts in colour.",
    epilog="""\b
Examples:
  torch-specops demo
  torch-specops demo --temperature 0.7 --seed 3
  torch-specops demo --target austen-bytes --draft austen-bytes-draft
  torch-specops demo --prompt "Write a haiku." --max-new-tokens 40
  torch-specops demo --target ./model --draft ./small-model""",
)(demo.demo)
app.command(
    short_help="Compare the speed of this package with transformers.",
    epilog="""\b
Examples:
  torch-specops bench
  torch-specops bench --batch-sizes 1 --json result.json
  torch-specops bench --target ./model --draft ./small-model
  torch-specops bench --prompts examples/prompts.jsonl --plot speed.png
  torch-specops bench --device cuda --dtype bfloat16 --batch-sizes 1,8,32""",
)(bench.bench)
app.command(short_help="Print versions and devices, for a bug report.")(env.env)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"torch-specops {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    app(prog_name="torch-specops")
