"""The addresses in requests, checked at the door: the work that needs them begins much later."""

from __future__ import annotations

from collections.abc import Iterator

from ecckpt.errors import InvalidConfig, InvalidMessage
from ecckpt.protocol.http import split_address
from ecckpt.protocol.messages.repair import Guard, Repair
from ecckpt.protocol.messages.restore import Fetch
from ecckpt.protocol.messages.save import Hold, Prefetch, Protect


def check_addresses(message: object) -> None:
    """Raise ``InvalidMessage`` if an address in a request is not ``host:port``."""
    for address in _addresses(message):
        try:
            split_address(address)
        except InvalidConfig as error:
            raise InvalidMessage(f"{type(message).__name__}: {error}") from error


def _addresses(message: object) -> Iterator[str]:
    if isinstance(message, Hold | Prefetch):
        yield message.source
    if isinstance(message, Guard):
        yield from (member.address for member in message.members)
    if isinstance(message, Protect | Repair):
        yield from (target.address for target in message.targets)
    if isinstance(message, Fetch | Repair):
        yield from (address for source in message.sources for address in source.addresses)
