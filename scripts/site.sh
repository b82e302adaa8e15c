#!/usr/bin/env bash
# Builds the documentation as a site, in build/site.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=scripts/lib/no_arguments.sh
source "$root/scripts/lib/no_arguments.sh"
# shellcheck source=scripts/lib/ship_tools.sh
source "$root/scripts/lib/ship_tools.sh"
no_arguments "usage: scripts/site.sh [-h]

Builds docs/ as a site in build/site (open index.html), and fails for a link that leads nowhere." "$@"

cd "$root"
install_ship_tools "$root"
# The theme's notice about its future is not ours to pass on.
NO_MKDOCS_2_WARNING=1 mkdocs build --quiet --strict
echo "site: build/site/index.html"
