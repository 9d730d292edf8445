"""Who imports whom, and what a missing DSL costs: its own port and nothing else."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from common import port_names

ROOT = Path(__file__).resolve().parent.parent
DSLS = ("triton", "tilelang", "cutlass")
# port: (its folder, the package it needs, how to get that)
NEEDS = {
    "triton": ("triton_impl", "triton", "pip install triton"),
    "tilelang": ("tilelang_impl", "tilelang", "pip install tilelang==0.1.13"),
    "cute": ("cute_impl", "cutlass", "pip install nvidia-cutlass-dsl apache-tvm-ffi"),
}
PORTS = [folder for folder, _, _ in NEEDS.values()]
MAY_IMPORT = {"common": set(), "reference": {"common"}, "primer": {"common"}, "harness": {"common", "reference"}} | {
    folder: {"common"} for folder in PORTS
}
PRIMER = {f"{name}_primer.py": dsl for name, (_, dsl, _) in NEEDS.items()}  # one file a language
PACKAGES = sorted(name for name in MAY_IMPORT if (ROOT / name).is_dir())


def fresh(code: str, *, interpret: bool = False, status: int = 0, first: str = "") -> subprocess.CompletedProcess[str]:
    """Runs Python code in a new process at the root of the repository; it must end with that status.

    first: code that every Python process runs before anything else, those that this one starts among them.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"OMP_NUM_THREADS": "1"}
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(first)
        environment["PYTHONPATH"] = os.pathsep.join((folder, str(ROOT)))
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == status, f"ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done


def blocking(package: str | None) -> str:
    """Code after which the package cannot be imported, as where it is not installed."""
    return f"import sys; sys.modules[{package!r}] = None\n" if package else ""


@cache
def ports_without(package: str | None) -> dict[str, str]:
    """What becomes of each port in a process without that package: `""` where it imports, else why not."""
    code = """
import json, common
def outcome(name):
    try:
        return common.port(name).name and ""
    except common.Unsupported as reason:
        return str(reason)
print(json.dumps({name: outcome(name) for name in common.port_names()}))
"""
    return json.loads(fresh(blocking(package) + code).stdout)


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """The top-level name of every absolute import of a file, wherever it stands, and whether it is at module level."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        at_top = node in tree.body
        if isinstance(node, ast.Import):
            yield from ((alias.name.split(".")[0], at_top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            assert node.module
            yield node.module.split(".")[0], at_top
        elif isinstance(node, ast.ImportFrom):
            # Above its own package there is nothing to import from.
            assert node.level <= len(path.relative_to(ROOT).parts) - 1, f"{path}:{node.lineno}"


@pytest.mark.parametrize("package", PACKAGES)
def test_common_is_at_the_bottom_the_harness_at_the_top_and_ports_do_not_meet(package: str) -> None:
    ours = {*MAY_IMPORT, "tests"}
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    for path in files:
        for name, _ in imports(path):
            forbidden = (ours - MAY_IMPORT[package] - {package}) & {name}
            assert not forbidden, f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize("package", PACKAGES)
def test_a_dsl_is_imported_by_its_own_port_only(package: str) -> None:
    own = {folder: dsl for folder, dsl, _ in NEEDS.values()}
    for path in sorted((ROOT / package).rglob("*.py")):
        for name, at_top in imports(path):
            if name in DSLS and name != (PRIMER.get(path.name) if package == "primer" else own.get(package)):
                # The harness may look whether one is there, once it is asked to.
                assert package == "harness", f"{path.relative_to(ROOT)} imports {name}"
                assert not at_top, f"{path.relative_to(ROOT)} imports {name} at module level"


def test_a_port_is_named_nowhere_but_in_the_registry() -> None:
    for package in ("common", "reference", "harness"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if path != ROOT / "common" / "ports.py":
                strings = [n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)]
                named = {s for s in strings if isinstance(s, str) and s.split(".")[0] in PORTS}
                assert not named, f"{path.relative_to(ROOT)} names {named}"


def test_the_contract_the_reference_and_the_harness_import_no_dsl() -> None:
    code = f"import common, reference, harness.cli, sys; print([n for n in {DSLS} if n in sys.modules])"
    assert fresh(code).stdout.strip() == "[]"


@pytest.mark.parametrize("package", DSLS)
def test_without_a_dsl_all_but_its_port_is_as_before(package: str) -> None:
    before, without = ports_without(None), ports_without(package)
    for name in port_names():
        folder, needed, remedy = NEEDS.get(name, ("", "", ""))
        if needed != package:
            assert without[name] == before[name]
        elif (ROOT / folder).is_dir():
            assert without[name] == f"the {name} port needs {package}, which is not installed: {remedy}"
        else:
            assert without[name] == f"the {name} port is not written yet"


@pytest.mark.parametrize("package", DSLS)
def test_without_a_dsl_the_reference_attends_and_differentiates(package: str) -> None:
    code = """
import torch, common, reference
q, k, v = (torch.randn(1, 2, 20, 16, requires_grad=True) for _ in range(3))
o = common.attention(q, k, v, causal=True, impl="reference")
torch.testing.assert_close(o, torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
o.sum().backward()
one = reference.FlashAttentionPytorch.apply(q[:, 0], k[:, 0], v[:, 0], True)
torch.testing.assert_close(one, o[:, 0])
"""
    fresh(blocking(package) + code)


@pytest.mark.parametrize("package", DSLS)
def test_without_a_dsl_the_harness_checks_the_reference_and_refuses_that_port(package: str) -> None:
    (name,) = (name for name, (_, needed, _) in NEEDS.items() if needed == package)
    code = """
import importlib, pkgutil, harness
from harness.cli import main
try:
    main(["run", "--impl", IMPL, "--suite", "quick", "--only", "one-query", "--no-timing"])
finally:
    for module in pkgutil.iter_modules(harness.__path__):
        if module.name != "__main__":
            importlib.import_module(f"harness.{module.name}")
"""
    alone = fresh(code.replace("IMPL", repr("reference")), first=blocking(package))
    assert "reference" in alone.stdout
    both = fresh(code.replace("IMPL", repr(f"reference,{name}")), status=2, first=blocking(package))
    assert ports_without(package)[name] in both.stderr
    assert "reference" in both.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU an interpreting process is not the usual one")
def test_triton_on_the_cpu_without_its_interpreter_says_what_to_do() -> None:
    code = """
import torch, common
q = torch.zeros(1, 1, 16, 16)
try:
    common.attention(q, q, q, impl="triton")
except common.Unsupported as reason:
    print(reason)
"""
    printed = fresh(code).stdout
    assert "Triton compiles for CUDA devices, the tensors are on cpu" in printed
    assert "set TRITON_INTERPRET=1" in printed
    assert fresh(code, interpret=True).stdout == ""


@pytest.mark.parametrize("package", DSLS)
def test_an_explicit_request_is_never_answered_by_another_port(package: str) -> None:
    (name,) = (name for name, (_, needed, _) in NEEDS.items() if needed == package)
    code = f"""
import torch, common
q = torch.zeros(1, 1, 16, 16)
try:
    common.attention(q, q, q, impl={name!r})
except common.Unsupported as reason:
    print(reason)
"""
    assert fresh(blocking(package) + code, interpret=True).stdout.strip() == ports_without(package)[name]
