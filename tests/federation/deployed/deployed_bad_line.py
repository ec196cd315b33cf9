"""A slow and bad line: what comes in at one address goes out to another, late, and connections are cut.

    python flower_bad_line.py HERE THERE PORT DELAY PIECES

Every piece waits `DELAY` seconds, and a connection ends without a word when `PIECES` have gone from here to
there: what `netem` in the kernel does to packets, as those see it who use the line. A request is lost and its
answer is not: whoever gets none knows that nothing was done. It takes no rights and no modules.
"""

from __future__ import annotations

import asyncio
import sys

PIECE = 1 << 16


async def carry(here: asyncio.StreamReader, there: asyncio.StreamWriter, delay: float, pieces: int) -> None:
    """Pass one direction of a connection on, until it ends or has had its pieces."""
    while piece := await here.read(PIECE):
        pieces -= 1
        if not pieces:
            raise ConnectionResetError("the line is bad")
        await asyncio.sleep(delay)
        there.write(piece)
        await there.drain()
    there.write_eof()


async def serve(here: str, there: str, port: int, delay: float, pieces: int) -> None:
    """Be the line, until this process is stopped."""

    async def connected(client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        ends = [to_client]
        try:
            server, to_server = await asyncio.open_connection(there, port)
            ends.append(to_server)
            async with asyncio.TaskGroup() as both:
                both.create_task(carry(client, to_server, delay, pieces))
                both.create_task(carry(server, to_client, delay, sys.maxsize))
        except* OSError:
            pass  # the two ends notice
        finally:
            for end in ends:
                end.transport.abort()

    async with await asyncio.start_server(connected, here, port) as line:
        await line.serve_forever()


if __name__ == "__main__":
    listen, to, number, seconds, most = sys.argv[1:]
    asyncio.run(serve(listen, to, int(number), float(seconds), int(most)))
