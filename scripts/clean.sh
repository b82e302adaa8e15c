#!/usr/bin/env bash
# Removes what the project's scripts made; see usage below.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=scripts/lib/python.sh
source "$root/scripts/lib/python.sh"

usage() {
  cat <<'TEXT'
usage: scripts/clean.sh [--cache] [--force]

Removes build/. Refuses while build/ holds commits that were not exported or changes that were not
committed, unless --force. --cache also removes downloads and built wheels, that is what the
project keeps in $MEGATRON_BYTEPS_CACHE (default: ~/.cache/megatron-byteps).
TEXT
}

cache=0
force=0
for argument in "$@"; do
  case "$argument" in
    --cache) cache=1 ;;
    --force) force=1 ;;
    -h | --help)
      usage
      exit 0
      ;;
    *)
      usage >&2
      exit 2
      ;;
  esac
done

if ((!force)) && [[ -e "$root/build/byteps" || -e "$root/build/Megatron-LM" ]]; then
  python="$root/build/venv/bin/python"
  python_works "$python" || python="$(find_python)" || {
    echo "error: no Python >= 3.12 to look for unexported work with; --force skips that" >&2
    exit 1
  }
  PYTHONPATH="$root" "$python" -B -m scripts.patchset guard
fi
rm -rf "$root/build"

if ((cache)); then
  folder="${MEGATRON_BYTEPS_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/megatron-byteps}"
  # By name, since the variable may point at a folder that holds other things too.
  rm -rf "$folder/sdists" "$folder/wheels" "$folder/servers" "$folder/ship" "$folder/images" \
    "$folder"/libsodium-* "$folder/vm" "$folder/uv" "$folder"/uv-[0-9a-f]*
  rmdir "$folder" 2>/dev/null || true
fi
