"""How every process gets its settings: command line > environment > TOML file > defaults.

A process' settings are one frozen msgspec Struct, composed of smaller ones. Their leaves are addressed by flat names, so
that a setting is called the same wherever it is given (field `block_size`, section `decode`):

    command line    --block-size 32
    environment     KVRELAY_DECODE_BLOCK_SIZE=32, or KVRELAY_BLOCK_SIZE=32 for every process that has the setting
    TOML file       [decode] block_size = 32, or [worker] block_size = 32 for prefill and decode workers;
                    KVRELAY_CONFIG names the file

Empty variables count as unset (Compose makes such). A value that does not fit, a TOML key or a KVRELAY_ variable that means
nothing stops the start with a `SettingsError` that names it. Variables and tables of other sections are theirs to judge.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import msgspec

from service_kit.errors import SettingsError
from service_kit.units import ByteSize

SettingsT = TypeVar("SettingsT", bound=msgspec.Struct)

PREFIX = "KVRELAY_"
CONFIG_VARIABLE = "KVRELAY_CONFIG"
API_KEY_VARIABLE = "KVRELAY_API_KEY"
INHERITED_VARIABLES = frozenset({"KVRELAY_CACHE", "KVRELAY_TORCH_INDEX_URL"})
RESERVED_VARIABLES = INHERITED_VARIABLES | {CONFIG_VARIABLE, API_KEY_VARIABLE}
"""Variables that are no settings. They are read by this module, `kvrelay status`, the model store and scripts/setup."""

_SWITCHES = {"on": "true", "yes": "true", "off": "false", "no": "false"}  # beside msgspec's true, false, 1, 0
SECTIONS = ("coordinator", "prefill", "decode", "up")
SHARED_SECTION = {"prefill": "worker", "decode": "worker"}
"""TOML tables that hold defaults for several sections."""


class Leaf(msgspec.Struct, frozen=True):
    """One setting: the flat name, its type, default, description, and the attributes that lead to it."""

    name: str
    type: Any
    default: Any
    description: str
    path: tuple[str, ...]


def load_settings(
    settings_type: type[SettingsT],
    section: str,
    *,
    overrides: Mapping[str, object],
    environ: Mapping[str, str],
    toml_path: Path | None = None,
    known_variables: Collection[str] = (),
) -> SettingsT:
    """Settings of one process.

    Args:
        overrides: flat names to values from the command line; None = not given.
        toml_path: the file to read; None = the one that KVRELAY_CONFIG names, if any.
        known_variables: variables without a section that other processes understand, for a caller who starts several.

    Raises:
        SettingsError
    """
    leaves = {leaf.name: leaf for leaf in leaves_of(settings_type)}
    if toml_path is None and environ.get(CONFIG_VARIABLE):
        toml_path = Path(environ[CONFIG_VARIABLE])
    given = _from_toml(toml_path, section, leaves) if toml_path is not None else {}
    given |= _from_environ(environ, section, leaves, known_variables)
    for name, value in overrides.items():
        if value is not None:
            _require_known(name, leaves, "command line")
            given[name] = (value, f"command line, --{option_name(name)}")
    values = {name: _convert(leaves[name], value, source) for name, (value, source) in given.items()}
    sources = {name: source for name, (_, source) in given.items()}
    return _build(settings_type, section, values, sources)


def leaves_of(settings_type: type[msgspec.Struct], path: tuple[str, ...] = ()) -> list[Leaf]:
    """The settings of a Struct and of the Structs in it, in order. Flat names must be unique: a repeated one raises."""
    leaves: list[Leaf] = []
    for field in msgspec.structs.fields(settings_type):
        field_type, description = _without_meta(field.type)
        if isinstance(field_type, type) and issubclass(field_type, msgspec.Struct):
            leaves += leaves_of(field_type, (*path, field.name))
        else:
            leaves.append(Leaf(field.name, field.type, _default_of(field), description, (*path, field.name)))
    names = [leaf.name for leaf in leaves]
    if len(set(names)) != len(names):
        raise TypeError(f"{settings_type.__name__} has two settings of one name among {sorted(names)}")
    return leaves


def variable_names(settings_type: type[msgspec.Struct]) -> set[str]:
    """The variables without a section that `settings_type` understands."""
    return {PREFIX + leaf.name.upper() for leaf in leaves_of(settings_type)}


def settings_environ(settings: msgspec.Struct, section: str) -> dict[str, str]:
    """Variables from which `load_settings` makes these settings again in another process."""
    environ = {}
    for leaf in leaves_of(type(settings)):
        value: Any = settings
        for name in leaf.path:
            value = getattr(value, name)
        if value != leaf.default:
            environ[f"{PREFIX}{section.upper()}_{leaf.name.upper()}"] = _to_text(value)
    return environ


def without_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` without any setting, for a child that gets its own."""
    return {name: value for name, value in environ.items() if not name.startswith(PREFIX) or name in INHERITED_VARIABLES}


def option_name(name: str) -> str:
    return name.replace("_", "-")


def _from_toml(path: Path, section: str, leaves: Mapping[str, Leaf]) -> dict[str, tuple[object, str]]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingsError(CONFIG_VARIABLE, str(path), f"cannot be read: {error}") from error
    for name, table in tables.items():
        _require_known(name, (*SECTIONS, *SHARED_SECTION.values()), f"{path}", "table")
        if not isinstance(table, dict):
            raise SettingsError(name, str(path), "must be a table")
    given: dict[str, tuple[object, str]] = {}
    for table_name in (SHARED_SECTION.get(section), section):
        for name, value in tables.get(table_name, {}).items() if table_name else ():
            source = f"{path}, [{table_name}]"
            _require_known(name, leaves, source)
            given[name] = (value, source)
    return given


def _from_environ(
    environ: Mapping[str, str], section: str, leaves: Mapping[str, Leaf], known_variables: Collection[str]
) -> dict[str, tuple[object, str]]:
    own = f"{PREFIX}{section.upper()}_"
    others = tuple(f"{PREFIX}{other.upper()}_" for other in SECTIONS if other != section)
    general = {PREFIX + name.upper(): name for name in leaves}
    specific = {own + name.upper(): name for name in leaves}
    for variable in sorted(environ):
        foreign = variable in RESERVED_VARIABLES or variable in known_variables or variable.startswith(others)
        if variable.startswith(PREFIX) and not foreign and variable not in general and variable not in specific:
            _require_known(variable, [*general, *specific, *sorted(known_variables)], "environment", "variable")
    given: dict[str, tuple[object, str]] = {}
    for names in (general, specific):
        for variable, name in names.items():
            if environ.get(variable):
                given[name] = (environ[variable], f"environment, {variable}")
    return given


def _convert(leaf: Leaf, value: object, source: str) -> object:
    plain, _ = _without_meta(leaf.type)
    if isinstance(value, str) and get_origin(plain) is tuple:
        value = [part.strip() for part in value.split(",") if part.strip()]
    if isinstance(value, str) and plain is bool:
        value = _SWITCHES.get(value.lower(), value)
    try:
        return msgspec.convert(value, leaf.type, strict=False, dec_hook=_decode_custom)
    except msgspec.ValidationError as error:
        raise SettingsError(leaf.name, source, str(error)) from error


def _decode_custom(target: type, value: object) -> object:
    if target is ByteSize:
        return ByteSize.parse(value)
    if issubclass(target, Path) and isinstance(value, str):
        return target(value).expanduser()
    raise ValueError(f"Expected `{target.__name__}`, got `{type(value).__name__}`")


def _build(
    settings_type: type[SettingsT], section: str, values: Mapping[str, object], sources: Mapping[str, str]
) -> SettingsT:
    """Nested Structs are built inside out, so that each checks its own fields in `__post_init__`."""
    arguments: dict[str, Any] = {}
    for field in msgspec.structs.fields(settings_type):
        field_type, _ = _without_meta(field.type)
        if isinstance(field_type, type) and issubclass(field_type, msgspec.Struct):
            arguments[field.name] = _build(field_type, section, values, sources)
        elif field.name in values:
            arguments[field.name] = values[field.name]
        elif field.required:
            ways = f"--{option_name(field.name)} or {PREFIX}{field.name.upper()}"
            raise SettingsError(field.name, section, f"is required: give {ways}")
    try:
        return settings_type(**arguments)
    except ValueError as error:
        key, separator, reason = str(error).partition(": ")
        if key not in arguments or not separator:
            key, reason = settings_type.__name__, str(error)
        raise SettingsError(key, sources.get(key, section), reason) from error


def _require_known(name: str, known: Iterable[str], source: str, what: str = "setting") -> None:
    names = list(known)
    if name not in names:
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise SettingsError(name, source, f"unknown {what}{hint}")


def _without_meta(annotation: Any) -> tuple[Any, str]:
    """`Annotated[T, Meta(description=…)]` → (T, description)."""
    description = ""
    while hasattr(annotation, "__metadata__"):
        for meta in annotation.__metadata__:
            if isinstance(meta, msgspec.Meta) and meta.description:
                description = meta.description
        annotation = get_args(annotation)[0]
    return annotation, description


def _default_of(field: Any) -> Any:
    if field.default is not msgspec.NODEFAULT:
        return field.default
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return msgspec.NODEFAULT


def _to_text(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ",".join(_to_text(item) for item in value)
    if isinstance(value, int):
        return str(int(value))
    return str(value)
