"""Makes a release in build/release/VERSION: wheels, archives, images, bill of materials, checksums.

The checkout must be as committed, and CHANGELOG.md must begin with its version and a date. The same
commit and compiler give the same bytes, except for images, which take the newest packages of their
distribution. Needs build/venv (`make setup`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from scripts import audit, patchset
from scripts.releasekit import contents
from scripts.releasekit.contents import ROOT, ReleaseError, ship_tools

IMAGES = ("server", "worker", "worker-ray", "worker-hf", "worker-rl")
ARCHITECTURES = {"x86_64": "linux/amd64", "aarch64": "linux/arm64"}


def say(text: str) -> None:
    print(f"release: {text}", file=sys.stderr, flush=True)


def run(what: str, *command: str | Path, env: dict[str, str] | None = None) -> None:
    full = {**os.environ, **(env or {})}
    if subprocess.run(command, env=full, stdin=subprocess.DEVNULL, check=False).returncode != 0:
        raise ReleaseError(f"{what} failed, see above; nothing was released")


def _image_list(text: str) -> list[str]:
    images = [] if text == "none" else text.split(",")
    for image in images:
        if image not in IMAGES:
            raise argparse.ArgumentTypeError(f"'{image}' is none of {', '.join(IMAGES)}, none")
    return images


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="release.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--images", type=_image_list, default=["server", "worker"], metavar="LIST",
        help=f"of {','.join(IMAGES)} (default: server,worker); none where neither docker nor "
        "buildah is. Variables of scripts/images.sh, such as CUDA_IMAGE, name their bases",
    )  # fmt: skip
    parser.add_argument(
        "--arch", action="append", choices=[*ARCHITECTURES], help="only this one (default: both)"
    )
    parser.add_argument(
        "--draft", action="store_true", help="although CHANGELOG.md calls the version unreleased"
    )
    parser.add_argument(
        "--ignore-vuln", action="append", default=[], metavar="ID",
        help="a known vulnerability that does not concern what is released (`make audit`)",
    )  # fmt: skip
    return parser.parse_args(arguments)


def check_engine(images: Sequence[str]) -> None:
    """Raises ReleaseError if images are wanted and no program can build them. Called before any
    step that takes long."""
    if not images:
        say("without images (--images none)")
        return
    command = [str(ROOT / "scripts/images.sh"), "--engine"]
    engine = subprocess.run(command, capture_output=True, text=True, check=False)
    if engine.returncode != 0:
        raise ReleaseError(
            f"{engine.stderr.strip().removeprefix('error: ')}; --images none makes a release "
            "without"
        )
    say(f"images by {engine.stdout.strip()}")


def check_vulnerabilities(ignored: Sequence[str]) -> None:
    status = audit.main([word for number in ignored for word in ("--ignore-vuln", number)])
    if status not in (0, audit.FOUND, audit.UNREACHABLE):
        raise ReleaseError("make audit failed, see above")
    if status == audit.FOUND:
        raise ReleaseError(
            "packages of locks/ have known vulnerabilities: scripts/locks.py update --upgrade, or "
            "--ignore-vuln ID for each that does not concern what is released"
        )


def build(options: argparse.Namespace, release: contents.Release, folder: Path) -> None:
    """Write all files of the release to the folder."""
    dated = {"SOURCE_DATE_EPOCH": str(release.epoch)}
    architectures = options.arch or list(ARCHITECTURES)
    wheel = [str(ROOT / "scripts/wheel.sh"), "--out", str(folder)]
    wheel += [word for arch in architectures for word in ("--arch", arch)]
    run("scripts/wheel.sh", *wheel, env=dated)
    contents.archive(ROOT, release, folder)
    for image in options.images:
        kind, _, group = image.partition("-")
        command = [ROOT / "scripts/images.sh", kind, "--dist", folder, "--save", folder]
        if kind == "server":
            command += ["--platform", ",".join(ARCHITECTURES[name] for name in architectures)]
        run(f"the image of the {kind}", *command, *(["--with", group] if group else []))
    say("the bill of materials")
    library = 'source "$0/scripts/lib/system.sh"; sodium_source "$1"'
    cache = os.environ.get("MEGATRON_BYTEPS_CACHE") or str(
        Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "megatron-byteps")
    )
    sodium = subprocess.check_output(["bash", "-c", library, ROOT, cache], text=True).strip()
    bill = folder / f"{release.name}.cdx.json"
    run(
        "the bill of materials",
        *(ship_tools() / "python", "-B", "-m", "scripts.releasekit.sbom"),
        *("--release", json.dumps(asdict(release)), "--sodium", sodium, "--out", bill, folder),
        env={"PYTHONPATH": str(ROOT)},
    )
    contents.write_sums(folder)


def make(options: argparse.Namespace) -> Path:
    """Make the release and return its folder. After an error the folder is as it was before."""
    release = contents.check(ROOT, draft=options.draft)
    for command in ("apply", "guard"):
        if patchset.main(["--root", str(ROOT), command]) != 0:
            raise ReleaseError("build/ is not as overlays and patches say, see above")
    check_engine(options.images)
    check_vulnerabilities(options.ignore_vuln)
    folder = ROOT / "build/release" / release.version
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".new-") as temporary:
        made = Path(temporary, "files")
        made.mkdir()
        build(options, release, made)
        if contents.check(ROOT, draft=options.draft) != release:
            raise ReleaseError(
                f"another commit than {release.commit} was checked out meanwhile; nothing was "
                "released. Release in a clone that nobody edits"
            )
        if folder.exists():
            folder.rename(Path(temporary, "old"))
        made.rename(folder)
    say(f"{folder.relative_to(ROOT)}, of commit {release.commit}:")
    for line in (folder / contents.SUMS).read_text(encoding="utf-8").splitlines():
        size = (folder / line.split(maxsplit=1)[1]).stat().st_size
        print(f"{line}  {size / 1e6:.1f} MB")
    return folder


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    try:
        make(options)
    except ReleaseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
