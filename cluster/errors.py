"""What goes wrong when a cluster is started, scaled or asked.

ClusterError             message is one line for the person at the terminal
├── ModelError           a model cannot be found, fetched or converted
├── ClusterNotFound      no running cluster answers to the name or port
└── StartFailed          the cluster did not come up
"""

from __future__ import annotations


class ClusterError(Exception):
    pass


class ModelError(ClusterError):
    pass


class ClusterNotFound(ClusterError):
    pass


class StartFailed(ClusterError):
    pass
