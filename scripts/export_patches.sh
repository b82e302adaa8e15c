#!/usr/bin/env bash
# Writes the commits in build/ back as patches; `export_patches.sh -h` lists the options.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=scripts/lib/system.sh
source "$root/scripts/lib/system.sh"

python="$root/build/venv/bin/python"
if ! python_works "$python"; then
  python="$(find_python)" || {
    echo "error: no Python >= 3.12 was found; set PYTHON or run scripts/setup.sh" >&2
    exit 1
  }
fi
PYTHONPATH="$root" exec "$python" -B -S -m scripts.patchset export "$@"
