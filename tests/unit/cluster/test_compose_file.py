"""compose.yaml, its overrides and .env.example agree with each other and with the settings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.process_kinds import ALL_VARIABLES, PROCESS_KINDS
from service_kit.settings import leaves_of, load_settings

ROOT = Path(__file__).resolve().parents[3]
FILES = (ROOT / "compose.yaml", *sorted((ROOT / "deploy").glob("compose.*.yaml")))
BY_ENTRYPOINT = {"worker_id", "cluster_token_file"}
"""Settings that each container works out for itself."""
COMPOSE_DEFAULTS = {"transport", "listen", "coordinator"}
"""Settings whose default in containers is not the one of a process on its own."""


class Loader(yaml.SafeLoader):
    """Knows Compose's !reset."""


Loader.add_constructor("!reset", lambda loader, node: None)


def load(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.load(path.read_text(), Loader)
    return loaded


def example() -> dict[str, str]:
    lines = re.findall(r"^#([A-Z_]+)=(.*)$", (ROOT / ".env.example").read_text(), re.M)
    assert len(dict(lines)) == len(lines), "a variable is there twice"
    return dict(lines)


def variables_read(path: Path) -> set[str]:
    text = re.sub(r"(^|\s)#.*", "", path.read_text())
    read = set(re.findall(r"\$\{([A-Z_]+)", text))
    for service in load(path)["services"].values():
        environment = service.get("environment") or {}
        read |= {name for name, value in environment.items() if value is None}
    return read


def test_every_variable_is_in_the_example_and_the_other_way_round() -> None:
    assert set(example()) == set().union(*(variables_read(path) for path in FILES))


@pytest.mark.parametrize("section", list(PROCESS_KINDS))
def test_every_setting_can_be_set(section: str) -> None:
    environment = load(ROOT / "compose.yaml")["services"][section]["environment"]
    for leaf in leaves_of(PROCESS_KINDS[section].settings_type):
        names = {f"KVRELAY_{leaf.name.upper()}", f"KVRELAY_{section.upper()}_{leaf.name.upper()}"}
        if leaf.name in ("cpus", "threads") and section == "coordinator":
            continue  # it computes nothing heavy
        if leaf.name in ("faults", "faults_file"):
            continue  # for tests
        assert names & set(environment) or leaf.name in BY_ENTRYPOINT, leaf.name


@pytest.mark.parametrize("section", list(PROCESS_KINDS))
def test_the_example_shows_the_defaults(section: str) -> None:
    kind = PROCESS_KINDS[section]
    shown = {name: value for name, value in example().items() if name.startswith("KVRELAY_") and value}
    loaded = load_settings(kind.settings_type, section, overrides={}, environ=shown, known_variables=ALL_VARIABLES)
    for leaf in leaves_of(kind.settings_type):
        value: Any = loaded
        for name in leaf.path:
            value = getattr(value, name)
        assert value == leaf.default or leaf.name in COMPOSE_DEFAULTS, leaf.name


@pytest.mark.parametrize("service", ["init", "coordinator", "prefill", "decode"])
def test_every_service_is_hardened_and_can_be_scaled(service: str) -> None:
    definition = load(ROOT / "compose.yaml")["services"][service]
    assert definition["read_only"]
    assert definition["user"] == "10001:10001"
    assert definition["cap_drop"] == ["ALL"]
    assert "container_name" not in definition
    assert ("ports" in definition) == (service == "coordinator")
    assert ("healthcheck" in definition) == (service != "init")
