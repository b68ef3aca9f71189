"""`hvdkit hosts`: a command on hosts with slow links, which this machine plays (`hvdkit/launch/namespaces.py`)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from shutil import which
from subprocess import TimeoutExpired
from typing import Annotated

from pydantic import Field

from hvdkit.commands.request import Argument, Option, Request
from hvdkit.errors import RequestError
from hvdkit.launch.agents import caught_signals
from hvdkit.launch.namespaces import FASTEST, MOST_HOSTS, MOST_SLOTS, SLOWEST, Network, Unavailable

OWN_WORDS = True
WORD = "HOSTS"  # in the command: what -H takes
_LOOK_S = 0.1  # how often signals are passed on


class HostsRequest(Request):
    """Run a command where this machine plays `n` hosts with links of a rate: network namespaces, which end with it.

    Without a command it is checked that they can be made here.
    """

    command: Annotated[
        list[str] | None,
        Argument(f"what to run; {WORD} in it is replaced by what -H takes", metavar="COMMAND [ARGUMENT]"),
    ] = None
    n: Annotated[int, Option("number of hosts", ("--n", "-n")), Field(ge=1, le=MOST_HOSTS)] = 2
    mbit_per_s: Annotated[float, Option("rate of each link, each way"), Field(ge=SLOWEST, le=FASTEST)] = 100.0
    slots: Annotated[int, Option(f"ranks of each host, for {WORD}"), Field(ge=1, le=MOST_SLOTS)] = 1


@dataclass(frozen=True)
class Played:
    """How the command ended; None without one. `hosts` is what -H took."""

    hosts: str
    returncode: int | None


def run(request: HostsRequest) -> Played:
    """Run the command to its end. Raises RequestError for an unknown one, or where no hosts can be played."""
    if request.command and which(request.command[0]) is None:
        raise RequestError(f"{request.command[0]}: no such command; expected a program and its arguments after --")
    try:
        with Network(request.n, request.mbit_per_s) as network:
            hosts = network.hosts_option(request.slots)
            if not request.command:
                return Played(hosts, None)
            with caught_signals() as caught:
                # It hears of a Ctrl-C from here, once.
                command = [*_threads(request), *(word.replace(WORD, hosts) for word in request.command)]
                process = network.start(command, start_new_session=True)
                while process.poll() is None:
                    while caught:
                        process.send_signal(caught.pop(0))
                    with suppress(TimeoutExpired):
                        process.wait(_LOOK_S)
                return Played(hosts, process.returncode)
    except Unavailable as error:
        raise RequestError(str(error)) from None


def _threads(request: HostsRequest) -> list[str]:
    """A command prefix for ranks that share this machine's cores, though each host has all of them."""
    if "OMP_NUM_THREADS" in os.environ:
        return []
    return ["env", f"OMP_NUM_THREADS={max(1, len(os.sched_getaffinity(0)) // (request.n * request.slots))}"]


def lines(request: HostsRequest, result: Played) -> Iterator[str]:
    """That it can be done, where nothing was to be run."""
    if result.returncode is None:
        yield f"this machine can play {result.hosts}, with links of {request.mbit_per_s:g} Mbit/s"


def status(result: Played) -> int:
    """The command's exit status, 128 and the signal's number where a signal has ended it."""
    code = result.returncode or 0
    return code if code >= 0 else 128 - code
