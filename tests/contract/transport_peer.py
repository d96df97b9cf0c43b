"""A process of its own for the contract suite: `transport_peer.py ROLE SCHEME ADDRESS LIVENESS_S`.

dial     connects, offers a region with an open window, tells its descriptor and key, then answers nothing
listen   prints its address, and does the same for whoever connects
put      connects, takes a descriptor and key, and puts in an endless loop
collapse pairs of transports of its own, of which one floods the other and is closed; ends by itself
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from transport.base import ByteRange, Channel, Transport, Write
from transport.options import TransportOptions
from transport.registry import create_transport

REGION_BYTES = 1 << 20
KEY = 77


async def offer(transport: Transport, channel: Channel) -> None:
    region = transport.create_region(REGION_BYTES)
    region.open_window(KEY, [ByteRange(0, REGION_BYTES)])
    await channel.send(region.descriptor())
    await asyncio.sleep(60)


async def put_for_ever(channel: Channel) -> None:
    remote = await channel.open_region((await channel.recv()).header)
    payload = b"\x5a" * remote.nbytes
    await channel.send(b"writing")
    while True:
        await remote.put(KEY, [Write(0, payload)])
        await asyncio.sleep(0)


async def flood(channel: Channel) -> None:
    while True:
        await channel.send(b"x", [bytes(10_000)])


async def collapse(scheme: str, address: str, number: int, options: TransportOptions) -> None:
    near, far = create_transport(scheme, options), create_transport(scheme, options)
    listener = await near.listen(f"{address}.{number}" if address.startswith("ipc") else address, flood)
    await far.connect(listener.address, asyncio.get_running_loop().time() + 20)
    await asyncio.sleep(0.02 * number)
    await near.close()
    await asyncio.sleep(options.liveness_s * 0.7)
    await far.close()


async def main(role: str, scheme: str, address: str, liveness_s: float) -> None:
    options = TransportOptions(liveness_s=liveness_s)
    if role == "collapse":
        for _ in range(2):
            await asyncio.gather(*(collapse(scheme, address, number, options) for number in range(3)))
        return
    transport = create_transport(scheme, options)
    deadline = asyncio.get_running_loop().time() + 20
    if role == "listen":
        listener = await transport.listen(address, lambda channel: offer(transport, channel))
        print(listener.address, flush=True)
        await asyncio.sleep(60)
        return
    channel = await transport.connect(address, deadline)
    await (offer(transport, channel) if role == "dial" else put_for_ever(channel))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4])))
