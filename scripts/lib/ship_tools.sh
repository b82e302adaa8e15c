# shellcheck shell=bash
# Sourced: the tools that only shipping and the documentation's site need.

# shellcheck source=scripts/lib/python.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/python.sh"

# install_ship_tools ROOT: makes ROOT/build/venv-ship from locks/ship.lock, unless it is
# current, and puts it on PATH.
install_ship_tools() {
  local root=$1 tools="$1/build/venv-ship" key uv
  local cache="${MEGATRON_BYTEPS_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/megatron-byteps}"
  key=$(sha256sum <"$root/locks/ship.lock" | cut -c -64)
  if [[ ! -f $tools/.key || $(<"$tools/.key") != "$key" ]]; then
    echo "installing locks/ship.lock in build/venv-ship" >&2
    # make setup left it there.
    find_uv "$root" "$cache" || { echo "error: no uv: run scripts/setup.sh" >&2; return 1; }
    use_uv "$cache"
    "$uv" venv --quiet --clear --python "$root/build/venv/bin/python" "$tools"
    "$uv" pip sync --quiet --python "$tools/bin/python" --require-hashes \
      "$root/locks/ship.lock"
    echo "$key" >"$tools/.key"
  fi
  PATH="$tools/bin:$PATH"
}
