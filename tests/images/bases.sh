#!/usr/bin/env bash
# Makes an image of a small Debian, as debian:SUITE-slim is, out of Debian's packages, where no
# registry can be reached.
#   bases.sh SUITE amd64|arm64 CACHE [PACKAGE...]
# Prints the image's name in buildah's storage. CACHE is the folder where its files are kept for the
# next time.
set -euo pipefail

suite=$1 arch=$2 cache=$3
shift 3
packages=("$@")
tarball="$cache/debian-$suite-$arch${packages[*]:+-$(sha256sum <<<"${packages[*]}" | cut -c -8)}.tar"
# Source of this machine's own packages.
# shellcheck disable=SC2016
mirror=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' 'Codename: bookworm' 2>/dev/null |
  head -n 1 || true)

if [[ ! -s $tarball ]]; then
  mkdir -p "$cache"
  part=$(mktemp -d "$cache/base.XXXXXX")
  trap 'rm -rf "$part"' EXIT
  # The slim image leaves documentation out, and so does this one. Merged /usr from the beginning: merging later brings
  # 50 MB of Perl. A mirror that does not answer at once is asked again.
  packages+=(usr-is-merged)
  options=(--variant=minbase --architectures="$arch" --aptopt='Acquire::Retries "3"'
    --hook-dir=/usr/share/mmdebstrap/hooks/merged-usr "--include=$(IFS=,; echo "${packages[*]}")")
  for folder in doc info locale man; do
    options+=("--dpkgopt=path-exclude=/usr/share/$folder/*")
  done
  mmdebstrap "${options[@]}" "$suite" "$part/base.tar" "$mirror" >"$part/log" 2>&1 ||
    { tail -n 30 "$part/log" >&2; exit 1; }
  mv "$part/base.tar" "$tarball"
fi
# The same files give the same image, so images based on it need not be rebuilt.
name="localhost/debian-$suite-$arch:$(sha256sum "$tarball" | cut -c -16)"
if [[ -z $(buildah images --quiet "$name" 2>/dev/null) ]]; then
  container=$(buildah from --arch "$arch" scratch)
  buildah add --quiet "$container" "$tarball" / >/dev/null
  buildah config --arch "$arch" --os linux --cmd '["bash"]' "$container"
  # This machine may trust certificate authorities that Debian does not trust.
  authorities=/etc/ssl/certs/ca-certificates.crt
  if [[ -s $authorities ]]; then
    buildah add --quiet "$container" "$authorities" "$authorities" >/dev/null
    buildah config --env "SSL_CERT_FILE=$authorities" --env "PIP_CERT=$authorities" "$container"
  fi
  buildah commit --quiet --rm --format docker "$container" "$name" >/dev/null
fi
echo "$name"
