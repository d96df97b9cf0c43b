"""What goes wrong when an experiment is read, run or reported.

BenchError               message is one line for the person at the terminal
├── SpecError            an experiment, topology or trace is wrong; the message names the file and the field
├── TopologySkipped      a topology cannot run here (a peer that is not installed, too few CPUs); the message says why
└── TopologyFailed       a topology was to run and did not come up, or died
"""

from __future__ import annotations

from cluster.errors import ClusterError


class BenchError(ClusterError):
    pass


class SpecError(BenchError):
    pass


class TopologySkipped(BenchError):
    pass


class TopologyFailed(BenchError):
    pass
