#!/opt/kvrelay/bin/python -ES
"""A container's health check: `ready PORT` ends with 0 when its own /ready answers 200. Plain sockets start fast."""

import socket
import sys

with socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=2.0) as connection:
    connection.sendall(b"GET /ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    answer = b""
    while part := connection.recv(4096):
        answer += part
head, _, body = answer.partition(b"\r\n\r\n")
print(body.decode(errors="replace")[:200])  # noqa: T201  docker inspect shows it
sys.exit(0 if head.split(b" ", 2)[1:2] == [b"200"] else 1)
