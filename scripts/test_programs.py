"""Install what tests start besides Python, as Debian's packages: Chromium and, with --clusters, MPI, Slurm and sshd.

    python scripts/test_programs.py [--clusters]

Needs root and apt-get; elsewhere the tests that need a program are left out, and name the command. Slurm's packages
bring services, which Debian starts where systemd runs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys

# A program by any of its names, and the packages that bring it.
PAGES = {("chromium", "chromium-browser", "google-chrome"): ["chromium", "fonts-dejavu-core"]}
CLUSTERS = {
    ("mpirun.openmpi",): ["openmpi-bin"],
    ("mpirun.mpich",): ["mpich"],
    ("slurmctld",): ["slurm-wlm", "munge"],
    ("sshd",): ["openssh-server", "openssh-client"],
}
_PATH = f"{os.environ.get('PATH', '/usr/bin:/bin')}:/usr/sbin:/sbin"


def main() -> int:
    """Install what is missing; the exit status is 0, since the tests name what they miss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clusters", action="store_true", help="Open MPI, MPICH, Slurm and sshd too")
    wanted = PAGES | CLUSTERS if parser.parse_args().clusters else PAGES
    packages = [
        package
        for names, bringing in wanted.items()
        if not any(shutil.which(name, path=_PATH) for name in names)
        for package in bringing
    ]
    if not packages or os.geteuid() != 0 or shutil.which("apt-get") is None:
        return 0
    print(f"installing Debian's {', '.join(packages)} (apt-get), for tests", flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "-qq", "install", "--no-install-recommends", *packages]
    for command in (["apt-get", "-qq", "update"], install):
        done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        if done.returncode != 0:
            print(f"`{' '.join(command)}` failed; the tests that need them say so", file=sys.stderr)
            break
    return 0


if __name__ == "__main__":
    sys.exit(main())
