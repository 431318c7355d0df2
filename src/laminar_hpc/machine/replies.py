"""What a server answers, of which no more is read than was asked for."""

import aiohttp


async def read_bounded(content: aiohttp.StreamReader, most: int) -> bytes:
    """The body of a reply; of one that has more than `most` bytes the first most + 1."""
    text = bytearray()
    while len(text) <= most and (more := await content.read(most + 1 - len(text))):
        text += more
    return bytes(text)
