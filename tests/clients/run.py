"""Runs other people's clients against a cluster of ours, each in an environment of its own. See README.md."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent)]

from environments import npm_environment, python_environment  # noqa: E402
from fake_reference import VOCAB_SIZE, fake_model_dir  # noqa: E402
from http_cluster import kvrelay_up, model_environ  # noqa: E402
from tiny_models import write_tiny_tokenizer  # noqa: E402

RUN_S = 600.0
ANSWER_S = 120  # of one request: some ask for a hundred choices that fill the context
MAX_MODEL_LEN = 1024
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


def python_client(name: str, package: str) -> Callable[[str, int], int]:
    def run(url: str, examples: int) -> int:
        return ended(python_environment(name, [package]), HERE / f"{name}_client.py", url)

    return run


def npm_client(url: str, examples: int) -> int:
    directory = npm_environment("npm", ["openai"])
    script = directory / "client.mjs"  # imports are looked up beside the script
    script.write_text((HERE / "npm_client.mjs").read_text())
    return ended("node", script, url)


def schemathesis(url: str, examples: int) -> int:
    python = python_environment("schemathesis", ["schemathesis"])
    limits = ["--checks", CHECKS, "--max-examples", str(examples), "--exclude-path", "/metrics"]
    limits += ["--request-timeout", str(ANSWER_S)]
    return ended(python.with_name("schemathesis"), "run", f"{url}/openapi.json", "--url", url, *limits)


def ended(*command: str | Path) -> int:
    """The exit status; 124 if it did not come in time."""
    try:
        return subprocess.run(command, env={**os.environ, "OPENAI_API_KEY": "none"}, timeout=RUN_S).returncode
    except subprocess.TimeoutExpired:
        return 124


CLIENTS: dict[str, Callable[[str, int], int]] = {
    "openai": python_client("openai", "openai"),
    "litellm": python_client("litellm", "litellm"),
    "langchain": python_client("langchain", "langchain-openai"),
    "npm": npm_client,
    "schemathesis": schemathesis,
}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", choices=[*CLIENTS, []], help="all by default")
    parser.add_argument("--examples", type=int, default=100, help="of each route, for schemathesis")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        model_dir = fake_model_dir(scratch / "model")
        write_tiny_tokenizer(model_dir, VOCAB_SIZE)
        sizes = {"block_size": 16, "num_blocks": 512, "max_model_len": MAX_MODEL_LEN}
        environ = model_environ(model_dir=model_dir, runner="fake", served_model="m", **sizes)
        with kvrelay_up(scratch / "run", "--policy", "always", environ=environ) as cluster:
            codes = {name: CLIENTS[name](cluster.url, arguments.examples) for name in arguments.names or CLIENTS}
            cluster.assert_empty(timeout_s=10)
    print(codes)
    return int(any(codes.values()))


if __name__ == "__main__":
    sys.exit(main())
