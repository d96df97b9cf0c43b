"""Errors of the engine package.

EngineError
├── UnsupportedModel     the family, or a feature of this model, is not supported; the message names it
├── ModelFilesError      a model directory lacks a file, or a file is not what its name says
└── OutOfBlocks          a request for blocks that the pool cannot meet now (never reaches a client)
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of every error that this package raises."""


class UnsupportedModel(EngineError):
    """Refused by name at start."""


class ModelFilesError(EngineError):
    """A model directory that cannot be loaded, with the file's name."""


class OutOfBlocks(EngineError):
    """The pool has too few free and evictable blocks."""
