from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest
from msgspec import Meta

from coordinator.settings import CoordinatorSettings
from decode_service.settings import DecodeSettings
from prefill_service.settings import PrefillSettings
from service_kit.errors import SettingsError
from service_kit.settings import leaves_of, load_settings, settings_environ, variable_names, without_settings
from service_kit.units import ByteSize


class Inner(msgspec.Struct, frozen=True):
    size: ByteSize = ByteSize(1)
    names: tuple[str, ...] = ("a",)
    cpu_ids: tuple[int, ...] = ()


class Sample(msgspec.Struct, frozen=True):
    inner: Inner = Inner()
    count: Annotated[int, Meta(ge=1, description="how many")] = 3
    mode: Literal["fast", "slow"] = "fast"
    flag: bool = False
    limit: int | None = None
    place: Path | None = None
    ratio: float = 0.5

    def __post_init__(self) -> None:
        if self.count > 100:
            raise ValueError("count: at most 100")


def load(
    environ: dict[str, str] | None = None, toml: Path | None = None, section: str = "decode", **overrides: object
) -> Sample:
    return load_settings(Sample, section, overrides=overrides, environ=environ or {}, toml_path=toml)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_each_source_beats_the_ones_behind_it(tmp_path: Path) -> None:
    # 1. Nothing given: defaults.
    assert load().count == 3
    # 2. The table for all workers, then the section's own.
    toml = write(tmp_path / "a.toml", "[worker]\ncount = 4\nratio = 1.0\n[decode]\ncount = 5\n[prefill]\ncount = 50\n")
    assert load(toml=toml).count == 5
    assert load(toml=toml).ratio == 1.0
    # 3. The environment, general and then specific.
    assert load({"KVRELAY_COUNT": "6"}, toml).count == 6
    assert load({"KVRELAY_COUNT": "6", "KVRELAY_DECODE_COUNT": "7"}, toml).count == 7
    # 4. The command line; None means not given.
    assert load({"KVRELAY_COUNT": "6"}, toml, count="8").count == 8
    assert load({"KVRELAY_COUNT": "6"}, toml, count=None).count == 6


def test_text_becomes_typed_values() -> None:
    settings = load(
        {
            "KVRELAY_SIZE": "2GiB",
            "KVRELAY_NAMES": "shm, zmq",
            "KVRELAY_CPU_IDS": "0,5",
            "KVRELAY_FLAG": "true",
            "KVRELAY_LIMIT": "9",
            "KVRELAY_PLACE": "~/models",
            "KVRELAY_RATIO": "1",
        }
    )
    assert settings.inner == Inner(size=ByteSize(2**31), names=("shm", "zmq"), cpu_ids=(0, 5))
    assert (settings.flag, settings.limit, settings.ratio) == (True, 9, 1.0)
    assert settings.place == Path("~/models").expanduser()


def test_empty_variables_count_as_unset() -> None:
    assert load({"KVRELAY_COUNT": "", "KVRELAY_DECODE_LIMIT": ""}) == Sample()


@pytest.mark.parametrize(
    ("environ", "key", "source"),
    [
        ({"KVRELAY_COUNT": "three"}, "count", "KVRELAY_COUNT"),
        ({"KVRELAY_COUNT": "0"}, "count", "KVRELAY_COUNT"),
        ({"KVRELAY_COUNT": "101"}, "count", "KVRELAY_COUNT"),
        ({"KVRELAY_DECODE_MODE": "quick"}, "mode", "KVRELAY_DECODE_MODE"),
        ({"KVRELAY_SIZE": "lots"}, "size", "KVRELAY_SIZE"),
        ({"KVRELAY_CONUT": "1"}, "KVRELAY_CONUT", "environment"),
        ({"KVRELAY_DECODE_CONUT": "1"}, "KVRELAY_DECODE_CONUT", "environment"),
        ({"KVRELAY_CONFIG": "/nowhere/k.toml"}, "KVRELAY_CONFIG", "/nowhere/k.toml"),
    ],
)
def test_a_wrong_variable_stops_the_start_with_its_name(environ: dict[str, str], key: str, source: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load(environ)
    assert caught.value.key == key
    assert source in str(caught.value)


def test_an_unknown_name_brings_the_likely_one() -> None:
    with pytest.raises(SettingsError, match="did you mean KVRELAY_COUNT"):
        load({"KVRELAY_CONUT": "1"})


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("[decode]\ncuont = 1\n", "cuont"),
        ("[worker]\ncuont = 1\n", "cuont"),
        ("[decoder]\ncount = 1\n", "decoder"),
        ("count = 1\n", "count"),
        ("[decode]\ncount = 'three'\n", "count"),
        ("[decode\n", "KVRELAY_CONFIG"),
    ],
)
def test_a_wrong_file_stops_the_start_with_the_name(tmp_path: Path, text: str, key: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load(toml=write(tmp_path / "b.toml", text))
    assert caught.value.key == key
    assert "b.toml" in str(caught.value)


def test_other_processes_settings_are_theirs_to_judge(tmp_path: Path) -> None:
    toml = write(tmp_path / "c.toml", "[coordinator]\nport = 1\n[up]\nanything = 2\n")
    assert (
        load({"KVRELAY_COORDINATOR_PORT": "1", "KVRELAY_CACHE": "/c", "KVRELAY_API_KEY": "k", "OTHER": "x"}, toml)
        == Sample()
    )
    with pytest.raises(SettingsError):
        load({"KVRELAY_PORT": "1"})
    known = variable_names(CoordinatorSettings)
    assert load_settings(Sample, "decode", overrides={}, environ={"KVRELAY_PORT": "1"}, known_variables=known) == Sample()


def test_the_file_is_found_by_its_variable(tmp_path: Path) -> None:
    toml = write(tmp_path / "d.toml", "[decode]\nnames = ['x', 'y']\n")
    assert load({"KVRELAY_CONFIG": str(toml)}).inner.names == ("x", "y")


def test_settings_survive_the_way_into_another_process() -> None:
    settings = load(size="3MiB", names="p,q", cpu_ids="1,2", flag="yes", place="/m", ratio="0.25", mode="slow")
    environ = settings_environ(settings, "decode")
    assert environ["KVRELAY_DECODE_NAMES"] == "p,q"
    assert load(environ) == settings
    assert settings_environ(Sample(), "decode") == {}


def test_a_child_inherits_no_setting() -> None:
    environ = {"PATH": "/bin", "KVRELAY_COUNT": "1", "KVRELAY_CONFIG": "x", "KVRELAY_CACHE": "/c", "KVRELAY_API_KEY": "k"}
    assert without_settings(environ) == {"PATH": "/bin", "KVRELAY_CACHE": "/c"}


def test_two_settings_of_one_name_are_a_mistake_of_ours() -> None:
    class Twice(msgspec.Struct, frozen=True):
        inner: Inner = Inner()
        size: int = 1

    with pytest.raises(TypeError, match="size"):
        leaves_of(Twice)


@pytest.mark.parametrize(
    ("settings_type", "section"),
    [(CoordinatorSettings, "coordinator"), (PrefillSettings, "prefill"), (DecodeSettings, "decode")],
)
def test_every_process_settings_load_describe_themselves_and_travel(
    settings_type: type[msgspec.Struct], section: str
) -> None:
    settings = load_settings(settings_type, section, overrides={"cpus": "0-1", "drain_s": "5"}, environ={})
    again = load_settings(settings_type, section, overrides={}, environ=settings_environ(settings, section))
    assert again == settings
    assert [leaf.name for leaf in leaves_of(settings_type) if not leaf.description] == []


def test_checks_that_a_struct_makes_itself_name_the_setting() -> None:
    wrong = [("cpus", "x"), ("listen", "tcp://1.2.3.4:5"), ("transport", "auto,zmq"), ("transport", "zmq,zmq")]
    for key, text in wrong:
        with pytest.raises(SettingsError) as caught:
            load_settings(DecodeSettings, "decode", overrides={key: text}, environ={})
        assert caught.value.key == key
        assert f"--{key}" in caught.value.source


@pytest.mark.parametrize(
    ("text", "order"), [("auto", ("shm", "zmq")), ("zmq, shm", ("zmq", "shm")), ("zmq", ("zmq",)), ("", ("shm", "zmq"))]
)
def test_the_order_of_transports(text: str, order: tuple[str, ...]) -> None:
    settings = load_settings(DecodeSettings, "decode", overrides={}, environ={"KVRELAY_TRANSPORT": text})
    assert settings.worker.transport_order == order


@pytest.mark.parametrize(("text", "size"), [("1", 1), ("2kb", 2000), ("2KiB", 2048), ("1.5 GB", 15 * 10**8), (7, 7)])
def test_sizes(text: object, size: int) -> None:
    assert ByteSize.parse(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1XB", True, -1, 1.5])
def test_what_is_no_size(text: object) -> None:
    with pytest.raises(ValueError, match="size"):
        ByteSize.parse(text)
