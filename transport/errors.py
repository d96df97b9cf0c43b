"""Errors of the transport package.

TransportError
├── AddressError         an address that no transport understands, or that cannot be listened on
├── ConnectTimeout       nobody answered before the deadline
├── ChannelClosed        the peer closed, aborted or fell silent, or this side did; nothing more will arrive
└── PlacementRefused     a put outside an open window of the region: nothing was written
"""

from __future__ import annotations


class TransportError(Exception):
    """Base of every error that this package raises; foreign ones are wrapped at the border."""


class AddressError(TransportError):
    """The address is malformed, its scheme unknown, or it cannot be listened on."""


class ConnectTimeout(TransportError):
    """No connection before the deadline."""


class ChannelClosed(TransportError):
    """The channel has ended; a torn message ends it too, since half a stream cannot be resumed."""


class PlacementRefused(TransportError):
    """The write does not lie inside a window that the region's owner has open."""
