"""Errors of the engine package.

EngineError
├── UnsupportedModel     the family, or a feature of this model, is not supported; the message names it
├── ModelFilesError      a model directory lacks a file, or a file is not what its name says
├── OutOfBlocks          a request for blocks that the pool cannot meet now (never reaches a client)
├── ConservationError    a block was lost, or is held without a holder: a bug, never to be carried on from
├── StepMismatch         plan, apply and fail_step were not called in turn
└── KernelsUnavailable   the compiled kernels cannot be had here; torch's operators can do their work
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


class ConservationError(EngineError):
    """The pool's books do not add up; output may be wrong from here on."""


class StepMismatch(EngineError):
    """A plan while a step is out, or a result of another step than the one that is out."""


class KernelsUnavailable(EngineError):
    """No compiler, a failed compilation, or a library that this machine cannot load."""
