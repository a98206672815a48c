"""The rooms of the package: who may import whom, what an import must not do, and how long a file may be."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fastft

PACKAGE = Path(fastft.__file__).parent
FILES = sorted(path for path in PACKAGE.rglob("*.py"))
MAX_LINES = 400

BOTTOM = {"errors"}
# Room -> the rooms it may import, itself aside. An operation is a room of its own: it never sees another one.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "config": BOTTOM,
    "family_spec": BOTTOM,
    "environment": BOTTOM,
    "capability": BOTTOM | {"environment"},
    "packing": BOTTOM,
    "unpadding": BOTTOM | {"packing"},
    "ops": BOTTOM | {"capability"},
    # The boundaries are its input, and PackedSequences is data: it imports nothing but torch.
    "ops.attention": BOTTOM | {"capability", "ops", "packing"},
    "memory": BOTTOM | {"capability"},
    "modules": BOTTOM | {"capability", "config", "family_spec", "packing", "unpadding", "memory", "ops"},
    "families": BOTTOM | {"config", "family_spec"},
    "integrations": BOTTOM | {"capability", "config", "family_spec", "packing", "memory", "ops", "modules"},
    # What a model's code looks like, read for the plan.
    "code_reading": set(),
    "isolation": {"code_reading"},
    "structure": BOTTOM | {"config", "family_spec", "families", "code_reading", "isolation"},
    # It asks each operation whether it can run.
    "choices": BOTTOM | {"capability", "ops", "modules"},
    "configs": BOTTOM | {"modules"},
    "model_report": {"plan", "memory"},
    # A plan computes nothing.
    "plan": BOTTOM
    | {"capability", "choices", "config", "family_spec", "families", "structure", "isolation", "packing", "ops"}
    | {"modules", "integrations", "memory"},
}
# The top: patch.py sits above plan.py, cli.py, the demo and the measurements above everything.
ANYTHING = {"", "cli", "demo", "bench", "patch"}
# Third-party packages that a room may name at all, on top of the standard library. The top may name any.
LIBRARIES = {
    "errors": set(),
    "config": set(),
    "family_spec": set(),
    "families": set(),
    "environment": {"torch", "triton"},
    "capability": {"torch"},
    "packing": {"torch"},
    "unpadding": {"torch"},
    "ops": {"torch", "triton"},
    "memory": {"torch"},
    "modules": {"torch", "transformers"},
    "integrations": {"torch", "transformers", "peft", "trl", "bitsandbytes", "accelerate"},
    "code_reading": set(),
    "isolation": {"torch"},
    "structure": {"torch", "transformers"},
    "choices": {"torch"},
    "configs": {"torch"},
    "model_report": set(),
    "plan": {"torch"},
}


def module_name(path: Path) -> str:
    """The dotted name below the package: "ops.rope.api", "" for the package itself."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").rstrip(".")


# What several operations are made of.
SHARED_BY_OPS = {
    "adapter_casts", "compiling", "first_order", "kept", "launching", "layouts", "low_rank_update",
    "packed_weight", "products", "selection", "tiles", "triton_activations", "triton_low_rank", "triton_pairs",
}  # fmt: skip


def room_of(module: str) -> str:
    parts = module.split(".")
    if parts[0] == "ops" and len(parts) > 1 and parts[1] not in SHARED_BY_OPS:
        return ".".join(parts[:2])
    return parts[0]


def imports(path: Path, *, at_import_only: bool = False) -> Iterator[tuple[int, str]]:
    """(line, absolute module) of every import, `if TYPE_CHECKING` aside."""
    package = list(path.relative_to(PACKAGE.parent).parts[:-1])
    queue: list[ast.AST] = [ast.parse(path.read_text())]
    while queue:
        node = queue.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if at_import_only and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:  # `from . import x` may name a module or a name inside of one
                yield node.lineno, f"{stem}.{alias.name}"
        queue.extend(ast.iter_child_nodes(node))


def below_package(target: str) -> str | None:
    """A module of ours below the package, cut back to an existing file; None for other people's."""
    parts = target.split(".")
    if parts[0] != PACKAGE.name:
        return None
    parts = parts[1:]
    while parts and not (PACKAGE.joinpath(*parts).is_dir() or PACKAGE.joinpath(*parts).with_suffix(".py").is_file()):
        parts.pop()
    return ".".join(parts)


def violations(path: Path) -> list[str]:
    room, found = room_of(module_name(path)), []
    if room in ANYTHING:
        return found
    allowed = ALLOWED.get(room, ALLOWED["ops"] | {"ops"} if room.startswith("ops.") else set())
    libraries = LIBRARIES.get(room.partition(".")[0], set())
    for line, target in imports(path):
        ours = below_package(target)
        if ours is None:
            library = target.partition(".")[0]
            if library not in libraries and library not in sys.stdlib_module_names:
                found.append(f"{path}:{line}: {room} imports {library}")
            continue
        other = room_of(ours)
        reachable = other == room or other in allowed
        if other.startswith("ops.") and not room.startswith("ops"):
            reachable = "ops" in allowed
        if not reachable:
            found.append(f"{path}:{line}: {room} imports fastft.{ours}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: module_name(path) or "fastft")
def test_imports_only_point_down(path):
    assert violations(path) == []


def test_every_room_has_a_rule():
    rooms = {room_of(module_name(path)).partition(".")[0] for path in FILES}
    assert rooms <= ALLOWED.keys() | ANYTHING


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("ops/rope/api.py", "from ...packing import PackedSequences"),
        ("ops/rope/api.py", "from ..rms_norm import rms_norm"),
        ("ops/attention/api.py", "import transformers"),
        ("ops/selection.py", "from .rope import rope_qk"),
        ("packing.py", "from .capability import probe"),
        ("modules/norm.py", "from ..plan import Plan"),
        ("modules/norm.py", "from .. import patch"),
        ("modules/norm.py", "def f():\n    from fastft.integrations import peft"),
        ("families/llama.py", "import torch"),
        ("capability.py", "import triton"),
        ("errors.py", "from . import config"),
    ],
)
def test_the_rules_catch_an_import_that_points_up(file, line, tmp_path, monkeypatch):
    for path in FILES:
        copy = tmp_path / "fastft" / path.relative_to(PACKAGE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text())
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path / "fastft")
    changed = tmp_path / "fastft" / file
    assert violations(changed) == []
    changed.write_text(f"{changed.read_text()}\n{line}\n")
    assert len(violations(changed)) == 1


@pytest.mark.parametrize("path", [p for p in FILES if "ops" in p.parts], ids=module_name)
def test_kernels_and_references_are_independent(path):
    """The reference is the oracle of the kernel, so neither may lean on the other."""
    own = {ours for _, target in imports(path) if (ours := below_package(target))}
    if path.stem.startswith("triton"):
        assert not any(ours.endswith(".reference") for ours in own)
    if path.name == "reference.py":
        assert not any(".triton" in ours or ours.endswith((".launch", ".autograd")) for ours in own)


@pytest.mark.parametrize("path", FILES, ids=lambda path: module_name(path) or "fastft")
def test_triton_is_imported_by_kernel_files_only(path):
    triton = [line for line, target in imports(path) if target.partition(".")[0] == "triton"]
    assert not triton or path.stem.startswith("triton") or module_name(path) == "environment"
    if path.name == "api.py":
        kernels = [t for _, t in imports(path, at_import_only=True) if ".triton" in (below_package(t) or "")]
        assert not kernels


@pytest.mark.parametrize("path", FILES, ids=lambda path: module_name(path) or "fastft")
def test_files_are_short_and_run_no_text(path):
    text = path.read_text()
    assert len(text.splitlines()) < MAX_LINES
    called = {
        node.func.id
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not called & {"exec", "eval", "compile"}


# ------------------------------------------------------------------------------------------------ fresh processes


def run(code: str) -> str:
    variables = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    variables.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_loads_nothing_heavy():
    heavy = "{'torch', 'triton', 'transformers', 'trl', 'peft', 'accelerate', 'bitsandbytes', 'numpy', 'rich'}"
    code = f"import sys, fastft; print(sorted({heavy} & set(sys.modules)), fastft.__version__, dir(fastft)[0])"
    assert run(code).startswith("[]")


def test_import_of_every_operation_touches_no_gpu_and_no_triton():
    code = """
import sys, torch
before = set(sys.modules)
import fastft.ops.attention, fastft.ops.rms_norm, fastft.ops.rope, fastft.ops.lora_linear, fastft.packing
import fastft.ops.gated_mlp, fastft.ops.linear_cross_entropy, fastft.ops.moe
added = {name.partition(".")[0] for name in set(sys.modules) - before}
print(sorted(added & {"triton", "transformers", "trl", "peft", "torch._dynamo"}), torch.cuda.is_initialized())
"""
    assert run(code) == "[] False"


def test_plain_torch_paths_run_with_triton_blocked():
    code = """
import sys
sys.modules["triton"] = None  # an import of it raises
import torch
from fastft import PackedSequences
from fastft.ops.attention import varlen_attention
from fastft.ops.gated_mlp import gated_linear
from fastft.ops.linear_cross_entropy import linear_cross_entropy
from fastft.ops.rms_norm import rms_norm
from fastft.ops.rope import rope_qk
packed = PackedSequences.from_lengths([3, 2], "cpu")
x = torch.randn(5, 2, 8, requires_grad=True)
angles = torch.randn(5, 4)
q, k = rope_qk(x, x, angles.cos(), angles.sin())
out = rms_norm(varlen_attention(q, k, x, packed), torch.ones(8), 1e-6)
out = gated_linear(out, out, "silu", torch.ones(3, 8))
linear_cross_entropy(out[:, 0], torch.ones(9, 3), torch.arange(5)).backward()
print(bool(x.grad.isfinite().all()))
"""
    assert run(code) == "True"
