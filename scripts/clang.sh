#!/usr/bin/env bash
# Prints the path of a clang++ that has its sanitizers and libFuzzer; see usage below.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=scripts/lib/no_arguments.sh
source "$root/scripts/lib/no_arguments.sh"
# shellcheck source=scripts/lib/system.sh
source "$root/scripts/lib/system.sh"
no_arguments "usage: scripts/clang.sh [-h]

Prints the path of the newest clang++ that has its run-time libraries, and installs one (Debian and
Ubuntu, as root or with sudo) where there is none. Only the sanitizers, the fuzzers and the check of
lock annotations need it, so that make setup leaves it alone." "$@"

find_clang() {
  local compiler version folder
  for version in -21 -20 -19 -18 -17 -16 "" -15 -14; do
    compiler="$(command -v "clang++$version")" || continue
    folder="$("$compiler" -print-resource-dir 2>/dev/null)" || continue
    compgen -G "$folder/lib/*/*fuzzer*" >/dev/null || continue
    echo "$compiler"
    return 0
  done
  return 1
}

find_clang && exit 0
apt_install clang-19 libclang-rt-19-dev llvm-19 >&2 || apt_install clang llvm >&2 || true
find_clang || {
  echo "error: please install (Debian's names): clang-19 libclang-rt-19-dev llvm-19" >&2
  exit 1
}
