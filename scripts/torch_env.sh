#!/usr/bin/env bash
# Makes an environment with another torch than build/venv has; see usage below.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=scripts/lib/python.sh
source "$root/scripts/lib/python.sh"
# shellcheck source=scripts/lib/cache.sh
source "$root/scripts/lib/cache.sh"

usage() {
  cat <<'TEXT'
usage: scripts/torch_env.sh VERSION | -h

Prints the Python of an environment that has torch VERSION, 2.9 or 2.11, as locks/torch-*.lock pins it, what
tests need, and the byteps wheel that is in build/venv. It lies in the cache, under a name made of all that is in
it, and is made if it is not there. Needs build/venv: run scripts/setup.sh before.

environment:
  MEGATRON_BYTEPS_CACHE   where it lies, in torch/ (default: ~/.cache/megatron-byteps)
TEXT
}

if [[ ${1:-} == -h || ${1:-} == --help ]]; then
  usage
  exit 0
fi
lock="$root/locks/torch-${1//./-}.lock"
if (($# != 1)) || [[ ! -f $lock ]]; then
  echo "error: torch_env.sh takes 2.9 or 2.11, got: $*" >&2
  usage >&2
  exit 2
fi

cache="${MEGATRON_BYTEPS_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/megatron-byteps}"
stamp="$root/build/venv/.megatron-byteps/byteps"
[[ -f $stamp ]] || {
  echo "error: there is no build: run scripts/setup.sh" >&2
  exit 1
}
wheel="$(<"$stamp")"
find_uv "$root" "$cache" || {
  echo "error: no uv: run scripts/setup.sh" >&2
  exit 1
}
use_uv "$cache"
unset VIRTUAL_ENV PYTHONPATH PYTHONHOME

key="$({ cat "$lock" "${BASH_SOURCE[0]}" && echo "$wheel" && "$root/build/venv/bin/python" -VV; } | sha256sum | cut -c -16)"
kept="$cache/torch/$1-$key"
if [[ ! -d $kept ]]; then
  new="$kept.$BASHPID"
  trap 'rm -rf "$new"' EXIT
  base="$("$root/build/venv/bin/python" -c 'import sys; print(sys._base_executable)')"
  "$uv" venv --quiet --relocatable --python "$base" "$new"
  "$uv" pip sync --quiet --python "$new/bin/python" --require-hashes "$lock" >&2
  "$uv" pip install --quiet --python "$new/bin/python" --no-deps "$cache/wheels/$wheel"/*.whl >&2
  "$new/bin/python" -c 'import byteps.torch' >&2
  keep "$new" "$kept"
fi
echo "$kept/bin/python"
