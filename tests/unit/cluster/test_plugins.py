"""Commands of other packages: handed their whole command line, loaded only when called, and missed with a clear word."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest
import typer

from cluster.errors import ClusterError
from cluster.plugins import GROUP, add_plugins, installed_plugins

seen: list[object] = []


def make_example() -> typer.Typer:
    app = typer.Typer()

    @app.command("work")
    def work(name: str, times: int = 1) -> None:
        seen.append((name, times))

    @app.command("fail")
    def fail() -> None:
        raise ClusterError("it did not work")

    return app


def app_with(value: str) -> typer.Typer:
    app = typer.Typer()
    add_plugins(app, [importlib.metadata.EntryPoint("example", value, GROUP)])
    app.command("other")(lambda: None)
    return app


def test_a_plugin_gets_its_command_line() -> None:
    app_with(f"{__name__}:make_example")(args=["example", "work", "x", "--times", "3"], standalone_mode=False)
    assert seen.pop() == ("x", 3)


def test_its_errors_pass_through() -> None:
    with pytest.raises(ClusterError, match="it did not work"):
        app_with(f"{__name__}:make_example")(args=["example", "fail"], standalone_mode=False)


def test_it_is_loaded_only_when_it_is_called() -> None:
    app_with("nowhere_at_all:make")(args=["other"], standalone_mode=False)


def test_a_missing_package_is_named_with_the_extra_to_install() -> None:
    with pytest.raises(ClusterError, match=r"needs the package nowhere_at_all: pip install 'kvrelay\[example\]'"):
        app_with("nowhere_at_all:make")(args=["example"], standalone_mode=False)


def test_bench_is_one_and_no_other_command_loads_it() -> None:
    assert "bench" in [one.name for one in installed_plugins()]
    heavy = {"benchmarks", "matplotlib", "torch"}
    code = f"import sys, cluster.cli; cluster.cli.make_app(); print(sorted({heavy} & set(sys.modules)))"
    outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert outcome.stdout.strip() == "[]"
