"""The command `torch-specops`: decode with a draft and watch it, measure it, or report the installation."""

from __future__ import annotations

import sys

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
    help="Speculative decoding that is exact: a draft proposes tokens, the target keeps its law.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

app.command(
    epilog="""[bold]Examples[/bold]

    torch-specops demo

    torch-specops demo --temperature 0.7 --seed 3

    torch-specops demo --prompt "Write a haiku about the sea." --max-new-tokens 40

    torch-specops demo --target ./my-model --draft ./my-small-model --num-draft-tokens 4 --schedule heuristic
    """
)(demo.demo)
app.command(
    epilog="""[bold]Examples[/bold]

    torch-specops bench

    torch-specops bench --batch-sizes 1 --max-new-tokens 128 --rounds 9 --json result.json --plot result.png

    torch-specops bench --target ./my-model --draft ./my-small-model --num-draft-tokens 4 --temperature 1

    torch-specops bench --device cuda --dtype bfloat16 --batch-sizes 1,8,32
    """
)(bench.bench)
app.command()(env.env)


def main() -> None:
    app(prog_name="torch-specops")
