#!/usr/bin/env bash
# Prints the path of valgrind; see usage below.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=scripts/lib/no_arguments.sh
source "$root/scripts/lib/no_arguments.sh"
# shellcheck source=scripts/lib/system.sh
source "$root/scripts/lib/system.sh"
no_arguments "usage: scripts/valgrind.sh [-h]

Prints the path of valgrind, and installs it (Debian and Ubuntu, as root or with sudo) where it is
missing. Only thorough tests need it, so that make setup leaves it alone." "$@"

setup_valgrind >&2
command -v valgrind
