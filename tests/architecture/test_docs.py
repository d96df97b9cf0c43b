"""What the documents say of the code, checked as far as a program can: links, folders, settings, fields, metrics, ADRs."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from cluster.up_settings import UpSettings
from coordinator.api import schemas
from coordinator.assignments import Assignments
from coordinator.cluster_metrics import ClusterMetrics
from coordinator.cluster_view import ClusterView
from coordinator.metrics import RequestMetrics
from coordinator.placement_settings import PlacementSettings
from coordinator.settings import CoordinatorSettings
from decode_service.settings import DecodeSettings
from engine.model_families import FAMILIES
from prefill_service.settings import PrefillSettings
from service_kit.settings import leaves_of
from service_kit.units import ByteSize
from service_kit.worker_metrics import WORKER_METRICS

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
ADRS = sorted((ROOT / "docs" / "adr").glob("*.md"))
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
ADR_HEADINGS = ("Context", "What was measured or seen", "Decision", "Consequences", "Alternatives")


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def anchor_of(heading: str) -> str:
    """As GitHub makes it: lower case, blanks to hyphens, everything else but word characters dropped."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors_of(path: Path) -> set[str]:
    prose = FENCED.sub("", path.read_text(encoding="utf-8"))
    return {anchor_of(match) for match in re.findall(r"^#+ (.+)$", prose, re.MULTILINE)}


def section(text: str, heading: str) -> str:
    """What stands under `## heading`, up to the next one of its level."""
    _, found, rest = text.partition(f"\n## {heading}\n")
    assert found, heading
    return rest.partition("\n## ")[0]


def names_in(text: str) -> set[str]:
    return {word for code in CODE.findall(FENCED.sub("", text)) for word in re.findall(r"\w+", code)}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    broken = []
    for target in LINK.findall(FENCED.sub("", document.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (document.parent / name) if name else document
        if not path.exists() or (anchor and anchor not in anchors_of(path)):
            broken.append(target)
    assert broken == []


def test_the_settings_table_is_the_settings() -> None:
    """Both ways, with the defaults."""
    settings = section(text_of("docs/operations.md"), "Settings")
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", settings, re.MULTILINE)
    documented = dict(rows)
    assert len(documented) == len(rows), "a setting stands there twice"
    types = (UpSettings, CoordinatorSettings, PrefillSettings, DecodeSettings)
    known = {leaf.name: leaf.default for settings_type in types for leaf in leaves_of(settings_type)}
    assert documented.keys() == known.keys()
    assert {name: cell for name, cell in documented.items() if not shows(cell, known[name])} == {}


def shows(cell: str, default: object) -> bool:
    if default in (None, "", ()):
        return cell == "–"
    if isinstance(default, bool):
        return cell == str(default).lower()
    if isinstance(default, tuple):
        return cell == ",".join(default)
    if isinstance(default, ByteSize):
        return ByteSize.parse(cell) == default
    return cell == (f"{default:g}" if isinstance(default, float) else str(default))


def test_every_metric_is_listed() -> None:
    registry = CollectorRegistry()
    RequestMetrics(registry)
    ClusterMetrics(registry, ClusterView(PlacementSettings(), 0.0), Assignments(), {}, lambda: 0)
    families = {(metric.name, metric.type) for metric in registry.collect()} | {(m.name, m.kind) for m in WORKER_METRICS}
    exposed = {name + ("_total" if kind == "counter" else "") for name, kind in families}
    written = {name for name in names_in(section(text_of("docs/operations.md"), "Metrics")) if name.startswith("kvrelay_")}
    assert written == exposed


def test_every_field_of_a_request_is_listed() -> None:
    written = names_in(text_of("docs/api.md"))
    models = (
        schemas.CompletionRequest,
        schemas.ChatRequest,
        schemas.ChatMessage,
        schemas.TextPart,
        schemas.StreamOptions,
        schemas.TokenizeRequest,
        schemas.DetokenizeRequest,
    )
    fields = {name for model in models for name in model.model_fields}
    refused = {*schemas.REFUSED_IN_COMPLETIONS, *schemas.REFUSED_IN_CHAT}
    assert (fields | refused) - written == set()


def test_every_model_family_is_listed() -> None:
    models = section(text_of("README.md"), "Models")
    assert set(FAMILIES) - names_in(models) == set()


def test_the_folder_map_is_the_tree() -> None:
    folders = re.findall(r"^\| `([\w/]+)/` \|", section(text_of("ARCHITECTURE.md"), "Folders"), re.MULTILINE)
    assert [name for name in folders if not (ROOT / name).is_dir()] == []
    packages = tomllib.loads(text_of("pyproject.toml"))["tool"]["setuptools"]["packages"]
    assert {name.replace(".", "/") for name in packages} - set(folders) == set()


def test_files_that_the_architecture_names_exist() -> None:
    """A path from the root must be there; a bare file name must be somewhere in our packages."""
    names = {path.name for path in ROOT.glob("*/**/*.py") if not path.relative_to(ROOT).parts[0].startswith(".")}
    missing = []
    for code in CODE.findall(FENCED.sub("", text_of("ARCHITECTURE.md"))):
        if re.fullmatch(r"[\w/]+\.py", code) and not ((ROOT / code).is_file() or ("/" not in code and code in names)):
            missing.append(code)
    assert missing == []


def test_decisions_are_numbered_without_a_gap() -> None:
    assert [path.name[:5] for path in ADRS] == [f"{number:04d}-" for number in range(1, len(ADRS) + 1)]


@pytest.mark.parametrize("adr", ADRS, ids=lambda path: path.stem)
def test_a_decision_says_everything(adr: Path) -> None:
    text = adr.read_text(encoding="utf-8")
    assert re.match(rf"# {int(adr.name[:4])}\. \S", text)
    assert tuple(re.findall(r"^## (.+)$", text, re.MULTILINE)) == ADR_HEADINGS
    assert all(section(text, heading).strip() for heading in ADR_HEADINGS)


def test_every_case_that_the_api_names_has_a_test() -> None:
    cases = set(re.findall(r"\b[A-L]\d{1,2}\b", text_of("docs/api.md")))
    tests = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    held = {part for text in tests for name in re.findall(r"def test_(\w+)", text) for part in name.split("_")}
    assert cases
    assert cases - held == set()
