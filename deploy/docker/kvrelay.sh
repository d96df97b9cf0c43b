#!/bin/sh
exec /opt/kvrelay/bin/python -m cluster.cli "$@"
