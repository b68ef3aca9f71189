"""This machine's network interfaces and their IPv4 addresses.

Standard library only, and no syntax newer than Python 3.8: see rank_agent.py.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterable, Sequence

SIOCGIFFLAGS, SIOCGIFADDR, SIOCGIFNETMASK = 0x8913, 0x8915, 0x891B  # linux/sockios.h


def ask(interface: str, request: int) -> bytes | None:
    """The answer to an interface request (struct ifreq); None where there is no such interface, or no answer."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        return fcntl.ioctl(any_socket, request, struct.pack("256s", interface.encode()[:15]))
    return None


def address_of(interface: str) -> str | None:
    """The interface's IPv4 address; None where it has none."""
    answer = ask(interface, SIOCGIFADDR)
    return None if answer is None else socket.inet_ntoa(answer[20:24])


def mask_of(interface: str) -> str | None:
    """The mask of the interface's IPv4 network; None where it has none."""
    answer = ask(interface, SIOCGIFNETMASK)
    return None if answer is None else socket.inet_ntoa(answer[20:24])


def interface_of(address: str) -> str | None:
    """The interface that has this IPv4 address; None where none has it."""
    if address.startswith("127."):
        return "lo"
    return next((name for name in names() if address_of(name) == address), None)


def interface_in(network: str) -> str | None:
    """The first interface with an IPv4 address in that network, such as 10.0.0.0/8; None where there is none."""
    try:
        wanted = ipaddress.ip_network(network, strict=False)
    except ValueError:
        return None
    pairs = ((name, address_of(name)) for name in names())
    return next((name for name, address in pairs if address and ipaddress.ip_address(address) in wanted), None)


def addresses() -> list[str]:
    """This machine's IPv4 addresses, without the loopback's."""
    own = [address_of(name) for name in names() if name != "lo"]
    return [address for address in own if address is not None]


def source_address(other: str) -> str | None:
    """The address from which this machine reaches another one, by name or address; None where it has no way there."""
    with contextlib.suppress(OSError, UnicodeError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 9))  # sends nothing
        return str(probe.getsockname()[0])
    return None


def ways_from(others: Iterable[str]) -> list[str]:
    """This machine's addresses, that first from which it reaches the others, by name or address."""
    ways = [source_address(other) for other in others]
    return list(dict.fromkeys([*(way for way in ways if way and not way.startswith("127.")), *addresses()]))


def listening(others: Sequence[str]) -> tuple[str, list[str]]:
    """Where to listen so that the others, by name or address, reach this machine, and by which of its addresses.

    It is one address where one will do: that of the interface of HOROVOD_GLOO_IFACE, a name or a network, or the one
    from which this machine reaches all others. Else "", which is all addresses.
    """
    wanted = os.environ.get("HOROVOD_GLOO_IFACE", "")
    interface = interface_in(wanted) if "/" in wanted else wanted
    own = address_of(interface) if interface else None
    sources = [own] if own else [source_address(other) for other in others]
    usable = list({address for address in sources if address and not address.startswith("127.")})
    return (usable[0], usable) if len(usable) == 1 else ("", ways_from(others))


def names() -> list[str]:
    """All interfaces, up or not."""
    return [name for _, name in socket.if_nameindex()]
