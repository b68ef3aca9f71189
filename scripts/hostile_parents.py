"""Run tests under parents that a shell is not: nohup, no home, another locale, odd interfaces, a busy machine.

    .venv/bin/python scripts/hostile_parents.py                     every condition, tests that take seconds
    .venv/bin/python scripts/hostile_parents.py nohup tmp-long -- tests/test_launch.py
    .venv/bin/python scripts/hostile_parents.py --list
    .venv/bin/python scripts/hostile_parents.py --unchanged …       without what tests/hygiene.py makes good

A line for each condition; the exit status is 1 where a test failed under any. Root is needed for those that mount or
make interfaces (they live in namespaces of their own), and for the machine itself nothing changes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# One or more of each kind: the command line, files, pages, ranks without a framework, builds. About ten seconds.
QUICK = [f"tests/test_{name}.py" for name in ("attack", "documents", "launch_hosts", "paths", "report_files")]
QUICK += ["tests/test_launch.py", "tests/test_runtimes_store.py", "tests/test_runtimes_build.py"]

_NETWORK = 'exec unshare -nm sh -c \'ip link set lo up; {}; exec "$@"\' sh "$@"'
_RESOLVED = (
    'printf "127.0.0.1 localhost\\n172.17.0.1 $(hostname)\\n" >"$SCRATCH/hosts"; '
    'mount --bind "$SCRATCH/hosts" /etc/hosts'
)
_BRIDGE = "ip link add docker0 type bridge; ip addr add 172.17.0.1/16 dev docker0; ip link set docker0 up"
_VPN = "ip link add wg-home type dummy; ip addr add 10.8.0.2/24 dev wg-home; ip link set wg-home up"
_NO_IPV6 = "for f in all default lo; do echo 1 >/proc/sys/net/ipv6/conf/$f/disable_ipv6; done"
_BUSY = 'for core in $(seq $(nproc)); do (while :; do :; done) & done; trap "kill $(jobs -p | tr "\\n" " ")" EXIT; "$@"'

# What a shell does before it starts the tests, "$@"; $SCRATCH is an empty folder.
CONDITIONS = {
    "plain": 'exec "$@"',
    "nohup": "trap '' HUP; exec \"$@\"",
    "signals-ignored": 'exec env --ignore-signal=INT,TERM,PIPE,QUIT,CHLD,USR1,USR2,ALRM,HUP "$@"',
    "signals-blocked": 'exec env --block-signal=INT,TERM,PIPE,QUIT,CHLD,USR1,USR2,HUP "$@"',
    "no-stdin": 'exec "$@" <&-',
    "full-stdin": 'yes | "$@"',
    "umask-077": 'umask 077; exec "$@"',
    "umask-000": 'umask 000; exec "$@"',
    "locale-c": 'LANG=C LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 exec "$@"',
    "locale-other": 'LC_ALL=$(locale -a | grep -iE "^(tr_TR|de_DE|fr_FR|en_)" | head -1) LANGUAGE=de exec "$@"',
    "time-zone-east": 'TZ=Asia/Kathmandu exec "$@"',
    "time-zone-west": 'TZ=America/St_Johns exec "$@"',
    "narrow": 'COLUMNS=20 LINES=5 TERM=dumb NO_COLOR=1 exec "$@"',
    "colour": 'COLUMNS=300 TERM=xterm-256color FORCE_COLOR=1 CLICOLOR_FORCE=1 exec "$@"',
    "home-missing": 'HOME=/nonexistent exec "$@"',
    "home-unset": 'unset HOME; exec "$@"',
    "home-read-only": 'mkdir "$SCRATCH/h"; HOME=$SCRATCH/h exec unshare -m sh -c \'mount --bind "$HOME" "$HOME"; '
    'mount -o remount,bind,ro "$HOME"; exec "$@"\' sh "$@"',
    "xdg-odd": 'XDG_CACHE_HOME=relative XDG_CONFIG_HOME=/dev/null XDG_DATA_HOME=/nonexistent/x exec "$@"',
    "tmp-space": 'mkdir "$SCRATCH/a b ü"; TMPDIR="$SCRATCH/a b ü" exec "$@"',
    "tmp-long": 'd=$SCRATCH/$(printf "%0150d" 0); mkdir "$d"; TMPDIR=$d exec "$@"',
    "backend": 'MPLBACKEND=module://nonsense MATPLOTLIBRC=/nonexistent exec "$@"',
    "python-variables": 'PYTHONIOENCODING=ascii PYTHONUNBUFFERED=1 PYTHONHASHSEED=7 PYTHONSAFEPATH=1 exec "$@"',
    "python-warnings": 'PYTHONWARNINGS=error exec "$@"',
    "horovod-variables": "HOROVOD_CYCLE_TIME=7 HOROVOD_RANK=3 HOROVOD_SIZE=9 HOROVOD_GLOO_IFACE=nowhere0 "
    "HOROVOD_GLOO_TIMEOUT_SECONDS=1 HVDKIT_STARTED=abc HVDKIT_TRACE=x HVDKIT_RANK_DIR=/nowhere OMP_NUM_THREADS=3 "
    'MXNET_ENGINE_TYPE=garbage RANK=1 WORLD_SIZE=4 SLURM_PROCID=1 SLURM_JOB_ID=1 OMPI_COMM_WORLD_RANK=1 exec "$@"',
    "proxy": 'http_proxy=http://127.0.0.1:9 https_proxy=http://127.0.0.1:9 all_proxy=http://127.0.0.1:9 exec "$@"',
    "git-hook": 'GIT_DIR=/nonexistent GIT_INDEX_FILE=/nonexistent/index exec "$@"',
    "no-git": 'g=$(command -v git) && exec unshare -m sh -c \'mount --bind /dev/null "$0"; exec "$@"\' "$g" "$@"; '
    'exec "$@"',
    "few-files": 'ulimit -n 256; exec "$@"',
    "core-files": 'ulimit -c unlimited; exec "$@"',
    "one-core": 'exec taskset -c 0 "$@"',
    "bridge-and-vpn": _NETWORK.format(f"{_BRIDGE}; {_VPN}; {_RESOLVED}"),
    "no-ipv6": _NETWORK.format(_NO_IPV6),
    "no-route": _NETWORK.format(":"),
    "busy": _BUSY,
    "another-place": 'mkdir "$SCRATCH/my own"; PYTHONPATH="$SCRATCH/my own" exec unshare -m sh -c \'mount --bind "$0" '
    '"$PYTHONPATH"; cd "$PYTHONPATH"; exec "$@"\' "$PWD" "$@"',
}


def summary(text: str) -> tuple[str, list[str]]:
    """pytest's last line, and the ids of what failed."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    lines = [line for line in text.splitlines() if line.strip()]
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
    return (lines[-1].strip("= ") if lines else "it said nothing"), sorted(set(failed))


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """An empty folder with a short name."""
    with tempfile.TemporaryDirectory(prefix="hp-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def main() -> int:
    """The exit status."""
    own, theirs = sys.argv[1:], []
    if "--" in own:
        own, theirs = own[: own.index("--")], own[own.index("--") + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("condition", nargs="*", metavar="CONDITION", help="all where none is named")
    parser.add_argument("--list", action="store_true", help="the conditions, with what a shell does for each")
    parser.add_argument("--unchanged", action="store_true", help="tests/hygiene.py leaves the parent's state as it is")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for each condition (default 600)")
    given = parser.parse_args(own)
    if unknown := [name for name in given.condition if name not in CONDITIONS]:
        parser.error(f"{', '.join(unknown)}: unknown; expected some of {', '.join(CONDITIONS)}")
    if given.list:
        for name, text in CONDITIONS.items():
            print(f"{name:18} {text}")
        return 0
    worst = 0
    for name in given.condition or CONDITIONS:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--color=no", *(theirs or QUICK)]
        with scratch() as folder:
            environment = os.environ | {"SCRATCH": str(folder)}
            if given.unchanged:
                environment["HVDKIT_TESTS_UNCHANGED"] = "1"
            began = time.monotonic()
            # A session of its own, so that what ends this program ends it alone: tests clean up behind themselves.
            try:
                done = subprocess.run(
                    ["sh", "-c", CONDITIONS[name], "sh", *command], cwd=ROOT, env=environment, timeout=given.timeout,
                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                )  # fmt: skip
                status, (last, failed) = done.returncode, summary(done.stdout)
            except subprocess.TimeoutExpired:
                status, last, failed = 1, f"did not end within {given.timeout:g} s", []
        if status and not failed:
            last += "\n" + "\n".join(done.stdout.splitlines()[-15:]) if "did not end" not in last else ""
        print(f"{name:18} {'ok    ' if not status else 'FAILED'} {time.monotonic() - began:6.1f} s  {last}", flush=True)
        for each in failed:
            print(f"{'':26}{each}", flush=True)
        worst = max(worst, bool(status))
    return worst


if __name__ == "__main__":
    sys.exit(main())
