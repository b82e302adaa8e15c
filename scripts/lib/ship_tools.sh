# shellcheck shell=bash
# Sourced: the tools that only shipping and the documentation's site need.

# install_ship_tools ROOT: makes ROOT/build/venv-ship from requirements-ship.lock, unless it is
# current, and puts it on PATH.
install_ship_tools() {
  local root=$1 tools="$1/build/venv-ship" key
  key=$(sha256sum <"$root/requirements-ship.lock" | cut -c -64)
  if [[ ! -f $tools/.key || $(<"$tools/.key") != "$key" ]]; then
    echo "installing requirements-ship.lock in build/venv-ship" >&2
    rm -rf "$tools"
    "$root/build/venv/bin/python" -m venv "$tools"
    "$tools/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes \
      -r "$root/requirements-ship.lock"
    echo "$key" >"$tools/.key"
  fi
  PATH="$tools/bin:$PATH"
}
