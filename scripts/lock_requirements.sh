#!/usr/bin/env bash
# Resolves each requirements*.in to its requirements*.lock, and uv itself to requirements-uv.lock.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
usage="usage: scripts/lock_requirements.sh [--upgrade] (needs uv on PATH, or its path in \$UV)

Versions that are locked already stay, unless --upgrade."

upgrade=()
case "${1:-}" in
  "") ;;
  --upgrade) upgrade=(--upgrade) ;;
  -h | --help)
    echo "$usage"
    exit 0
    ;;
  *)
    echo "$usage" >&2
    exit 2
    ;;
esac

uv="${UV:-uv}"
# For every platform, with every file's hash and no index named: the lock is the same for all.
options=("${upgrade[@]}" --quiet --universal --python-version 3.12 --generate-hashes --no-header
  --no-annotate
  --no-emit-index-url --no-emit-find-links)
"$uv" pip compile "${options[@]}" -o "$root/requirements.lock" "$root/requirements.in"
"$uv" pip compile "${options[@]}" -o "$root/requirements-ship.lock" "$root/requirements-ship.in"
"$uv" pip compile "${options[@]}" -o "$root/requirements-ray.lock" "$root/requirements-ray.in"
"$uv" pip compile "${options[@]}" -o "$root/requirements-hf.lock" "$root/requirements-hf.in"
"$uv" pip compile "${options[@]}" --no-deps "$root/requirements-hf-alone.in" >>"$root/requirements-hf.lock"
"$uv" pip compile "${options[@]}" -o "$root/requirements-rl.lock" "$root/requirements-rl.in"
"$uv" pip compile "${options[@]}" --no-deps "$root/requirements-rl-alone.in" >>"$root/requirements-rl.lock"
"$uv" pip compile "${options[@]}" -o "$root/requirements-s3.lock" "$root/requirements-s3.in"
echo uv | "$uv" pip compile "${options[@]}" -o "$root/requirements-uv.lock" -
