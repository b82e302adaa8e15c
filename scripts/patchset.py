"""Assembles build/<tree> from upstream.lock, the overlay folders and the patch series, and back.

scripts/apply_patches.sh and scripts/export_patches.sh are the usual ways to call it; they put the
checkout on PYTHONPATH. It needs Python >= 3.11 and git, no packages: it runs before the project's
environment exists.
"""

from __future__ import annotations

import argparse
import fcntl
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts.patchkit import export, target, tree
from scripts.patchkit.lock import PatchError, Upstream, load_lock, say


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="patchset.py", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--root", type=Path, default=Path(__file__).resolve().parent.parent,
        help="the project's checkout (default: the one this script lies in)",
    )  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True)

    apply = commands.add_parser(
        "apply", prog="apply_patches.sh",
        help="bring the trees to what upstream.lock, overlays and patches say",
        description="Fetches, unpacks and patches the upstreams into build/; does nothing when "
        "nothing changed, and refuses to throw away work.",
    )  # fmt: skip
    apply.add_argument(
        "--only", metavar="NAME",
        help="this upstream only; without it, those whose source distribution is pinned",
    )  # fmt: skip
    apply.add_argument(
        "--force", action="store_true", help="throw away uncommitted and un-exported work"
    )
    mode = apply.add_mutually_exclusive_group()
    mode.add_argument(
        "--check", action="store_true",
        help="prove, in a temporary folder, that every patch applies with no fuzz, that series "
        "and folder agree and that exporting again changes nothing; of a series for a commit, "
        "without --only, its form alone",
    )  # fmt: skip
    mode.add_argument(
        "--overlay-only", action="store_true",
        help="copy changed overlay files into the trees without committing them (quick, for "
        "incremental builds)",
    )  # fmt: skip
    mode.add_argument(
        "--target", type=Path, metavar="DIR",
        help="apply the Megatron overlay, and the series whose every hunk fits, to this "
        "Megatron-LM checkout instead",
    )  # fmt: skip
    apply.add_argument("--reverse", action="store_true", help="undo --target DIR exactly")
    apply.add_argument(
        "--cpu", action="store_true",
        help="with --target: also what training on a CPU needs (MEGATRON_CPU=1 then asks for it)",
    )  # fmt: skip

    exporting = commands.add_parser(
        "export", prog="export_patches.sh",
        help="write the commits after the overlay's back as patches",
        description="Rewrites the patch folders and their series from the commits in build/.",
    )  # fmt: skip
    exporting.add_argument("--only", metavar="NAME", help="this upstream only")

    key = commands.add_parser("tree-key", help="print a hash of the tree's content")
    key.add_argument("only", metavar="NAME", help="the upstream")

    commands.add_parser("guard", help="fail when a tree holds work that is not exported")

    options = parser.parse_args(arguments)
    if options.command == "apply" and options.reverse and not options.target:
        apply.error("--reverse goes with --target DIR")
    if options.command == "apply" and options.cpu and (options.reverse or not options.target):
        apply.error("--cpu goes with --target DIR, without --reverse")
    if options.command == "apply" and options.target and (options.only or options.force):
        apply.error("--target takes neither --only nor --force")
    if options.command == "apply" and options.force and (options.check or options.overlay_only):
        apply.error("--force goes with neither --check nor --overlay-only")
    return options


def select(parser_root: Path, only: str | None) -> list[Upstream]:
    upstreams = load_lock(parser_root)
    chosen = [upstream for upstream in upstreams if only in (None, upstream.name)]
    if not chosen:
        names = ", ".join(upstream.name for upstream in upstreams)
        raise LookupError(f"no upstream is called {only}; upstream.lock has {names}")
    return chosen


def released(upstreams: list[Upstream]) -> list[Upstream]:
    """Those that can be had without a checkout: what the project is built from."""
    return [upstream for upstream in upstreams if not upstream.commit]


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """One patchset at a time: two would work on the same trees."""
    (root / "build").mkdir(exist_ok=True)
    with (root / "build/.patchset.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another patchset.py to finish")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def run(options: argparse.Namespace) -> None:
    root = options.root.resolve()
    if options.command == "apply" and options.target:
        able = [upstream for upstream in load_lock(root) if upstream.version_file]
        if not able:
            raise PatchError("no upstream in upstream.lock names a version_file")
        checkout = options.target.resolve()
        if options.reverse:
            target.reverse(able[0], checkout)
        else:
            target.apply(able, checkout, ["cpu"] if options.cpu else [])
        return
    if options.command == "guard":
        for upstream in load_lock(root):
            if (upstream.tree / ".git").is_dir():
                state = tree.State.load(upstream.tree)
                tree.refuse_to_lose_work(upstream, state, tree.head_of(upstream.tree))
        return
    chosen = select(root, options.only)
    if options.command == "tree-key":
        say(tree.tree_key(chosen[0].tree))
        return
    with locked(root):
        if options.command == "export":
            run_export(chosen, all_of_them=options.only is None)
            return
        if options.only is None and not options.check:
            chosen = released(chosen)
        for upstream in chosen:
            if options.overlay_only:
                changed = tree.sync_overlay(upstream)
                say(f"{upstream.name}: {', '.join(changed) or 'overlay unchanged'}")
            elif options.check and upstream.commit and options.only is None:
                count = export.check_shape(upstream)
                say(
                    f"{upstream.name}: {count} patches have the form of exported ones; with --only "
                    f"{upstream.name} they are applied, to a checkout that {upstream.variable} "
                    "names or that is fetched"
                )
            elif options.check:
                export.check(upstream)
            else:
                tree.apply(upstream, force=options.force)


def run_export(upstreams: list[Upstream], *, all_of_them: bool) -> None:
    """Exports each; of all of them, those for a commit only where their tree is there and up to
    date. These go first: what they share must not change under them."""
    for upstream in sorted(upstreams, key=lambda upstream: not upstream.commit):
        if upstream.commit and all_of_them:
            if not upstream.tree.is_dir():
                continue
            if export.is_behind(upstream) and not tree.has_commits_to_export(upstream):
                say(f"{upstream.name}: {upstream.shown(upstream.tree)} is old, and has nothing new")
                continue
        changed = export.export(upstream)
        say(f"{upstream.name}: {', '.join(changed) or 'patches unchanged'}")


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    try:
        run(options)
    except LookupError as error:
        print(f"error: {error.args[0]}", file=sys.stderr)
        return 2
    except PatchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
