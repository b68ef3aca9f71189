#!/bin/sh
# One node of a cluster: sshd in the foreground, with a host key made here, and in ~/.ssh (a volume that the nodes share)
# the key by which they reach each other, made by the first.
set -eu
cd "$HOME/.ssh"
[ -f id_ed25519 ] || ssh-keygen -q -t ed25519 -N '' -C hvdkit -f id_ed25519
cp id_ed25519.pub authorized_keys
chmod 600 authorized_keys

mkdir -p -m 700 "$HOME/.sshd"
[ -f "$HOME/.sshd/host_key" ] || ssh-keygen -q -t ed25519 -N '' -f "$HOME/.sshd/host_key"
exec /usr/sbin/sshd -D -e -f /usr/local/share/hvdkit/sshd_config
