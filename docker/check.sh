#!/bin/sh
# Build the CPU targets of the Dockerfile, train in each and over two containers: `make image-check`.
#
#     docker/check.sh [--compose] [driver mxnet pytorch tensorflow]
#
# In each image, as its user, its own command runs, and a training on two ranks. It may hold no compiler, private key or
# cache, and only packages that docker/constraints.txt pins. docker-compose.yml then trains an epoch of the digits over
# two containers with each framework. `--compose`, which `make cluster-check` takes, does only that; where this machine
# has no engine, it says so and passes. DOCKER names another client, BUILD_OPTIONS has options of `docker build`.
set -eu
cd "$(dirname "$0")/.."
export COMPOSE_PROJECT_NAME=hvdkit-image-check
failing=2 unable="image-check needs"
if [ "${1-}" = --compose ]; then
    shift
    failing=0 unable="training over two containers is left out: it needs"
fi
for target; do
    case $target in driver | mxnet | pytorch | tensorflow) continue ;; esac
    echo "unknown target '$target': expected one of driver, mxnet, pytorch, tensorflow" >&2
    exit 2
done

lacks() {
    echo "$unable $1" >&2
    exit "$failing"
}

failed() {
    echo "$target: $1" >&2
    exit 1
}

step() { # what is done, and the command
    echo "$target: $1" >&2
    shift
    "$@" </dev/null
}

frameworks() { # of the target
    case $target in driver) ;; tensorflow) echo tensorflow keras ;; *) echo "$target" ;; esac
}

build() { # the tag, and options
    arguments=$*
    for name in PIP_INDEX_URL PIP_EXTRA_INDEX_URL http_proxy https_proxy no_proxy; do
        if printenv "$name" >/dev/null; then arguments="$arguments --build-arg $name"; fi
    done
    # shellcheck disable=SC2086 # each is a word
    step "docker build" "$docker" build --target "$target" --tag $arguments ${BUILD_OPTIONS-} .
}

try_out() {
    user=$("$docker" image inspect --format '{{.Config.User}}' "$tag")
    case $user in '' | root | 0) failed "runs as root" ;; esac
    step "its own command" "$docker" run --rm "$tag"
    for framework in $(frameworks); do
        step "$framework trains on two ranks" "$docker" run --rm "$tag" sh -ec "
            hvdkit train resnet20-digits --framework $framework -np 2 --out runs/check batch_size=4 epochs=1 \
                device=cpu 'data={name: synthetic, height: 32, width: 32, train_images: 16}'
            test -s runs/check/result.json && test \$(id -u) != 0"
    done
    held=$(step "compilers, keys and caches" "$docker" run --rm --user root "$tag" sh -c "
        for tool in cc c++ gcc g++ cpp ld as make cmake; do command -v \$tool; done
        find /usr/lib/gcc /usr/libexec/gcc -type f -name 'cc1*' 2>/dev/null
        grep -rlI -e '-BEGIN [A-Z ]*PRIVATE KEY' /etc /home /root /tmp /usr/local /var
        find /root/.cache /home/*/.cache /tmp /var/cache/apt /var/lib/apt/lists /var/tmp -type f 2>/dev/null
        find /usr/local/lib/hvdkit -name pip -type d; true")
    [ -z "$held" ] || failed "holds $held"
    names="from importlib.metadata import distributions as all; print(*{one.name for one in all()}, sep='\n')"
    for name in $(step "its packages" "$docker" run --rm "$tag" /usr/local/lib/hvdkit/bin/python -c "$names"); do
        pattern="^$(echo "$name" | sed 's/[-_.]\{1,\}/[-_.]*/g')=="
        [ "$name" = hvdkit ] || grep -iq "$pattern" docker/constraints.txt ||
            failed "docker/constraints.txt has no version of $name"
    done
}

train_over_two() { # the framework, and the status that is expected
    status=0
    export TARGET="$target" FRAMEWORK="$1" EPOCHS=1
    step "compose, --framework=$1" $compose --ansi never up --no-build --exit-code-from node1 || status=$?
    step "compose down" $compose --ansi never down --volumes
    [ "$status" = "$2" ] || failed "compose, --framework=$1: exit status $status, expected $2"
    unset TARGET FRAMEWORK EPOCHS
}

install="apt-get install docker.io docker-compose (Debian), or https://docs.docker.com/engine/install"
docker=$(command -v "${DOCKER:-docker}") || lacks "a Docker engine, and there is no docker on PATH: $install"
version=$("$docker" version --format '{{.Client.Version}}' 2>&1) ||
    lacks "a running Docker engine ($(echo "$version" | tail -n 1)): start one, \`systemctl start docker\`, or $install"
if [ "${version%%.*}" -ge 23 ] && ! "$docker" buildx version >/dev/null 2>&1; then # BuildKit's client is a plugin there
    lacks "BuildKit, and $docker has no buildx: install docker-buildx, or name another client in DOCKER"
fi
compose="$docker compose"
if ! $compose version >/dev/null 2>&1; then
    compose=docker-compose
    command -v docker-compose >/dev/null ||
        lacks "Docker Compose: apt-get install docker-compose (Debian), or docker-compose-plugin"
fi
for target in ${*:-driver mxnet pytorch tensorflow}; do
    tag=hvdkit:$target
    DOCKER_BUILDKIT=1 build "$tag"
    [ "$failing" = 0 ] || try_out
    for framework in $(frameworks); do
        train_over_two "$framework" 0
    done
    [ "$target" = driver ] || train_over_two caffe 2 # the exit status of `up` is the run's
    if [ "$failing$target" = 2driver ]; then
        # It asks for every base above the target: the GPU ones are not among them.
        DOCKER_BUILDKIT=0 build hvdkit:driver-classic
        step "as the classic builder made it" "$docker" run --rm hvdkit:driver-classic hvdkit --version
        "$docker" image rm hvdkit:driver-classic
    fi
done
