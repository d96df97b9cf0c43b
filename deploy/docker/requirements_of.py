"""Prints what pyproject.toml requires, one a line: `requirements_of.py pyproject.toml [EXTRA]`. For the image's build."""

import sys
import tomllib

with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]
print("\n".join(project["optional-dependencies"][sys.argv[2]] if len(sys.argv) > 2 else project["dependencies"]))  # noqa: T201
