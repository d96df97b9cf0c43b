"""The tests that openai-python ships for completions, chat completions and models, against a cluster of ours.

    python tests/clients/openai_sdk_tests.py [--version 3.57.0] [--verbose]

They are written for a mock server that answers anything; what they ask of a real one and it refuses by name is listed in
`REFUSED` with the reason. Ends with 0 if every other test passes, and nothing of that list does.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(HERE.parent), str(ROOT)]

from environments import cache_directory, python_environment  # noqa: E402
from fake_reference import VOCAB_SIZE, fake_model_dir  # noqa: E402
from http_cluster import kvrelay_up, model_environ  # noqa: E402
from tiny_models import write_tiny_tokenizer  # noqa: E402

RUN_S = 900.0
FILES = {  # each with the model that its tests name
    "tests/api_resources/test_completions.py": "gpt-3.5-turbo-instruct",
    "tests/api_resources/chat/test_completions.py": "gpt-6-astra",
    "tests/api_resources/chat/completions/test_messages.py": "gpt-6-astra",
    "tests/api_resources/test_models.py": "gpt-6-astra",
}
STORED = "404: no completions are stored"
REFUSED = (  # (file, test, reason)
    (
        r"api_resources/test_completions\.py",
        r"create_with_all_params",
        "400: `suffix` is refused (as are best_of below n, logit_bias's key `foo` and `include_obfuscation`)",
    ),
    (
        r"chat/test_completions\.py",
        r"create_with_all_params",
        "400: `functions` is refused (as are `audio`, `moderation`, `prediction`, `web_search_options`, max_tokens 0, …)",
    ),
    (r"chat/test_completions\.py", r"_(retrieve|update|list|delete)\b|_list_with_all_params", STORED),
    (r"chat/completions/test_messages\.py", r"_list", STORED),
    (r"/test_models\.py", r"_delete\b", "405: models are the operator's"),
)


@dataclass(frozen=True)
class Outcome:
    file: str
    test: str
    failure: str  # empty: passed

    @property
    def excuse(self) -> str | None:
        for file, test, reason in REFUSED:
            if re.search(file, self.file) and re.search(test, self.test) and "path_params" not in self.test:
                return reason
        return None


def source(version: str) -> Path:
    """The unpacked source distribution."""
    directory = cache_directory() / f"openai-{version}"
    if not directory.is_dir():
        downloads = cache_directory() / "downloads"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "openai", "-d", downloads]
        subprocess.run([*command, f"openai=={version}"], check=True, timeout=RUN_S)
        with tarfile.open(downloads / f"openai-{version}.tar.gz") as archive:
            archive.extractall(cache_directory(), filter="data")
    return directory


def run(python: Path, tests: Path, file: str, url: str, report: Path) -> list[Outcome]:
    environ = {**os.environ, "TEST_API_BASE_URL": f"{url}/v1"}
    command = [python, "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider", f"--junitxml={report}", file]
    done = subprocess.run(command, cwd=tests, env=environ, capture_output=True, text=True, timeout=RUN_S)
    if done.returncode not in (0, 1):
        raise SystemExit(f"pytest ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-2000:]}")
    outcomes = []
    for case in ElementTree.parse(report).iter("testcase"):
        wrong = case.find("failure")
        if wrong is None:
            wrong = case.find("error")
        if case.find("skipped") is None:
            failure = "" if wrong is None else wrong.get("message") or "failed"
            outcomes.append(Outcome(file, case.attrib["name"], failure))
    return outcomes


def pinned_version() -> str:
    (line,) = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if line.startswith("openai==")]
    return line.partition("==")[2]


def table(outcomes: list[Outcome]) -> list[str]:
    lines = ["| tests | passed | refused | failed | why refused |", "|---|---|---|---|---|"]
    for file in FILES:
        groups: dict[str, Counter[str]] = {}
        for outcome in outcomes:
            if outcome.file == file:
                verdict = "passed" if not outcome.failure else "refused" if outcome.excuse else "failed"
                groups.setdefault(outcome.excuse or "", Counter())[verdict] += 1
        for reason, seen in sorted(groups.items()):
            figures = " | ".join(str(seen[verdict]) for verdict in ("passed", "refused", "failed"))
            lines.append(f"| `{file.removeprefix('tests/api_resources/')}` | {figures} | {reason} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--version", default=pinned_version())
    parser.add_argument("--verbose", action="store_true", help="show the message of every refusal")
    arguments = parser.parse_args()
    packages = [f"openai[aiohttp]=={arguments.version}", "pytest>=9", "pytest-asyncio>=1.4", "rich", "inline-snapshot"]
    python = python_environment("openai-sdk-tests", packages)
    tests = source(arguments.version)
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        model_dir = fake_model_dir(scratch / "model")
        write_tiny_tokenizer(model_dir, VOCAB_SIZE)
        for served in sorted(set(FILES.values())):
            environ = model_environ(model_dir=model_dir, runner="fake", served_model=served, block_size=16, num_blocks=512)
            with kvrelay_up(scratch / served, "--policy", "always", environ=environ) as cluster:
                for file in [file for file, model in FILES.items() if model == served]:
                    outcomes += run(python, tests, file, cluster.url, scratch / "report.xml")
                cluster.assert_empty()
    print(f"openai-python {arguments.version}, its own tests:\n")
    print(*table(outcomes), sep="\n")
    unexpected = [outcome for outcome in outcomes if bool(outcome.failure) is not bool(outcome.excuse)]
    for outcome in outcomes:
        if outcome in unexpected or (arguments.verbose and outcome.failure):
            print(f"\n{outcome.file}::{outcome.test}: {outcome.failure[:300] or 'passed, though it is listed as refused'}")
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
