# shellcheck shell=bash
# Sourced: what is kept outside the checkout, under names that say what is inside.

# keep NEW KEPT: gives a folder that is whole its name in the cache. Several setups may make the same
# at once: a later one finds the first one's, which is as good, and leaves it in place.
keep() {
  mkdir -p "$(dirname "$2")"
  mv -T "$1" "$2" 2>/dev/null || { [[ -d $2 ]] && rm -rf "$1"; }
}
