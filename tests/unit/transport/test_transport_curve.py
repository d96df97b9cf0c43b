from __future__ import annotations

import pytest
import zmq

from transport.curve import MIN_TOKEN_CHARS, keys_of
from transport.options import TransportOptions


def test_a_token_makes_one_key_pair_and_another_token_another() -> None:
    keys = keys_of("a" * MIN_TOKEN_CHARS)
    assert keys == keys_of("a" * MIN_TOKEN_CHARS)
    assert keys.public == zmq.curve_public(keys.secret)
    assert keys != keys_of("b" * MIN_TOKEN_CHARS)
    assert keys.secret.decode() not in repr(keys)
    TransportOptions(curve_server_secret=keys.secret, curve_server_public=keys.public)


def test_a_short_token_is_no_secret() -> None:
    with pytest.raises(ValueError, match=r"cluster_token: .*16 characters"):
        keys_of("a" * (MIN_TOKEN_CHARS - 1))
