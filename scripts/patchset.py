"""Assembles build/<tree> from upstream.lock, the overlay folders and the patch series, and exports
it as patches.

Users call it as scripts/apply_patches.sh and scripts/export_patches.sh. It needs no packages,
because it runs before the project's environment exists. For a user's own checkout it needs no git.
"""

from __future__ import annotations

import argparse
import fcntl
import sys
from pathlib import Path

from byteps.patching.series import PatchError, Upstream, load_lock, say
from byteps.patching.target import Target

from scripts.patchkit import tree
from scripts.patchkit.export import check, check_form, export, is_behind


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


def run(options: argparse.Namespace) -> None:
    root = options.root.resolve()
    upstreams = load_lock(root)
    if options.command == "apply" and options.target:
        target = Target.of(options.target, root)
        if options.reverse:
            target.reverse()
        else:
            target.apply(["cpu"] if options.cpu else [])
        return
    if options.command == "guard":
        for upstream in upstreams:
            if (upstream.tree / ".git").is_dir():
                tree.refuse_to_lose_work(upstream)
        return
    chosen = [upstream for upstream in upstreams if options.only in (None, upstream.name)]
    if not chosen:
        names = ", ".join(upstream.name for upstream in upstreams)
        raise LookupError(f"no upstream is called {options.only}; upstream.lock has {names}")
    if options.command == "tree-key":
        say(tree.tree_key(chosen[0].tree))
        return
    # Only one patchset may run at a time, because all work on the same trees.
    (root / "build").mkdir(exist_ok=True)
    with (root / "build/.patchset.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if options.command == "export":
            # Trees of source distributions come after those of a commit, because they may share the
            # patches of these.
            chosen.sort(key=lambda upstream: not upstream.commit)
        for upstream in chosen:
            run_one(options, upstream)


def run_one(options: argparse.Namespace, upstream: Upstream) -> None:
    """Run the command for an upstream. Without --only, the tree of an upstream that is a commit is
    not made, but an existing one is exported."""
    in_passing = upstream.commit and options.only is None
    if options.command == "export":
        if in_passing and not upstream.tree.is_dir():
            return
        if in_passing and is_behind(upstream) and not tree.has_commits_to_export(upstream):
            say(f"{upstream.name}: {upstream.shown(upstream.tree)} is old, and has nothing new")
            return
        say(f"{upstream.name}: {', '.join(export(upstream)) or 'patches unchanged'}")
    elif options.check and in_passing:
        say(
            f"{upstream.name}: {check_form(upstream)} patches have the form of exported ones; with "
            f"--only {upstream.name} they are applied, to a checkout that {upstream.variable} "
            "names or that is fetched"
        )
    elif options.check:
        check(upstream)
    elif options.overlay_only and not in_passing:
        changed = tree.sync_overlay(upstream)
        say(f"{upstream.name}: {', '.join(changed) or 'overlay unchanged'}")
    elif not in_passing:
        tree.apply(upstream, force=options.force)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    try:
        run(options)
    except (LookupError, PatchError) as error:
        print(f"error: {error.args[0]}", file=sys.stderr)
        return 2 if isinstance(error, LookupError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
