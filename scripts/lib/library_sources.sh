# shellcheck shell=bash
# Sourced: the sources of the library that is compiled into what is shipped, libsodium. They come from
# the distribution's signed source packages, so that no address stands here.

fetch_sodium_source() { fetch_sources "$1" libsodium; }

# fetch_sources FOLDER PACKAGE...: makes FOLDER with PACKAGE-VERSION/ for each, unless it is there.
fetch_sources() {
  local folder=$1 work archive package status=0
  [[ -d $folder ]] && return 0
  shift
  command -v apt-get >/dev/null 2>&1 || {
    echo "error: the sources of $* come from Debian's or Ubuntu's archive, and there" \
      "is no apt-get here" >&2
    return 1
  }
  work=$(mktemp -d "$(dirname "$folder")/sources.XXXXXX")
  (
    set -e
    mkdir -p "$work"/{lists/partial,cache/archives/partial,parts,tree}
    # The same archives as for packages, with their sources; the system's own list stays as it is.
    cat /etc/apt/sources.list /etc/apt/sources.list.d/*.list 2>/dev/null |
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
    rm -f -- *.dsc *.tar.*
    # dfsg and the like mark a repacked archive, not another version.
    for archive in */; do
      [[ $archive == *+* ]] && mv "$archive" "${archive%%+*}"
    done
    for package; do [[ -d $(echo "$package"-*) ]]; done
  ) || status=1
  ((status != 0)) || keep "$work/tree" "$folder" || status=1
  rm -rf "$work"
  ((status == 0)) || echo "error: could not fetch the sources of $*" >&2
  return "$status"
}
