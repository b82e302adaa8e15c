#!/usr/bin/env bash
# Prints the path of valgrind; see usage below.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=scripts/lib/system.sh
source "$root/scripts/lib/system.sh"

usage() {
  cat <<'TEXT'
usage: scripts/valgrind.sh [-h]

Prints the path of valgrind, and installs it (Debian and Ubuntu, as root or with sudo) where it is
missing. Only thorough tests need it, so that make setup leaves it alone.
TEXT
}

case "${1:-}" in
  "") ;;
  -h | --help)
    usage
    exit 0
    ;;
  *)
    echo "error: valgrind.sh takes no arguments, got: $*" >&2
    usage >&2
    exit 2
    ;;
esac

setup_valgrind >&2
command -v valgrind
