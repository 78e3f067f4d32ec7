"""The command `torch-specops`. This module is outside of the package `torch_specops`, whose import loads torch, because
`--help` and `--version` must not wait for that."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
    from typer.core import TyperGroup
except ModuleNotFoundError as missing:
    if missing.name != "typer":
        raise
    print("torch-specops: error: typer is missing; run: pip install 'torch_specops[hf]'", file=sys.stderr)
    raise SystemExit(2) from None

# The exit status that a shell reports for a program that wrote to a closed pipe.
CLOSED_PIPE = 141


class Commands(TyperGroup):
    """The commands by name. Imports their code, and torch with it, when one of them is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        commands: Any = typer.main.get_command(import_module("torch_specops.cli").app)
        return name, commands.commands[name], rest


app = typer.Typer(
    cls=Commands,
    help="Speculative decoding: a cheap draft guesses tokens, and the target model checks several in one pass. "
    "The text has exactly the distribution of text from the target alone.",
    # Typer prints the lines after "\b" without wrapping them.
    epilog="""\b
Exit codes:
  1    outputs differ beyond rounding, or the target gave no finite logit
  2    a wrong argument, a missing package or another error
  130  Ctrl-C
  141  the reader of the output has closed it, as `| head` does""",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Turn rich off: its boxes would leave only half of 80 columns for the explanations.
    rich_markup_mode=None,
)


@app.command(short_help="Write text by speculative decoding, drafts in colour.")
def demo() -> None: ...


@app.command(short_help="Compare the speed of this package with transformers.")
def bench() -> None: ...


@app.command(short_help="Print versions and devices, for a bug report.")
def env() -> None: ...


def _print_version(asked: bool) -> None:
    if asked:
        # The metadata of an installation from a clone may be older, or missing.
        source = Path(__file__).with_name("torch_specops") / "__init__.py"
        print("torch-specops", *re.findall(r'^__version__ = "(.*)"$', source.read_text(), re.MULTILINE))
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    try:
        app(prog_name="torch-specops")
    except SystemExit as end:
        # If the output cannot be written, rich and typer end the program with 1, which has another meaning here.
        if isinstance(end.__context__, BrokenPipeError):
            raise SystemExit(CLOSED_PIPE) from None
        raise
