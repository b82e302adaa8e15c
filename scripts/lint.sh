#!/usr/bin/env bash
# Runs every linter, also after one has failed, and says which did.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

usage() {
  cat <<'TEXT'
usage: scripts/lint.sh [--fix]

Checks Python (ruff), shell scripts (shellcheck), the C++ files of overlays, benchmarks and tests
(clang-format) and the patch series. --fix rewrites what can be rewritten first.
Needs build/venv: run scripts/setup.sh before.
TEXT
}

fix=0
case "${1:-}" in
  "") ;;
  --fix) fix=1 ;;
  -h | --help)
    usage
    exit 0
    ;;
  *)
    usage >&2
    exit 2
    ;;
esac

cd "$root"
bin="$root/build/venv/bin"
mapfile -t shell < <(find . \( -path ./build -o -path ./.git \) -prune -o -name '*.sh' -print)
shell+=(.ci/run)
mapfile -t cpp < <(find bench byteps Megatron-LM tests -type f \
  \( -name '*.h' -o -name '*.hpp' -o -name '*.cc' -o -name '*.cpp' -o -name '*.cu' \) 2>/dev/null)

if ((fix)); then
  "$bin/ruff" check --quiet --fix . || true
  "$bin/ruff" format --quiet .
  ((${#cpp[@]} == 0)) || "$bin/clang-format" -i "${cpp[@]}"
fi

failed=()
# run NAME COMMAND...: prints the command's output only when it fails.
run() {
  local name="$1" output
  shift
  if output="$("$@" 2>&1)"; then
    echo "lint: $name: ok"
  else
    echo "lint: $name: FAILED"
    echo "$output"
    failed+=("$name")
  fi
}

run "ruff check" "$bin/ruff" check .
run "ruff format" "$bin/ruff" format --check --diff .
run "shellcheck (${#shell[@]} files)" "$bin/shellcheck" -x "${shell[@]}"
if ((${#cpp[@]} > 0)); then
  run "clang-format (${#cpp[@]} files)" "$bin/clang-format" --dry-run -Werror "${cpp[@]}"
fi
run "patches" "$root/scripts/apply_patches.sh" --check

if ((${#failed[@]} > 0)); then
  echo "lint: failed: ${failed[*]}" >&2
  exit 1
fi
