"""Checks of pages: links, drawings that match their sources, and figures that match the
measurements."""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.recipekit.features import FEATURES, MARKS, rows_of_results
from tests.pages import PAGES as PAGES_TO_USE
from tests.pages import blocks

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md")]
DIAGRAMS = sorted(REPOSITORY.glob("docs/diagrams/*.dot"))
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
RESULTS = sorted(REPOSITORY.glob("docs/results/*.md"))


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), link


@pytest.mark.parametrize("source", DIAGRAMS, ids=lambda source: source.stem)
def test_diagram_is_current(source: Path) -> None:
    picture = REPOSITORY / "docs/images" / f"{source.stem}.svg"
    checksum = hashlib.sha256(source.read_bytes()).hexdigest()
    assert f"<!-- source: {checksum} -->" in picture.read_text(), "run scripts/tools.sh diagrams"


def test_figure_is_measured() -> None:
    """One paragraph of the results has all numbers that are between the marks."""
    marked = re.findall(r"<!-- figure -->(.*?)<!-- end\s+of figure -->", README, re.S)
    assert marked
    for figure in marked:
        numbers = set(re.findall(r"\d+(?:\.\d+)?", figure))
        paragraphs = [
            paragraph
            for source in RESULTS
            if source.exists()
            for paragraph in source.read_text(encoding="utf-8").split("\n\n")
        ]
        assert any(
            numbers <= set(re.findall(r"\d+(?:\.\d+)?", paragraph)) for paragraph in paragraphs
        ), figure


def test_speeds_are_quotients_of_times() -> None:
    """Checks the tables of times that have a column of speeds."""
    page = (REPOSITORY / "docs/results/figures.md").read_text(encoding="utf-8")
    table = re.search(r"^\| hosts \| links .*\n\|[-| ]+\n((?:\|.*\n)+)", page, re.M)
    assert table
    for line in table[1].splitlines():
        cells = [cell.strip(" *") for cell in line.strip("|").split("|")]
        bf16, int8, int4 = (float(cells[column]) for column in (4, 7, 8))
        for speed, time in zip(cells[9:], (int8, int4), strict=True):
            assert float(speed) == pytest.approx(bf16 / time, abs=0.006), line


def test_size_of_the_patches_to_megatron() -> None:
    lines, files = 0, set()
    for patch in REPOSITORY.glob("patches/megatron-core/*/*.patch"):
        text = patch.read_text(encoding="utf-8")
        if "\nPart: cpu" not in text:
            lines += len(re.findall(r"^\+(?!\+\+ )", text, re.M))
            files |= set(re.findall(r"^\+\+\+ b/(.*)$", text, re.M))
    said = rf"by\s+{lines}\s+lines\s+in\s+{len(files)}\s+files"
    assert re.search(said, README), f"README: not {lines} lines in {len(files)} files"
    install = (REPOSITORY / "docs/use/install.md").read_text(encoding="utf-8")
    assert re.search(said.replace("by\\s+", ""), install)


# Pages, errors and help texts use the field's words, for search: NIC, bandwidth.


RATE = r"(?:[kMGT]i?(?:B|bit)|bytes?|bits?|gradients|connections|lines?|steps?|ms)"
INSTEAD = {
    r"\b(?:network )?cards?\b": "NIC",
    r"\bprocessors?\b": "core, CPU; processor time: CPU time",
    r"\bpart of what (?:the|a) links? allows?": "fraction of link bandwidth",
    r"\bbars?\b": "threshold",
    r"\bunder way\b": "in flight, running",
    r"\b(?:on|amid) (?:its|their|the) way\b": "in flight",
    r"\bno way to\b": "no path to",
    r"\bmend(?:ed|s|ing)?\b": "fixed",
    r"\bincarnations?\b": "restart, generation",
    r"\bstopped by order\b": "stopped by SIGTERM",
    r"\bstrangers?\b": "unauthenticated peers",
    r"\bin turns?\b": "interleaved",
    rf"\b{RATE} an? (?:second|host|GPU|rank|parameter|server|step)\b": "per second, per host",
    r"\b(?:GPUs|ranks|NICs) a (?:host|machine)\b": "per host",
    r"\bwhoever\b": "anybody who, a process that",
    r"\bbeside\b": "next to, compared with",
}
"""A pattern, and its replacement."""
ANY = re.compile("|".join(INSTEAD).replace(" ", r"\s+"), re.I)

FOR_USERS = [
    *(REPOSITORY / name for name in ("README.md", "CHANGELOG.md", "SECURITY.md")),
    REPOSITORY / "CONTRIBUTING.md",
    *sorted(REPOSITORY.glob("docs/**/*.md")),
]
FOLDERS = ("byteps/byteps", "Megatron-LM", "integrations", "scripts", "bench")
SOURCES = [
    path
    for folder in FOLDERS
    for path in sorted((REPOSITORY / folder).rglob("*"))
    if path.suffix in (".py", ".cc", ".h", ".sh")
]
OTHERS = ("Makefile", "deploy/grafana/byteps.json", "scripts/examples/slurm.sbatch")
MOST_WORDS = 45_000
"""Most words of docs/: each fact is stated once, and raw figures are records, not pages."""


def prose(text: str, *, tables: bool = True) -> str:
    """Blank out code and generated text, with the same number of lines."""

    def blank(match: re.Match[str]) -> str:
        return "\n" * match[0].count("\n")

    text = re.sub(r"<!-- (?:made|results).*?<!-- end", blank, text, flags=re.S)
    if not tables:
        text = re.sub(r"^\|.*$", blank, text, flags=re.M)
    text = re.sub(r"^```.*?^```", blank, text, flags=re.S | re.M)
    text = re.sub(r"(?<=\n\n)(?:(?: {4}|\t).*\n|\n(?= {4}))+", blank, text)
    return re.sub(r"`[^`]*`|\]\([^)]*\)|<!--.*?-->", blank, text, flags=re.S)


def faults(text: str) -> list[str]:
    """Make a line for each word that has a better replacement."""
    wrong = []
    for pattern, instead in INSTEAD.items():
        for match in re.finditer(pattern.replace(" ", r"\s+"), text, re.I):
            line = text.count("\n", 0, match.start()) + 1
            words = " ".join(match[0].split())
            wrong.append(f"line {line}: '{words}': write {instead}")
    return wrong


def texts_of_python(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each string; of docstrings only a module's that is printed as help."""
    tree = ast.parse(source)
    notes = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    if "__doc__" in source and isinstance(tree.body[0], ast.Expr):
        notes.discard(tree.body[0].value)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in notes:
            yield node.lineno, node.value


def texts_of_cpp(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each string, with adjacent strings joined."""
    text = r'"(?:\\.|[^"\\\n])*"'
    tokens = rf"//[^\n]*|/\*.*?\*/|{text}(?:\s*{text})*|'(?:\\.|[^'\\])+'"
    for match in re.finditer(tokens, source, re.S):
        if match[0].startswith('"'):
            joined = re.sub(r'"\s*"', "", match[0])
            yield source.count("\n", 0, match.start()) + 1, joined


def shown(path: Path) -> str:
    """Get all texts of a source that users may read, at their lines."""
    source = path.read_text(encoding="utf-8")
    if not ANY.search(re.sub(r'"\s*f?"', "", source)):
        return ""  # Most sources are left here, without being parsed.
    if path.suffix == ".sh":
        return re.sub(r"^\s*#.*$", "", source, flags=re.M)
    texts = texts_of_python(source) if path.suffix == ".py" else texts_of_cpp(source)
    lines = [""] * (source.count("\n") + 2)
    for number, text in texts:
        if " " in text.strip():
            lines[number] += " ".join(text.split()) + " | "
    return "\n".join(lines[1:])


@pytest.mark.parametrize("page", FOR_USERS, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_field_words(page: Path) -> None:
    part = page.relative_to(REPOSITORY).parts[1:2]
    tables = part not in [("design",), ("results",)]
    wrong = faults(prose(page.read_text(encoding="utf-8"), tables=tables))
    assert not wrong, "\n".join([f"{page.relative_to(REPOSITORY)}:", *wrong])


def test_field_words_in_errors_and_help() -> None:
    assert len(SOURCES) > 300
    wrong = [
        f"{path.relative_to(REPOSITORY)}, {fault}"
        for path in SOURCES
        for fault in faults(shown(path))
    ]
    for name in OTHERS:
        wrong += [f"{name}, {fault}" for fault in faults((REPOSITORY / name).read_text())]
    assert not wrong, "\n".join(wrong)


def test_pages_stay_short() -> None:
    """Only words with a letter or a digit count, so lines of tables do not."""
    words = sum(
        len([word for word in page.read_text(encoding="utf-8").split() if re.search(r"\w", word)])
        for page in REPOSITORY.glob("docs/**/*.md")
    )
    assert words <= MOST_WORDS, f"docs/ has {words} words: say each thing once, in fewer words"


# Commands of README and docs/ name existing programs, targets and flags.


OVERLAY = REPOSITORY / "byteps"
WITH_COMMANDS = [REPOSITORY / "README.md", *sorted(REPOSITORY.glob("docs/**/*.md"))]
TARGETS = set(re.findall(r"^([a-z0-9-]+):", (REPOSITORY / "Makefile").read_text(), re.M))


def commands(text: str) -> list[str]:
    """List the lines of all code, also inside text, with continued lines joined."""
    text = text.replace("\\\n", " ")
    blocks = re.findall(r"^```.*?\n(.*?)^```", text, re.S | re.M)
    blocks += re.findall(r"(?:^ {4,}\S.*\n)+", text, re.M)
    blocks += re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text)
    return [line.strip() for block in blocks for line in block.splitlines()]


def told_by(script: Path) -> str:
    """Get the text of a script, and of the program that gets its arguments."""
    if not script.exists():
        return ""
    text = script.read_text(encoding="utf-8")
    for program in re.findall(r"scripts[/.](\w+)(?:\.py)?\b", text):
        if (script.parent / f"{program}.py").exists():
            text += (script.parent / f"{program}.py").read_text(encoding="utf-8")
    return text


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_programs_targets_and_flags_are_there(page: Path) -> None:
    missing = []
    for line in commands(page.read_text(encoding="utf-8")):
        for program in re.findall(r"(?<![\w/.-])(?:scripts|bench|tests)/[\w/.-]+\.\w+", line):
            if not any((folder / program).exists() for folder in (REPOSITORY, OVERLAY)):
                missing.append(f"{program}: {line}")
        for target in re.findall(r"(?:^|[;&] *)make ([a-z][a-z0-9-]*)", line):
            if target not in TARGETS:
                missing.append(f"make {target}: {line}")
        if match := re.match(r"(?:build/venv\S*/bin/python )?(scripts/[\w-]+\.sh)(?= )(.*)", line):
            options = re.split(r" -- |#|\|", match[2])[0]
            for flag in re.findall(r"(?<=\s)--[a-z][a-z-]+", options):
                if flag not in told_by(REPOSITORY / match[1]):
                    missing.append(f"{match[1]} {flag}: {line}")
    assert not missing, "\n".join(missing)


COMMAND = re.compile(
    r"(?:\$ |[A-Z0-9_]+=\S+ )*(?:(?:scripts|bench|build|tests)/|"
    r"(?:byteps-server|docker|megatron-byteps|kubectl|make|openssl|pip|python|sbatch|torchrun)\b)"
)
"""A line that is neither a command of the system, such as ``cd``, nor output of a command."""
TRIED = {
    r"pip (?:install --find-links FOLDER mega[a-z-]*$|uninstall)": "tests/build/test_installed.py",
    r"make setup": ".ci/run",
    r"make train\b(?!.*\b(?:HF|MODE)=)": "tests/megatron/test_train_script.py",
    r"make train MODE=ray": "tests/under_ray/test_modes.py",
    r"make train HF=": "tests/hugging_face/test_hugging_face.py",
    r"make rl\b|python scripts/rl\.py": "tests/reinforcement/test_rl_script.py",
    r"make wheel": "tests/images/test_images.py",
    r"make images|(?:\w+=\S+ )?scripts/images\.sh": "tests/images/test_images.py",
    r"megatron-byteps (?:patch|unpatch|status)\b": "tests/build/test_installed.py",
    r"byteps-server --new-secret": "tests/build/test_installed.py",
    r"byteps-server --features": "tests/images/test_images.py",
    r"(?:scripts/|megatron-byteps )(?:scheduler|server|worker)\b": "tests/multiproc/test_pages.py",
    r"scripts/cluster\.sh": "tests/multiproc/test_cluster_script.py",
    r"scripts/status\.sh": "tests/multiproc/test_status.py",
    r"scripts/check_rdma\.sh": "tests/rdma/test_vm.py",
    r"scripts/merge_traces\.py": "tests/multiproc/test_timeline.py",
    r"scripts/prepare_data\.py": "tests/megatron/test_train_script.py",
    r"sbatch": "tests/multiproc/test_slurm.py",
    r"docker compose": "tests/images/test_images.py",
    r"docker build -f docker/server.Dockerfile": "tests/images/test_images.py",
    r"openssl": "tests/multiproc/test_tls.py",
    r"torchrun --nproc-per-node 2 try\.py": "tests/multiproc/test_embedded.py",
    r"BYTEPS_HOST_ID=. torchrun": "tests/multiproc/test_embedded.py",
    r"torchrun .* your_program\.py": "tests/multiproc/test_embedded.py",
    r"torchrun .*pretrain_(?:dpu_)?gpt\.py": "tests/megatron/test_check.py",
    r"MEGATRON_CPU=1 torchrun ": "tests/megatron/test_train_script.py",
    r"(?:BYTEPS_\w+=\S+ )+torchrun ": "tests/netkit/test_own_hosts.py",
    r"megatron-byteps try": "tests/netkit/test_trial.py",
    r"(?:BYTEPS_\w+=\S+ )*bench/pushpull_bench\.py": "tests/bench/test_end_to_end.py",
    r"python -m megatron_byteps_ray": "tests/under_ray/test_modes.py",
    r"python -m megatron_byteps_rl": "tests/reinforcement/test_rl_script.py",
    r"\$ megatron-byteps sizing": "tests/unit/test_sizing.py",
    r"\$ megatron-byteps check": "tests/megatron/test_check.py",
    r"tests/rdma/run_in_vm\.py": "tests/rdma/test_vm.py",
}
"""Patterns of commands, and the test file that runs each command, perhaps with other numbers."""
NOT_TRIED = {
    r"kubectl": "needs a Kubernetes cluster; tests/house/test_manifests.py checks the manifests",
    r"docker run .*--gpus all": "needs Docker with GPUs, and a cluster of Ray",
    r"pip install (?:.*'megatron-byteps\[|--no-deps megatron-bridge)": "downloads gigabytes of "
    "other projects; tests/build/test_release.py compares the extras with what the locks hold",
}
"""Commands that no test runs, and the reason."""


def test_each_command_is_tried_or_has_a_reason() -> None:
    lines = [
        re.sub(r" +# .*", "", line)
        for page in PAGES_TO_USE
        for block in blocks(page.read_text(encoding="utf-8"))
        for line in block
        if COMMAND.match(line)
    ]
    known = {**TRIED, **NOT_TRIED}
    missing = [line for line in lines if not any(re.match(pattern, line) for pattern in known)]
    assert not missing, "\n".join(missing)
    for pattern in known:
        assert any(re.match(pattern, line) for line in lines), f"no page has {pattern}"
    for path in TRIED.values():
        assert (REPOSITORY / path).exists(), path


# docs/results/recipes.md is `make recipes` output, and agrees with the other results.


DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "results/recipes.md").read_text(encoding="utf-8")


def _rows(mark: str) -> list[list[str]]:
    """Get the rows of the table under a mark, without its head."""
    text = re.search(rf"<!-- {mark}: .*?-->\n(.*?)\n<!-- end -->", PAGE, re.S)
    assert text, mark
    lines = [line.strip("| ").split(" | ") for line in text[1].splitlines()]
    assert len({len(line) for line in lines[:1] + lines[2:]}) == 1, mark
    return lines[2:]


def test_every_table_is_there() -> None:
    for mark in MARKS:
        assert _rows(mark), mark


def test_counts_are_of_one_number() -> None:
    for _, source, number, *counts in _rows("counts"):
        assert re.search(r"\d+\.\d+\.\d+", source)
        for count in counts:
            whole, _, part = count.partition(" ")
            assert int(whole) <= int(number)
            assert not part or part == f"({100 * int(whole) / int(number):.1f} %)"
        accepted, through, run = (int(counts[i].split()[0]) for i in (0, 2, 4))
        assert max(through, run) <= accepted


def test_what_was_run_is_in_the_tables_of_correctness() -> None:
    rows, features = rows_of_results(DOCS), {feature.name: feature for feature in FEATURES}
    for name, outcome, *_ in _rows("features"):
        if outcome != "accepted, never run":
            assert outcome in rows, f"{name}: no table has {outcome} any more: `make recipes`"
            assert outcome in features[name].rows, name
