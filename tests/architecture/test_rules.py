"""The project's rules about its own source, as far as a program can check them."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = tuple(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["root_packages"])
MAX_LINES = 400


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def calls_and_imports(path: Path) -> set[str]:
    """Dotted names that a file calls, and modules that it imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call):
            found.add(ast.unparse(node.func))
    return found


def function_level_imports(path: Path) -> list[str]:
    lines = []
    for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(function):
                modules = (
                    [alias.name for alias in node.names]
                    if isinstance(node, ast.Import)
                    else [node.module or ""]
                    if isinstance(node, ast.ImportFrom)
                    else []
                )
                lines += [f"{named(path)}:{node.lineno}" for module in modules if module.split(".")[0] in PACKAGES]
    return lines


def test_imports_run_downward() -> None:
    """The contracts of pyproject.toml, which are the table of the design."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stdout + result.stderr


def test_no_function_imports_our_own_code() -> None:
    assert [line for path in sources(*PACKAGES) for line in function_level_imports(path)] == []


def test_no_file_is_too_long() -> None:
    lengths = {named(path): len(path.read_text(encoding="utf-8").splitlines()) for path in sources(*PACKAGES, "tests")}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


def test_nothing_executable_crosses_a_process_border() -> None:
    forbidden = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
    assert {named(path): bad for path in sources(*PACKAGES) if (bad := calls_and_imports(path) & forbidden)} == {}


def test_time_is_monotonic() -> None:
    """Two moments are never compared by a clock that can be set. Dates that only are shown come from `datetime`."""
    allowed = {"coordinator/api"}  # `created` of an OpenAI answer is a Unix time
    wrong = [
        named(path)
        for path in sources(*PACKAGES)
        if "time.time" in calls_and_imports(path) and not named(path).startswith(tuple(allowed))
    ]
    assert wrong == []


def test_package_files_are_empty() -> None:
    assert [named(path) for path in sources(*PACKAGES) if path.name == "__init__.py" and path.read_text().strip()] == []


def test_every_package_folder_is_a_package() -> None:
    folders = {path.parent for path in sources(*PACKAGES)}
    assert [named(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_every_package_is_installed() -> None:
    """pyproject.toml lists packages by name: one that is forgotten is missing from an installation."""
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    there = {".".join(path.parent.relative_to(ROOT).parts) for path in sources(*PACKAGES) if path.name == "__init__.py"}
    assert there - listed == set()
    assert listed - there == set()


def test_nothing_is_left_open() -> None:
    pattern = re.compile(r"\b(TODO|FIXME|XXX)\b|raise NotImplementedError|except:\s*$|except Exception:\s*pass")
    found = [
        f"{named(path)}:{number}"
        for path in sources(*PACKAGES)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]
    assert found == []


def test_the_names_of_our_packages_are_ours_alone() -> None:
    owners = importlib.metadata.packages_distributions()
    foreign = {name: set(owners.get(name, [])) - {"kvrelay"} for name in PACKAGES}
    assert {name: others for name, others in foreign.items() if others} == {}


def test_test_files_have_names_of_their_own() -> None:
    names = [path.name for path in sources("tests") if path.name != "conftest.py"]
    assert sorted(name for name in set(names) if names.count(name) > 1) == []


@pytest.mark.parametrize("package", [name for name in PACKAGES if name not in ("engine", "benchmarks")])
def test_importing_a_package_starts_nothing(package: str) -> None:
    """Every module of it, in a fresh interpreter: no thread, no socket, no handler."""
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sources(package)
        if path.name not in ("__init__.py", "__main__.py", "convert_process.py", "hub_process.py", "ucx.py")
    ]
    code = f"""
import importlib, logging, signal, socket, sys, threading
before = signal.getsignal(signal.SIGTERM)
made = []
original = socket.socket.__init__
def init(self, *arguments, **named):
    made.append(sys._getframe(1).f_code.co_filename)
    original(self, *arguments, **named)
socket.socket.__init__ = init
for name in {modules!r}:
    importlib.import_module(name)
assert threading.active_count() == 1, threading.enumerate()
assert [path for path in made if path.startswith({str(ROOT)!r} + "/{package}")] == [], made
assert signal.getsignal(signal.SIGTERM) is before
assert logging.getLogger().handlers == []
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
