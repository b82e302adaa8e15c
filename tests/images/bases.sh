#!/usr/bin/env bash
# Makes debian:bookworm-slim for one platform out of Debian's packages, in buildah's storage, where no
# registry can be reached.
#   bases.sh linux/amd64|linux/arm64 NAME CACHE
set -euo pipefail

platform=$1 name=$2 cache=$3
arch=${platform#linux/}
tarball="$cache/debian-bookworm-$arch.tar"
# Where this machine has its own packages from.
# apt fills in $(SITE), not the shell.
# shellcheck disable=SC2016
mirror=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' 'Codename: bookworm' 2>/dev/null |
  head -n 1 || true)

if [[ ! -s $tarball ]]; then
  mkdir -p "$cache"
  folder=$(mktemp -d "$cache/base-$arch.XXXXXX")
  trap 'rm -rf "$folder"' EXIT
  # The slim image leaves documentation out; so do we.
  debootstrap --variant=minbase --arch="$arch" bookworm "$folder/root" "$mirror" >"$folder/log" 2>&1 ||
    { tail -n 30 "$folder/log" >&2; exit 1; }
  rm -rf "$folder"/root/usr/share/{doc,man,info,locale,lintian}/* "$folder"/root/var/cache/apt/* \
    "$folder"/root/var/lib/apt/lists/* "$folder"/root/var/log/*.log "$folder/root/debootstrap"
  tar -C "$folder/root" -cf "$tarball.part" .
  mv "$tarball.part" "$tarball"
fi
container=$(buildah from --arch "$arch" scratch)
buildah add --quiet "$container" "$tarball" / >/dev/null
buildah config --arch "$arch" --os linux --cmd '["bash"]' "$container"
buildah commit --quiet --rm --format docker "$container" "$name" >/dev/null
