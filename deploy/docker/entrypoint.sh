#!/bin/sh
# What differs between containers of one service is worked out here; then the container becomes its process.
#
#   init           makes the cluster token, once, and fetches and converts the model, once; then ends
#   coordinator    the front door
#   prefill        a prefill worker
#   decode         a decode worker
#   anything else  runs as it is, such as `kvrelay models`
#
# Read here, and not by kvrelay itself:
#   KVRELAY_CLUSTER_TOKEN_FILE   where the token lies if KVRELAY_CLUSTER_TOKEN is empty
#   GPUS                         number of GPUs that this host's workers share, one each; empty: none are handed out
#   GPU_LOCKS                    a folder that all workers of this host share
set -eu

say() { printf 'kvrelay: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }

token_file=${KVRELAY_CLUSTER_TOKEN_FILE:-}
unset KVRELAY_CLUSTER_TOKEN_FILE

make_token() {
  [ -z "${KVRELAY_CLUSTER_TOKEN:-}" ] || { say "the cluster token comes from KVRELAY_CLUSTER_TOKEN"; return 0; }
  [ -n "$token_file" ] || fail "KVRELAY_CLUSTER_TOKEN or KVRELAY_CLUSTER_TOKEN_FILE is needed"
  [ ! -s "$token_file" ] || { say "the cluster token is there"; return 0; }
  # Written beside and linked into place: of two that start at once, one wins and nobody reads half a token.
  umask 077
  python3 -ISc 'import secrets; print(secrets.token_urlsafe(32))' >"$token_file.$$"
  ln "$token_file.$$" "$token_file" 2>/dev/null || true
  rm -f "$token_file.$$"
  [ -s "$token_file" ] || fail "cannot write $token_file"
  say "made a cluster token"
}

read_token() {
  [ -z "${KVRELAY_CLUSTER_TOKEN:-}" ] || return 0
  [ -n "$token_file" ] || return 0
  KVRELAY_CLUSTER_TOKEN=$(cat "$token_file") || fail "$token_file cannot be read; the service init makes it"
  [ -n "$KVRELAY_CLUSTER_TOKEN" ] || fail "$token_file is empty"
  export KVRELAY_CLUSTER_TOKEN
}

# Whole CPUs in this container's limit, rounded up; nothing where there is no limit. Threads beyond it only throttle.
limit_of_cpus() {
  if [ -r /sys/fs/cgroup/cpu.max ]; then
    read -r quota period </sys/fs/cgroup/cpu.max
  elif [ -r /sys/fs/cgroup/cpu/cpu.cfs_quota_us ]; then
    read -r quota </sys/fs/cgroup/cpu/cpu.cfs_quota_us
    read -r period </sys/fs/cgroup/cpu/cpu.cfs_period_us
  else
    return 0
  fi
  case "$quota" in max | -*) return 0 ;; esac
  printf '%s' $(((quota + period - 1) / period))
}

set_threads() {
  section_threads=$1
  [ -z "${KVRELAY_THREADS:-}${section_threads:-}" ] || return 0
  KVRELAY_THREADS=$(limit_of_cpus)
  export KVRELAY_THREADS
}

# One GPU per worker: the first whose lock is free. The lock ends with this process, however that ends.
claim_gpu() {
  [ -n "${GPUS:-}" ] || return 0
  [ -d "${GPU_LOCKS:-}" ] || fail "GPU_LOCKS: ${GPU_LOCKS:-nothing} is not a folder"
  gpu=0
  while [ "$gpu" -lt "$GPUS" ]; do
    exec 9>"$GPU_LOCKS/gpu-$gpu.lock"
    if flock --exclusive --nonblock 9; then
      say "this worker has GPU $gpu"
      CUDA_VISIBLE_DEVICES=$gpu
      export CUDA_VISIBLE_DEVICES
      return 0
    fi
    gpu=$((gpu + 1))
  done
  fail "all $GPUS GPUs of this host are taken: scale down, or raise GPUS"
}

# Where `init` says which directory the model lies in, so that nobody else needs the network, or a writable cache, to know.
model_record=${KVRELAY_CACHE:-/var/lib/kvrelay}/current-model

fetch_model() {
  model=${KVRELAY_MODEL:-smollm2-135m}
  if [ -n "${KVRELAY_MODEL_DIR:-}" ]; then
    say "the model is KVRELAY_MODEL_DIR=$KVRELAY_MODEL_DIR"
    return 0
  fi
  directory=$(kvrelay models fetch "$model")
  printf '%s\n%s\n' "$model" "$directory" >"$model_record.new"
  mv "$model_record.new" "$model_record"
  say "the model $model lies in $directory"
}

# Sets KVRELAY_MODEL_DIR and KVRELAY_SERVED_MODEL by the record, if it is about the model that this container is to serve.
find_model() {
  [ -z "${KVRELAY_MODEL_DIR:-}" ] || return 0
  [ -r "$model_record" ] || return 0
  { read -r model && read -r directory; } <"$model_record"
  [ "$model" = "${KVRELAY_MODEL:-smollm2-135m}" ] || return 0
  KVRELAY_MODEL_DIR=$directory
  case "$model" in
    /*) served=${model##*/} && served=${served%.gguf} ;;
    *) served=$model ;;
  esac
  KVRELAY_SERVED_MODEL=${KVRELAY_SERVED_MODEL:-$served}
  export KVRELAY_MODEL_DIR KVRELAY_SERVED_MODEL
}

role=${1:-}
case "$role" in
  init)
    make_token
    fetch_model
    ;;
  coordinator)
    read_token
    find_model
    exec kvrelay "$@"
    ;;
  prefill | decode)
    read_token
    find_model
    # The container's own host name: stable over its restarts, so that the worker keeps its name.
    KVRELAY_WORKER_ID=${KVRELAY_WORKER_ID:-$role-$(hostname)}
    export KVRELAY_WORKER_ID
    if [ "$role" = decode ]; then
      KVRELAY_ADVERTISE_HOST=${KVRELAY_ADVERTISE_HOST:-$(hostname)}
      export KVRELAY_ADVERTISE_HOST
      set_threads "${KVRELAY_DECODE_THREADS:-}"
    else
      set_threads "${KVRELAY_PREFILL_THREADS:-}"
    fi
    claim_gpu
    exec kvrelay "$@"
    ;;
  *)
    [ -n "$role" ] || fail "say what to run: coordinator, prefill, decode, init, or a command"
    exec "$@"
    ;;
esac
