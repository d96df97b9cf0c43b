"""Which of its transports UCX uses for one endpoint. ucxx does not say; UCX's own `ucp_ep_query` does.

The structures are those of ucp.h since UCX 1.14: fields are only ever added at the end, and UCX fills those alone that the
mask names.
"""

from __future__ import annotations

import ctypes

_LIBRARY = "libucp.so.0"
_FIELD_TRANSPORTS = 1 << 3  # UCP_EP_ATTR_FIELD_TRANSPORTS
_MAX_LANES = 16
_SOCKADDR_STORAGE_BYTES = 128
_NAME_BYTES = 32


class _Entry(ctypes.Structure):
    """ucp_transport_entry_t"""

    _fields_ = (("transport_name", ctypes.c_char_p), ("device_name", ctypes.c_char_p))


class _Transports(ctypes.Structure):
    """ucp_transports_t"""

    _fields_ = (
        ("entries", ctypes.POINTER(_Entry)),
        ("num_entries", ctypes.c_uint),
        ("entry_size", ctypes.c_size_t),
    )


class _Attributes(ctypes.Structure):
    """ucp_ep_attr_t, and room behind it"""

    _fields_ = (
        ("field_mask", ctypes.c_uint64),
        ("name", ctypes.c_char * _NAME_BYTES),
        ("local_sockaddr", ctypes.c_byte * _SOCKADDR_STORAGE_BYTES),
        ("remote_sockaddr", ctypes.c_byte * _SOCKADDR_STORAGE_BYTES),
        ("transports", _Transports),
        ("spare", ctypes.c_byte * 256),
    )


def transports_of(endpoint: int) -> tuple[str, ...]:
    """Such as `("rc_mlx5/mlx5_0:1",)` or `("tcp/eth0",)`, each once; empty where this UCX does not tell.

    Args:
        endpoint: the `ucp_ep_h` of a living endpoint.
    """
    try:
        query = ctypes.CDLL(_LIBRARY).ucp_ep_query
    except (OSError, AttributeError):
        return ()
    query.argtypes = (ctypes.c_void_p, ctypes.POINTER(_Attributes))
    query.restype = ctypes.c_int8
    entries = (_Entry * _MAX_LANES)()
    attributes = _Attributes(field_mask=_FIELD_TRANSPORTS)
    attributes.transports = _Transports(entries, _MAX_LANES, ctypes.sizeof(_Entry))
    if query(endpoint, ctypes.byref(attributes)) != 0:
        return ()
    found = [entries[lane] for lane in range(min(attributes.transports.num_entries, _MAX_LANES))]
    names = [f"{(entry.transport_name or b'?').decode()}/{(entry.device_name or b'?').decode()}" for entry in found]
    return tuple(dict.fromkeys(names))
