#!/bin/sh
# One node of a cluster: sshd with a host key made here. The key by which nodes reach each other is in ~/.ssh: the secret
# of Kubeflow's operators, which cannot be written, or a volume that the nodes share, where the first makes it.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
cd "$HOME/.ssh"
if [ -w . ]; then
    [ -f id_ed25519 ] || ssh-keygen -q -t ed25519 -N '' -C hvdkit -f id_ed25519
    cp id_ed25519.pub authorized_keys
    chmod 600 authorized_keys
fi

mkdir -p -m 700 "$HOME/.sshd"
[ -f "$HOME/.sshd/host_key" ] || ssh-keygen -q -t ed25519 -N '' -f "$HOME/.sshd/host_key"
stopping=
trap stopping=yes TERM INT
/usr/sbin/sshd -D -e -f "$here/sshd_config" &
sshd=$!
wait "$sshd" || status=$?
[ "$stopping" ] || exit "${status:-0}"

# Kubernetes sends SIGTERM to all pods of a job at once. Ranks then write a checkpoint, for which connections must last.
while [ -n "$(cat "/proc/$sshd/task/$sshd/children")" ]; do sleep 1; done
kill "$sshd"
