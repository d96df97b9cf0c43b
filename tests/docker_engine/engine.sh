#!/usr/bin/env bash
# A Docker engine and the images that kvrelay's own are built on, from nothing if need be. Idempotent.
#
#   tests/docker_engine/engine.sh [--install]
#
# Prints the build arguments for this machine, one NAME=VALUE a line, and ends with 0; or ends with 1 and one line on
# standard error that says why there is no engine. With --install, or CI=true, missing programs come from apt (as root).
#
# Where an image can be pulled, BASE_IMAGE is the Dockerfile's own. Elsewhere it is made by debootstrap, with this machine's
# certificates, so that a proxy's are known; and where pip has a torch wheel on this machine's disk (its `find-links`), a
# BUILD_IMAGE that holds it, so that no CUDA build is downloaded.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON:-python3}
suite=${DEBIAN_SUITE:-bookworm}
base=kvrelay-test-base:$suite
build=kvrelay-test-build:$suite
pull_s=45

say() { printf 'engine: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }
has() { command -v "$1" >/dev/null 2>&1; }

may_install=${CI:-false}
[ "${1:-}" != --install ] || may_install=true

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

need() { # PROGRAM PACKAGE...
  local program=$1 && shift
  has "$program" && return
  [ "$may_install" = true ] || fail "$program is missing (apt-get install $*, or run this with --install)"
  [ "$(id -u)" = 0 ] || fail "$program is missing, and only root can install it"
  has apt-get || fail "$program is missing, and there is no apt-get"
  say "installing $*"
  { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@"; } >"$work/apt" 2>&1 \
    || fail "apt-get cannot install $*: $(tail -n 1 "$work/apt")"
  has "$program" || fail "$program is missing still"
}

start_engine() {
  need docker docker.io
  docker version >/dev/null 2>&1 && return
  [ -z "${DOCKER_HOST:-}" ] || fail "no engine answers at DOCKER_HOST=$DOCKER_HOST"
  [ "$(id -u)" = 0 ] || fail "no Docker engine answers, and only root can start one"
  need dockerd docker.io
  need ip iproute2
  need iptables iptables
  local log=${DOCKERD_LOG:-${TMPDIR:-/tmp}/kvrelay-dockerd.log}
  setsid --fork dockerd --pidfile "${DOCKERD_PIDFILE:-/var/run/docker.pid}" >"$log" 2>&1 </dev/null
  for _ in $(seq 150); do
    if docker version >/dev/null 2>&1; then
      say "started dockerd, process $(cat "${DOCKERD_PIDFILE:-/var/run/docker.pid}"), log $log"
      return
    fi
    sleep 0.2
  done
  fail "dockerd does not come up: $(tail -n 1 "$log")"
}

has_image() { docker image inspect "$1" >/dev/null 2>&1; }

pull_base() { # the Dockerfile's default, if it can be had
  local image
  image=$(sed -n 's/^ARG BASE_IMAGE=//p' "$root/Dockerfile" | head -n 1)
  has_image "$image" || timeout "$pull_s" docker pull --quiet "$image" >/dev/null 2>&1 || return 1
  printf '%s' "$image"
}

certificates() { # this machine's bundle
  local file
  for file in "${SSL_CERT_FILE:-}" /etc/ssl/certs/ca-certificates.crt /etc/pki/tls/certs/ca-bundle.crt; do
    [ -n "$file" ] && [ -s "$file" ] && { printf '%s' "$file"; return; }
  done
  fail "there is no bundle of certificates on this machine (SSL_CERT_FILE)"
}

make_base() {
  has_image "$base" && return
  need debootstrap debootstrap
  [ "$(id -u)" = 0 ] || fail "no image can be pulled, and only root can make one (debootstrap)"
  say "making $base with debootstrap"
  debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv "$suite" "$work/root" >"$work/debootstrap" 2>&1 \
    || fail "debootstrap: $(tail -n 1 "$work/debootstrap")"
  cp "$(certificates)" "$work/root/etc/ssl/certs/ca-certificates.crt"
  rm -rf "$work"/root/var/{lib/apt/lists,cache/apt}/* "$work"/root/usr/share/{doc,man,locale}/*
  tar -C "$work/root" -c . | docker import --message "debootstrap $suite" \
    --change "ENV PIP_CERT=/etc/ssl/certs/ca-certificates.crt SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt" \
    - "$base" >/dev/null
  rm -rf "$work/root"
}

make_build() { # prints nothing where pip has no wheel of torch on the disk
  has_image "$build" && return
  local version
  version=$(docker run --rm "$base" python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  mkdir -p "$work/build-image/wheels"
  "$python" -m pip download --quiet --disable-pip-version-check --no-index --no-deps --only-binary=:all: \
    --python-version "$version" --dest "$work/build-image/wheels" "$(grep -E '^torch==' "$root/requirements.lock")" \
    >/dev/null 2>&1 || return 0
  printf 'FROM %s\nCOPY wheels /wheels\nENV PIP_FIND_LINKS=/wheels\n' "$base" >"$work/build-image/Dockerfile"
  docker build --quiet --tag "$build" "$work/build-image" >"$work/build" 2>&1 \
    || fail "building $build: $(tail -n 1 "$work/build")"
}

start_engine
if ! has_image "$base" && pulled=$(pull_base); then
  echo "BASE_IMAGE=$pulled"
  exit 0
fi
make_base
make_build
echo "BASE_IMAGE=$base"
if has_image "$build"; then
  echo "BUILD_IMAGE=$build"
  echo "TORCH_INDEX_URL="
fi
