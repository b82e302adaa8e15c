# shellcheck shell=bash
# Sourced: the sources of the library that is compiled into what is shipped, libsodium. They come from
# the distribution's signed source packages, so that no address stands here.

distribution() { (. /etc/os-release && echo "$ID-$VERSION_ID"); }

# sodium_source CACHE: prints the folder of its sources. A newer package of the machine is fetched anew.
sodium_source() {
  local version
  version=$(dpkg-query --show --showformat '${Version}' libsodium-dev 2>/dev/null) || version=unknown
  echo "$1/libsodium-$(distribution)-$version"
}

fetch_sodium_source() { fetch_sources "$1" libsodium; }

# fetch_sources FOLDER PACKAGE...: makes FOLDER with PACKAGE-VERSION/ for each, with the distribution's
# own patches, and `versions`, a line for each: package, version, distribution. Does nothing where FOLDER
# is there.
fetch_sources() {
  local folder=$1 work archive package patch status
  [[ -d $folder ]] && return 0
  shift
  command -v apt-get >/dev/null 2>&1 || {
    echo "error: the sources of $* come from Debian's or Ubuntu's archive, and there" \
      "is no apt-get here" >&2
    return 1
  }
  work=$(mktemp -d "$(dirname "$folder")/sources.XXXXXX")
  # Not `( ) || status=1`: there bash would ignore the failures inside.
  set +e
  (
    set -e
    mkdir -p "$work"/{lists/partial,cache/archives/partial,parts,tree}
    # The same archives as for packages, with their sources; the system's own list stays as it is.
    { cat /etc/apt/sources.list /etc/apt/sources.list.d/*.list 2>/dev/null || true; } |
      sed -n 's/^deb /deb-src /p' >"$work/parts/all.list"
    for archive in /etc/apt/sources.list.d/*.sources; do
      [[ -e $archive ]] || continue
      sed 's/^Types:.*/Types: deb-src/' "$archive" >"$work/parts/${archive##*/}"
    done
    apt=(apt-get -qq -o "Dir::Etc::sourcelist=/dev/null" -o "Dir::Etc::sourceparts=$work/parts"
      -o "Dir::State::lists=$work/lists" -o "Dir::Cache=$work/cache" -o "APT::Sandbox::User=root")
    "${apt[@]}" update
    cd "$work/tree"
    "${apt[@]}" source --download-only "$@"
    for archive in *.orig.tar.*; do tar -xf "$archive"; done
    # dfsg and the like mark a repacked archive, not another version.
    for archive in */; do
      [[ $archive == *+* ]] && mv "$archive" "${archive%%+*}"
    done
    for package; do
      cd "$work/tree/$(echo "$package"-*)"
      archive=$(echo ../"$package"_*.dsc)
      echo "$package $(sed -n 's/^Version: //p' "$archive" | head -n 1) $(distribution)" >>../versions
      tar -xf ../"$package"_*.debian.tar.*
      [[ -e debian/patches/series ]] || continue
      # No repository around the cache is meant.
      while read -r patch; do
        GIT_CEILING_DIRECTORIES=$work/tree git apply "debian/patches/$patch"
      done < <(sed -E 's/#.*//; /^ *$/d' debian/patches/series)
    done
    cd "$work/tree"
    rm -f -- *.dsc *.tar.*
  )
  status=$?
  set -e
  ((status != 0)) || keep "$work/tree" "$folder" || status=1
  rm -rf "$work"
  ((status == 0)) || echo "error: could not fetch the sources of $*" >&2
  return "$status"
}
