"""What an import brings in, and which module may import which."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torch_specops
from torch_specops.ops import registration

PACKAGE = Path(torch_specops.__file__).parent

# module or folder of the package -> what else of the package it may import; "__init__" means a public name
ALLOWED = {
    "__init__": {"decode", "drafts", "grammars", "models/conversion", "ops", "sampling"},
    "cli": {"__init__", "checks", "decode", "drafts", "hf", "plot", "sampling"},
    "plot": {"decode"},
    "hf/__init__": {"decode", "hf", "hf/door"},
    "hf/door": {"checks", "decode", "drafts", "grammars", "hf", "sampling", "schedules"},
    "beam": {"checks", "decode", "drafts", "models", "models/conversion", "ops"},
    "decode": {
        *("checks", "compilation", "drafts", "grammars", "models", "models/conversion", "ops"),
        *("progress", "sampling", "schedules"),
    },
    "drafts": {"checks", "compilation", "hf", "models", "models/conversion", "ops", "sampling"},
    "models/conversion": {"hf", "models"},
    "hf": {"models", "ops"},
    "models": {"ops"},
    "grammars": {"ops"},
    "sampling": {"checks", "ops"},
    "compilation": {"ops"},
    "inductor": {"ops"},
    "vocab_parallel": {"checks", "ops", "ops/cpu"},
    "ops": {"checks", "ops/cpu", "ops/cuda"},
    "ops/cpu": {"ops/arguments", "ops/tracing", "ops/uniforms"},
    "ops/cuda": {"ops/arguments", "ops/private"},
    "analysis": {"checks"},
    "schedules": {"checks"},
    "testing": {"checks", "progress", "reference", "sampling"},
    "progress": set(),
    "checks": set(),
    "reference": set(),
}
# third-party package -> the modules that may import it
ALLOWED_THIRD_PARTY = {
    "torch": set(ALLOWED),
    "numpy": {"drafts", "ops/cpu"},
    "triton": {"ops/cuda"},
    "transformers": {"cli", "hf", "hf/door"},
    "tokenizers": {"cli"},
    "torchao": {"drafts"},
    "matplotlib": {"cli", "plot"},
    "safetensors": {"models"},
    "huggingface_hub": {"cli", "models"},
    "rich": {"cli"},
    "tqdm": {"progress"},
    "typing_extensions": {"decode"},
    "typer": {"cli"},
    # The program around the commands.
    "torch_specops_command": {"cli"},
    "xgrammar": {"grammars"},
    "llguidance": {"grammars"},
}

MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


def layer(path: str) -> str:
    """The room of a module: the first part of its path, or a part of that room that has rules of its own."""
    first, *rest = path.removesuffix(".py").split("/")
    return "/".join([first, rest[0]]) if rest and f"{first}/{rest[0]}" in ALLOWED else first


LAYERS = {layer(path) for path in MODULES}


parse = functools.cache(ast.parse)


def imports(path: str, source: str) -> set[str]:
    """What a module of the package imports, anywhere in its text: absolute names, ours spelled out."""
    package = ["torch_specops", *path.split("/")[:-1]]
    names: set[str] = set()
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from . import checks` names a module, `from .checks import f` something in it.
            is_ours = module.split(".")[0] == "torch_specops"
            is_package = is_ours and (PACKAGE.parent / module.replace(".", "/")).is_dir()
            names.update([f"{module}.{alias.name}" for alias in node.names] if is_package else [module])
    return names


def forbidden(path: str, source: str) -> set[str]:
    """The imports of a module that break the rules above."""
    own = layer(path)
    bad = set()
    for name in imports(path, source):
        parts = name.split(".")
        if parts[0] == "torch_specops":
            target = layer("/".join(parts[1:])) if len(parts) > 1 and parts[1] in LAYERS | set(ALLOWED) else "__init__"
            # A part of a room may import some of its modules, and not the others.
            allowed = {target, "/".join(parts[1:3])} & ALLOWED[own]
            if target != own and not allowed:
                bad.add(name)
        elif parts[0] not in sys.stdlib_module_names and own not in ALLOWED_THIRD_PARTY.get(parts[0], set()):
            bad.add(name)
    return bad


def test_imports_follow_the_layers() -> None:
    assert set(ALLOWED) >= LAYERS
    assert not [path for path in MODULES if "utils" in Path(path).stem]
    broken = {path: forbidden(path, (PACKAGE / path).read_text()) for path in MODULES}
    assert {path: names for path, names in broken.items() if names} == {}


def test_a_forbidden_import_is_caught() -> None:
    for path, source, name in (
        ("ops/cpu/exact.py", "from ..api import sample", "torch_specops.ops.api"),
        ("ops/uniforms.py", "from torch_specops import sample", "torch_specops.sample"),
        ("ops/api.py", "def f():\n    from .cuda import exact\n    from ..decode import x", "torch_specops.decode.x"),
        ("ops/cuda/launch.py", "from ...checks import check_int", "torch_specops.checks"),
        ("hf/models.py", "from .door import patch", "torch_specops.hf.door.patch"),
        ("models/base.py", "def f():\n    from ..hf import language_model", "torch_specops.hf.language_model"),
        ("drafts/model.py", "if True:\n    import transformers.generation", "transformers.generation"),
        ("hf.py", "import requests", "requests"),
    ):
        assert forbidden(path, source) == {name}, path
    allowed = "import math\nimport triton\nfrom torch.library import custom_op\nfrom ..arguments import F"
    assert forbidden("ops/cuda/launch.py", allowed) == set()


# Attributes that look private: those of named tuples, and an operator of the documented Core ATen IR.
PUBLIC = {"_asdict", "_replace", "_fields", "_to_copy"}


def private_names(path: str, source: str) -> set[str]:
    """The private names of torch and Triton in a module's code: imports, and attributes of anything but `self`.

    Modules that handle transformers read attributes of its objects and of `nn.Module`; there only what hangs on `torch`
    or `triton` itself counts.
    """
    names = {name for name in imports(path, source) if "._" in name and name.startswith(("torch.", "triton."))}
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("torch", "triton"):
            names.update(f"{node.module}.{alias.name}" for alias in node.names if alias.name.startswith("_"))
        if not isinstance(node, ast.Attribute) or not node.attr.startswith("_") or node.attr.startswith("__"):
            continue
        root = ast.unparse(node).split(".")[0]
        is_checked = root in ("torch", "triton") or (
            root not in ("self", "cls", "super()") and not path.startswith("hf/")
        )
        names.update({ast.unparse(node)} if is_checked and node.attr not in PUBLIC else ())
    return names


def test_private_names_are_in_one_file() -> None:
    found = {path: private_names(path, (PACKAGE / path).read_text()) for path in MODULES}
    # Control: it has some.
    assert found.pop("ops/private.py")
    assert {path: names for path, names in found.items() if names} == {}
    for source in (
        "from torch._subclasses import fake_tensor",
        "def f():\n    from torch import _C",
        "import triton._C.libtriton",
        "x = torch.compile(torch._C._dynamo)",
        "def f(op):\n    return getattr(op, 'default', op)._schema",
    ):
        assert private_names("ops/api.py", source), source
    for path, source in (
        ("ops/api.py", "self._pieces = given._asdict() | x.__dict__"),
        ("hf/models.py", "model.config._attn_implementation"),
    ):
        assert private_names(path, source) == set()


def run_python(source: str) -> str:
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_import_needs_torch_and_numpy_alone() -> None:
    """Nothing else that is installed. Submodules are loaded when they are used; so are `hf` and `inductor`, which take
    long."""
    names = sorted(set(torch_specops._LOADED_WHEN_USED) - {"hf", "inductor"})
    first, second, last = run_python(f"""
import sys, numpy, torch
before = set(sys.modules)
import torch_specops
print(*set(sys.modules) - before)

absent = {{"triton", "transformers", "typer", "rich"}} - set(sys.modules)
assert "transformers" in absent
sys.modules |= dict.fromkeys(absent)
seeds, positions = torch.tensor([1, 2]), torch.tensor([0, 0])
target, draft = torch.zeros(2, 3, 5), torch.zeros(2, 2, 5)
propose, accept = (torch_specops.uniforms(seeds, positions, 2, stream) for stream in ("propose", "accept"))
tokens, lse = torch_specops.sample(draft.flatten(0, 1), propose.flatten())
for op in torch_specops.verify_exact, torch_specops.verify_block, torch_specops.verify_sigmoid:
    output, num_accepted = op(target, tokens.view(2, 2), draft, accept, torch.zeros(2))
    assert num_accepted.tolist() == [2, 2], num_accepted
assert torch_specops.verify_gumbel(target, tokens.view(2, 2), seeds, positions)[0].shape == (2, 3)
torch_specops.filter_logits(draft[:, 0], top_p=torch.tensor([0.5, 1.0]))
# It takes seconds to import.
assert "torch._dynamo" not in sys.modules
for name in absent:
    del sys.modules[name]

import pytest
print(*set(sys.modules) - before)
assert not torch.cuda.is_initialized()
print(*(getattr(torch_specops, name).__name__ for name in {names}))
""").splitlines()
    installed = importlib.metadata.packages_distributions().keys()
    ours, more = (
        {name.split(".")[0] for name in line.split()} & {"torch_specops", *installed} for line in (first, second)
    )
    assert ours == {"torch_specops"}
    # Control: an import is seen.
    assert "pytest" in more
    assert last.split() == [f"torch_specops.{name}" for name in names]
    assert not set(last.split()) & set(first.split())


@pytest.mark.slow
def test_transformers_is_changed_for_custom_generate_alone() -> None:
    first, second = run_python("""
import torch_specops, transformers
from torch_specops.hf import TransformersModel
print("torch_specops" in transformers.GenerationMixin._extract_generation_mode_kwargs.__code__.co_filename)
torch_specops.hf.custom_generate
print("torch_specops" in transformers.GenerationMixin._extract_generation_mode_kwargs.__code__.co_filename)
""").splitlines()
    assert (first, second) == ("False", "True")


def test_compile_cache_tag_has_compiled_code() -> None:
    """An edit of a kernel or of the dense form must empty torch's caches; one of the command line must not."""
    hashed = {path.relative_to(PACKAGE).as_posix() for path in registration.compiled_sources()}
    assert {"checks.py", "ops/api.py", "ops/cpu/exact.py", "ops/cuda/filter/bounds.py", "ops/uniforms.py"} <= hashed
    assert {layer(path) for path in hashed} == {"checks", "ops", "ops/cpu", "ops/cuda"}
    assert registration.digest(registration.compiled_sources()) in torch.compiler.config.cache_key_tag
    assert registration.digest([PACKAGE / "ops/api.py"]) != registration.digest([PACKAGE / "checks.py"])
