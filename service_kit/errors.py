"""What goes wrong in the parts that every process shares.

ServiceError
├── SettingsError      a setting has no meaning; names the setting and where it came from
├── ListenError        an address cannot be listened on
└── StartError       a part did not come up before its deadline
"""

from __future__ import annotations


class ServiceError(Exception):
    pass


class SettingsError(ServiceError):
    """A setting cannot be used; `key` is its name, `source` where the value came from."""

    def __init__(self, key: str, source: str, reason: str) -> None:
        super().__init__(f"{key} ({source}): {reason}")
        self.key = key
        self.source = source
        self.reason = reason


class ListenError(ServiceError):
    pass


class StartError(ServiceError):
    pass
