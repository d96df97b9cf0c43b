"""Prepares a process and becomes it: ``python -m service_kit.launch --parent-pid 123 --cpus 0-1 decode_service``.

Done here are the things that must precede the first import of anything heavy, and that survive an exec: CPU affinity,
thread counts, and that the process does not outlive the one that started it.
"""

from __future__ import annotations

import argparse
import os
import sys

from service_kit.cpus import parse_cpus, pin, thread_environ
from service_kit.parent import end_with_parent


def launch_command(
    module: str, *arguments: str, parent_pid: int | None = None, cpus: str = "", threads: int | None = None
) -> list[str]:
    """The command line by which `main` below starts `module` with `arguments`."""
    command = [sys.executable, "-m", "service_kit.launch"]
    if parent_pid is not None:
        command += ["--parent-pid", str(parent_pid)]
    if cpus:
        command += ["--cpus", cpus]
    if threads is not None:
        command += ["--threads", str(threads)]
    return [*command, module, *arguments]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="service_kit.launch")
    parser.add_argument("--parent-pid", type=int)
    parser.add_argument("--cpus", default="", type=parse_cpus)
    parser.add_argument("--threads", type=int)
    parser.add_argument("module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    if options.parent_pid is not None:
        end_with_parent(options.parent_pid)
    environ = dict(os.environ)
    if options.cpus:
        try:
            pin(options.cpus)
        except ValueError as error:
            parser.error(str(error))
    threads = options.threads or len(options.cpus)
    if threads:
        environ |= thread_environ(threads)
    os.execve(sys.executable, [sys.executable, "-m", options.module, *options.arguments], environ)  # noqa: S606


if __name__ == "__main__":
    main(sys.argv[1:])
