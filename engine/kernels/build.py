"""Compiles csrc into one shared library: `python -m engine.kernels.build`, or the first worker that finds none.

    engine/kernels/built/kernels-<digest>.so     where an installation put it (--output); searched first
    $KVRELAY_CACHE/kernels/kernels-<digest>.so   or $XDG_CACHE_HOME/kvrelay, or ~/.cache/kvrelay

The digest covers sources, flags and machine type. Every instruction set is compiled in, whatever CPU compiles: the one that
runs chooses. CXX names the compiler; c++, g++ and clang++ are tried otherwise.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from engine.errors import KernelsUnavailable

logger = logging.getLogger(__name__)

_PACKAGE = Path(__file__).parent
_SOURCES = _PACKAGE / "csrc"
_FLAGS = ("-std=c++17", "-O2", "-ftree-vectorize", "-fPIC", "-fopenmp", "-ffp-contract=fast", "-w")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma")
_ISA_FLAGS = {
    "x86_64": {
        "plain": (),
        "avx2": ("-mavx2", "-mfma"),
        "avx512": _AVX512,
        "avx512bf16": (*_AVX512, "-mavx512bf16", "-DKVR_BF16_DOT"),
    }
}
_COMPILE_TIMEOUT_S = 300.0
_LOCK_TIMEOUT_S = 320.0


def built_library() -> Path:
    """The library of these sources for this machine, compiled first if it is nowhere yet.

    Raises:
        KernelsUnavailable: there is no compiler, it fails, or the result cannot be stored.
    """
    name = _library_name()
    for directory in (_PACKAGE / "built", _cache_directory()):
        if (directory / name).is_file():
            return directory / name
    return build(_cache_directory())


def build(directory: Path, extra_flags: Sequence[str] = ()) -> Path:
    """Compile into `directory`, once: others that want the same wait for it.

    Raises:
        KernelsUnavailable: as for `built_library`.
    """
    target = directory / _library_name(extra_flags)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(directory / f".{target.name}.lock"):
            if not target.is_file():
                _compile(target, extra_flags)
    except (OSError, subprocess.SubprocessError) as error:
        raise KernelsUnavailable(f"compiling the kernels failed: {error}") from error
    return target


def _library_name(extra_flags: Sequence[str] = ()) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    digest.update(repr((_FLAGS, _isa_flags(), tuple(extra_flags), platform.machine())).encode())
    return f"kernels-{digest.hexdigest()}.so"


def _isa_flags() -> dict[str, tuple[str, ...]]:
    return _ISA_FLAGS.get(platform.machine(), {"plain": ()})


def _cache_directory() -> Path:
    if os.environ.get("KVRELAY_CACHE"):
        return Path(os.environ["KVRELAY_CACHE"]).expanduser().absolute() / "kernels"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvrelay" / "kernels"


def _compiler() -> str:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and shutil.which(name):
            return name
    raise KernelsUnavailable("there is no C++ compiler")


def _compile(target: Path, extra_flags: Sequence[str]) -> None:
    compiler, started = _compiler(), time.monotonic()
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".compiling-") as work:
        units = [("dispatch", (str(_SOURCES / "dispatch.cpp"),))] + [
            (isa, (f"-DKVR_NAME={isa}", *flags, str(_SOURCES / "kernels.cpp"))) for isa, flags in _isa_flags().items()
        ]
        objects = [str(Path(work) / f"{name}.o") for name, _ in units]
        commands = [
            [compiler, *_FLAGS, *extra_flags, "-c", *arguments, "-o", output]
            for (_, arguments), output in zip(units, objects, strict=True)
        ]
        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
            list(pool.map(_run, commands))
        linked = Path(work) / target.name
        _run([compiler, *_FLAGS, *extra_flags, "-shared", *objects, "-o", str(linked)])
        linked.replace(target)
    logger.info("compiled the kernels in %.0f s: %s", time.monotonic() - started, target)


def _run(command: Sequence[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False)
    if result.returncode != 0:
        lines = result.stderr.strip().splitlines() or ["no message"]
        raise KernelsUnavailable(f"{command[0]} failed: {next((line for line in lines if 'error' in line), lines[-1])}")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """The lock goes with this process, whatever ends it."""
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise KernelsUnavailable(f"another process holds {path}") from None
                time.sleep(0.2)
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile the CPU kernels.")
    parser.add_argument("--output", type=Path, help="the folder for the library; default: the user's cache")
    directory = parser.parse_args().output or _cache_directory()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        path = build(directory)
    except KernelsUnavailable as error:
        raise SystemExit(f"the kernels were not compiled: {error}") from error
    logger.info("%s", path)


if __name__ == "__main__":
    main()
