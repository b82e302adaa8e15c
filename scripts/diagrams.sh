#!/usr/bin/env bash
# Draws docs/diagrams/*.dot as docs/images/*.svg, with Graphviz.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=scripts/lib/no_arguments.sh
source "$root/scripts/lib/no_arguments.sh"
no_arguments "usage: scripts/diagrams.sh [-h]

Draws docs/diagrams/*.dot as docs/images/*.svg, with Graphviz (Debian's package graphviz). Each picture
carries the checksum of its source; a test compares them." "$@"

command -v dot >/dev/null || {
  echo "error: Graphviz is not installed: apt-get install graphviz" >&2
  exit 1
}
for source in "$root"/docs/diagrams/*.dot; do
  name=$(basename "$source" .dot)
  picture="$root/docs/images/$name.svg"
  dot -Tsvg "$source" >"$picture.part"
  echo "<!-- source: $(sha256sum <"$source" | cut -c -64) -->" >>"$picture.part"
  mv "$picture.part" "$picture"
  echo "docs/images/$name.svg"
done
