"""Pages of the site that come from files outside docs/, links between them, and formulas as MathML.

mkdocs calls the functions whose names begin with `on_`.
"""

from __future__ import annotations

import ast
import html
import posixpath
import re
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
# From a file of the repository to its page.
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "benchmarks.md",
    "examples/vllm_plugin/README.md": "examples/vllm_plugin.md",
    "examples": "examples/index.md",
}
PAGES |= {f"examples/{path.name}": f"examples/{path.stem}.md" for path in sorted(ROOT.glob("examples/*.py"))}
SOURCES = {page: source for source, page in PAGES.items()}
BACKGROUND = (
    "api/more|examples/|evidence|lossless|math|performance|pitfalls|design|vocabulary|benchmarks|contributing|changelog|"
    "security"
)
# What a reader may ask a search for, and the guide's headings do not say.
ASKED = {
    "capabilities.md": ["tree"],
    "own_loop.md": ["own loop"],
    "rollouts.md": ["logprobs"],
    "serving.md": ["server", "stop", "streaming"],
}
# These have tables that need the room of the list of headings.
WIDE = (
    "lossless.md",
    "performance.md",
    "benchmarks.md",
    "evidence_leviathan.md",
    "evidence_wagner.md",
    "evidence_chen.md",
)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The header's link names the version; it leads to the source, or to the changelog while no host is known."""
    (version,) = re.findall(
        r'^__version__ = "(.+)"$', (ROOT / "torch_specops" / "__init__.py").read_text(), re.MULTILINE
    )
    repository = config.extra["repository"]
    config.repo_url = repository or "changelog/"
    config.repo_name = f"{version}, source" if repository else f"{version}, what is new"
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=content(ROOT / source)))
    return files


def content(path: Path) -> str:
    """The page of a file; a script's has what it does, what it prints, and its source."""
    if path.is_dir():
        return examples_list()
    source = path.read_text()
    if path.suffix != ".py":
        return source
    summary, rest = docstring(source)
    # In the docstrings commands are indented, which Markdown shows as code.
    parts = [f"# {summary.rstrip('.')}", rest]
    printed = path.parent / "outputs" / f"{path.stem}.txt"
    if printed.exists():
        parts += ["## Output", f"```text\n{printed.read_text()}```"]
    parts += ["## Source", f"```python\n{source}```"]
    return "\n\n".join(parts) + "\n"


def docstring(source: str) -> tuple[str, str]:
    """The first paragraph of a script's docstring as one line, and the others."""
    first, _, rest = (ast.get_docstring(ast.parse(source)) or "").partition("\n\n")
    return first.replace("\n", " "), rest


def examples_list() -> str:
    lines = ["# Examples", "One file per use; the tests run each of them.", ""]
    for source in PAGES:
        path = ROOT / source
        if path.suffix == ".py":
            lines.append(f"- [{path.name}]({source}): {docstring(path.read_text())[0]}")
    lines.append("- [vllm_plugin](examples/vllm_plugin/README.md): the exact op in vLLM's V1 engine.")
    return "\n".join(lines) + "\n"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    here = page.file.src_uri
    source = SOURCES.get(here, f"docs/{here}")
    # The list of headings makes room for lines of 120 columns.
    if source.endswith(".py") or source == "CONTRIBUTING.md" or here in WIDE:
        page.meta["hide"] = ["toc"]
    # The list of pages of the first one is itself.
    if here == "index.md":
        page.meta["hide"] = ["navigation"]
    page.meta["tags"] = ASKED.get(here, [])
    # A search finds guides first, then the API, then what stands behind them.
    page.meta["search"] = {"boost": 0.2 if re.match(BACKGROUND, here) else 1 if here.startswith("api/") else 4}
    # GitHub chooses one of two pictures by the reader's colour scheme, and the site by its own switch.
    markdown = re.sub(
        r'<picture>\s*<source [^>]*srcset="([^"]+)">\s*<img ([^>]*?)alt="([^"]+)" src="([^"]+)">\s*</picture>',
        r"![\3](\4#only-light){: \2} ![\3](\1#only-dark){: \2}",
        markdown,
    )

    def moved(link: re.Match[str]) -> str:
        text, path, anchor = link[1], link[2], link[3] or ""
        place = posixpath.normpath(posixpath.join(posixpath.dirname(source), path)) if path else source
        page = PAGES.get(place, place.removeprefix("docs/") if place.startswith("docs/") else None)
        if page is not None:
            return f"[{text}]({posixpath.relpath(page, posixpath.dirname(here) or '.')}{anchor})"
        if not (ROOT / place).exists():
            raise FileNotFoundError(f"{source}: a link leads to {place}, which does not exist")
        # A file without a page is shown where the repository is, and by the site itself while no host is known.
        if repository := config.extra["repository"]:
            return f"[{text}]({repository}/blob/main/{place})"
        if (ROOT / place).is_dir():
            return text
        shown = f"source/{place}.txt"
        if files.get_file_from_path(shown) is None:
            files.append(File.generated(config, shown, content=(ROOT / place).read_text()))
        return f"[{text}]({posixpath.relpath(shown, posixpath.dirname(here) or '.')}{anchor})"

    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    parts[::2] = [re.sub(r"\[([^\]\[]*)\]\((?!\w+:)([^)#\s]*)(#[^)\s]*)?\)", moved, part) for part in parts[::2]]
    return "".join(parts)


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Formulas as MathML, which browsers show without a script or a font of ours."""

    def mathml(formula: re.Match[str]) -> str:
        found = convert(html.unescape(formula[2]).strip(), display="block" if formula[1] == "[" else "inline")
        # A minus at the beginning, or behind "(", ",", "[" or a relation, is a sign, which has no space behind it.
        sign = r"(<mrow>|<mo[^>]*>&#x0(?:0028|002C|003C|003D|003E|005B|2208|2264|2265);</mo>)<mo>&#x02212;</mo>"
        return re.sub(sign, r'\1<mo form="prefix">&#x02212;</mo>', found)

    return re.sub(r"\\([(\[])(.*?)\\[)\]](?=</(?:span|div)>)", mathml, content, flags=re.DOTALL)
