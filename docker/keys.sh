#!/bin/sh
# The key by which the nodes of one cluster reach each other, made once, into ~/.ssh (a volume that they share).
set -eu
cd "$HOME/.ssh"
[ -f id_ed25519 ] || ssh-keygen -q -t ed25519 -N '' -C hvdkit -f id_ed25519
cp id_ed25519.pub authorized_keys
chmod 600 authorized_keys
