#!/bin/sh
# One node of a cluster: sshd in the foreground, with a host key made here. Who may come in: ~/.ssh/authorized_keys.
set -eu
mkdir -p -m 700 "$HOME/.sshd"
[ -f "$HOME/.sshd/host_key" ] || ssh-keygen -q -t ed25519 -N '' -f "$HOME/.sshd/host_key"
exec /usr/sbin/sshd -D -e -f /usr/local/share/hvdkit/sshd_config
