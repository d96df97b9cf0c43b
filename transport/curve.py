"""CURVE keys that every process of a cluster makes for itself, from the secret that they share."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import zmq
from zmq.utils import z85

MIN_TOKEN_CHARS = 16
_PURPOSE = b"kvrelay-curve-1"  # another purpose, another key
_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """A Curve25519 key pair, in Z85. Listeners own it, and dialers accept nobody without it."""

    public: bytes
    secret: bytes = field(repr=False)


def keys_of(cluster_token: str) -> CurveKeys:
    """The cluster's key pair: BLAKE2b of the token (RFC 7693), used as the secret of CurveZMQ (ZeroMQ RFC 26).

    Whoever has the token can be any process of the cluster, as without encryption. A token that can be guessed can be
    guessed from recorded traffic, so it must be long and random.

    Raises:
        ValueError: the token is too short to be a secret.
    """
    if len(cluster_token) < MIN_TOKEN_CHARS:
        raise ValueError(f"cluster_token: encryption needs a random secret of at least {MIN_TOKEN_CHARS} characters")
    secret = z85.encode(hashlib.blake2b(cluster_token.encode(), digest_size=_KEY_BYTES, person=_PURPOSE).digest())
    return CurveKeys(zmq.curve_public(secret), secret)
