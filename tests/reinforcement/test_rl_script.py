"""The task, the settings and the report; scripts/rl.py; and a user's own command line."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts import rl
from scripts.children import Spawned, end_all, last_lines
from scripts.trainkit import rl_task
from scripts.trainkit.rl_settings import CHAT, ENVIRONMENTS, EXTENSION, SUMS, Settings

ROOT = Path(__file__).resolve().parents[2]


def settings(**values: Any) -> Settings:
    files = {"model": Path("model"), "questions": Path("sums.parquet"), "folder": Path("folder")}
    return Settings(**files | values)


def compose(overrides: Sequence[str]) -> Any:
    """Compose verl's trainer configuration with these overrides."""
    from hydra import compose as of_hydra
    from hydra import initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        return of_hydra("ppo_trainer", overrides=list(overrides))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"algorithm": "sarsa"}, "algorithm 'sarsa' is not known; it can be grpo, ppo"),
        ({"mode": "late"}, "mode 'late' is not known; it can be sync, colocate_async"),
        ({"ranks": 3, "tensor": 2}, "3 ranks cannot be cut into tensor 2, pipeline 1, context 1"),
        ({"ranks": 3, "rollout_tensor": 2}, "3 ranks cannot be cut into rollouts of 2"),
        ({"ranks": 3, "prompts": 4, "responses": 2}, "cannot be shared by 2 updates of 3 ranks"),
    ],
)
def test_bad_settings_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings(**values)


def test_byteps_is_a_line_of_verls_configuration() -> None:
    with_it = set(settings().overrides())
    without = set(settings(through_byteps=False).overrides())
    assert without < with_it
    config = "+actor_rollout_ref.actor.megatron.override_ddp_config"
    assert f"{config}.use_dpu_reduce=true" in with_it - without


def test_verl_takes_the_settings(model: Path) -> None:
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    made = settings(algorithm="ppo", rollout_tensor=2, save_every=2, model=model)
    config = compose(made.overrides())
    assert config.algorithm.adv_estimator == "gae"
    assert config.trainer.use_v1 is True
    assert config.critic.megatron.override_ddp_config.use_dpu_reduce is True
    validate_config(config, need_reference_policy(config), need_critic(config))


def documented() -> list[list[str]]:
    """Get the additions to verl's command line in docs/use/rl.md, each as shell words."""
    blocks = (ROOT / "docs/use/rl.md").read_text(encoding="utf-8").split("```")[1::2]
    blocks = [block.replace("\\\n", " ") for block in blocks if block.startswith("\n  ")]
    return [shlex.split(block) for block in blocks]


def test_verl_takes_what_the_documentation_adds() -> None:
    switches, profile = documented()
    config = compose(["model_engine=megatron", *switches, *profile])
    for role in (config.actor_rollout_ref.actor, config.critic):
        assert role.megatron.override_ddp_config.use_dpu_reduce is True
    variables = config.ray_kwargs.ray_init.runtime_env.env_vars
    # Ray accepts only text.
    assert variables.DMLC_PS_ROOT_PORT == "9000" and variables.DMLC_NUM_WORKER == "32"
    assert config.actor_rollout_ref.actor.profiler.enable is True


@pytest.mark.parametrize(
    ("answer", "score"), [("12", 1.0), ("1", 0.0), ("", 0.0), ("121", 0.0), ("1=2", 0.0)]
)
def test_only_the_right_sum_is_rewarded(answer: str, score: float) -> None:
    assert rl_task.compute_score(rl_task.SOURCE, answer, "12") == score


@pytest.mark.parametrize(
    ("answer", "score"),
    [("12", 1.0), ("5 + 7 = 12.", 1.0), ("12 is 5 + 7", 0.0), ("112", 0.0), ("twelve", 0.0)],
)
def test_the_last_number_of_an_answer_counts(answer: str, score: float) -> None:
    assert rl_task.score_last_number("sums", answer, "12") == score


def test_a_rank_computes_with_as_many_responses_as_its_task_allows() -> None:
    micro = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
    logs = "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu"
    assert {f"{micro}=32", f"{logs}=64"} < set(settings(task=SUMS).overrides())
    assert {f"{micro}=8", f"{logs}=8"} < set(settings(task=CHAT).overrides())
    # These are six of a rank's eighteen samples in a step, and three of its nine in an update.
    few = settings(task=CHAT, prompts=6, responses=6).overrides()
    assert {f"{micro}=3", f"{logs}=6"} < set(few)


def test_the_base_model_is_asked_as_verl_asks(model: Path, tmp_path: Path) -> None:
    import pandas
    from transformers import AutoTokenizer

    rows = pandas.read_parquet(rl_task.write_questions(tmp_path / "sums.parquet"))
    assert len(rows) == len(rl_task.PAIRS)
    row = rows.iloc[1]
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokens = tokenizer.apply_chat_template(list(row["prompt"]), add_generation_prompt=True)
    ids = tokens if isinstance(tokens, list) else tokens["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == list("3+4=")
    assert row["reward_model"]["ground_truth"] == "7"


def test_report_reads_what_verl_writes(tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir(parents=True)
    lines = [{"step": 0, "data": {"val-core/sums/acc": 0.4}}]
    for number, reward in ((1, 0.2), (2, 0.4), (3, 0.1), (3, 0.6), (4, 0.8), (5, 0.9), (6, 1.0)):
        data = {"critic/score/mean": reward, "actor/kl_loss": 0.01 * number}
        data |= {"training/rollout_probs_diff_max": 0.02, "timing_s/step": 1.5}
        lines.append({"step": number, "data": data})
    # The run restarted after step 3, so the last record of a step counts.
    for name, written in (("steps.1.jsonl", lines[:4]), ("steps.jsonl", lines[4:])):
        text = "".join(json.dumps(line) + "\n" for line in written) + '{"step": 9'
        (tmp_path / name).write_text(text)
    for number, output in ((1, "3"), (6, "7")):
        sample = {"input": "3+4=", "output": output, "gts": "7", "score": float(output == "7")}
        # Each step draws new questions.
        other = {"input": f"3+{number}=", "output": "5", "gts": "9", "score": 0.0}
        text = "".join(json.dumps(response) + "\n" for response in (sample, other))
        (tmp_path / "samples" / f"{number}.jsonl").write_text(text)
    table = [
        "dpu_reduce: dense gradients over 2 ranks",
        "  buckets  MB   backend         MB per host  MB per server  ms  chosen",
        "  1        0.9  reduce-scatter  0.0          -              -",
        "                BytePS flat     0.0          0.0            -   yes: asked for",
    ]
    (tmp_path / "verl.log").write_text("\n".join(f"(WorkerDict pid=7) {line}" for line in table))
    outcome = rl.read(tmp_path, "BytePS")
    assert outcome.first_reward == pytest.approx(0.4)
    assert outcome.last_reward == pytest.approx(0.9)
    assert [step.number for step in outcome.steps] == [1, 2, 3, 4, 5, 6]
    assert outcome.backends == ["BytePS flat"]
    lines_of = rl.samples(outcome).splitlines()
    assert lines_of[2].split() == ["3+4=", "7", "3", "7"]
    assert [line.split() for line in lines_of[3:5]] == [["3+1=", "9", "5"], ["3+6=", "9", "5"]]
    assert lines_of[4].index("5") > lines_of[3].index("5"), "each in its step's column"
    assert lines_of[5].split() == ["all", "0", "of", "2", "1", "of", "2"]
    picture = tmp_path / "picture.png"
    rl.draw([outcome], picture, "title")
    assert picture.read_bytes().startswith(b"\x89PNG")


# scripts/rl.py: refused arguments, and a model of the user's.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers", "3", "--tensor", "2"], "--workers 3 is no multiple of --tensor 2"),
        (["--rollout-tensor", "3"], "--workers 2 is no multiple of --rollout-tensor 3"),
        (["--algorithm", "sarsa"], "invalid choice: 'sarsa'"),
        (["--mode", "late"], "invalid choice: 'late'"),
        (["--prompts", "3"], "--prompts 3 cannot be shared by 2 updates of 2 ranks"),
        (["--model", "mine", "--layers", "4"], "--model has its own"),
        (["--model", "mine", "--reward-model"], "--reward-model is made of the tiny model"),
        (["--lose-actor-at", "4", "--steps", "4"], "--lose-actor-at 4 needs more --steps"),
        (["--spares", "1", "--mode", "colocate_async"], "--spares needs --mode sync"),
    ],
)
def test_bad_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        rl.parse(arguments)
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_ranks_without_gpus_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rl, "_gpus", lambda: 1)
    assert rl.main(["--device", "cuda", "--workers", "2"]) == 1
    assert "2 ranks need 2 GPUs, and torch sees 1" in capsys.readouterr().err


def test_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rl, "NEEDED", ("not_there.at_all", "json"))
    assert rl.main([]) == 1
    assert "error: not_there.at_all: not installed here; use `make rl`" in capsys.readouterr().err


def test_a_model_that_is_nowhere_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The hub is disabled here (`conftest`)."""
    out = ["--out", str(tmp_path / "out")]
    assert rl.main(["--model", "nobody/nothing", *out]) == 1
    assert "error: --model nobody/nothing is no folder, and could" in capsys.readouterr().err
    assert rl.main(["--model", str(tmp_path), *out]) == 1
    assert "is no model's folder: it has no config.json" in capsys.readouterr().err


def make_chat_model(folder: Path) -> Path:
    """Make a Llama shaped like SmolLM2 (three query heads per key, tied embeddings).

    It has random weights, and a byte tokenizer with a chat template.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: n for n, word in enumerate(["<|im_start|>", "<|im_end|>", *letters])}
    raw = Tokenizer(models.BPE(words, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    config = AutoConfig.for_model(
        "llama",
        vocab_size=len(words),
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.thorough
@pytest.mark.timeout(1200)
def test_a_model_of_the_users_own_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_chat_model(tmp_path / "model")
    arguments = ["--model", str(model), "--steps", "2", "--prompts", "4", "--responses", "4"]
    assert rl.main([*arguments, "--out", str(tmp_path / "out")]) == 0
    outcome = rl.read(tmp_path / "out/grpo-byteps", "BytePS")
    assert [step.number for step in outcome.steps] == [1, 2]
    assert all(0 < step.mismatch < 0.2 for step in outcome.steps)
    assert set(outcome.backends) == {"BytePS flat"}
    assert "Answer with the number alone." in outcome.after[0].prompt
    assert all(int(sample.wanted) in range(2, 19) for sample in outcome.after)
    assert "2 ranks" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("steps", "rise", "good"), [(20, 0.19, False), (20, 0.2, True), (4, -0.01, False), (4, 0, True)]
)
def test_the_reward_has_to_rise(steps: int, rise: float, good: bool) -> None:
    outcome: Any = SimpleNamespace(first_reward=0.5, last_reward=0.5 + rise)
    assert rl.check(outcome, rl.parse(["--steps", str(steps)]).rise - 1e-9) is good


def test_few_steps_do_not_tell_of_the_reward(capsys: pytest.CaptureFixture[str]) -> None:
    """The first steps are the last steps, so no reward could fail."""
    steps = [SimpleNamespace(grad_norm=0.0), SimpleNamespace(grad_norm=0.1)]
    outcome: Any = SimpleNamespace(first_reward=0.5, last_reward=0.5, steps=steps)
    rise = rl.parse(["--steps", "3"]).rise
    assert rl.check(outcome, rise)
    said = capsys.readouterr().out
    assert "not judged" in said and "rose" not in said
    outcome.steps = steps[:1]
    assert not rl.check(outcome, rise)
    assert "NOTHING was learnt" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        rl.parse(["--steps", "3", "--rise", "0.1"])


@pytest.mark.parametrize("arguments", [["--lora", "8"], ["--model", "mine"]])
def test_of_adapters_and_of_other_models_no_rise_is_asked(arguments: list[str]) -> None:
    assert rl.parse(arguments).rise == 0


# The lines of docs/use/rl.md on two Ray nodes, with scheduler and server outside Ray.


LIMIT_S = 900.0


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[str]:
    """Address of a Ray cluster with two nodes, with room for a rank on each."""
    from ray.cluster_utils import Cluster

    variables = {**ENVIRONMENTS["cpu"], "BYTEPS_AUTH": "0", "PYTHONWARNINGS": "ignore"}
    made = Cluster()
    for host in ("first", "second"):
        made.add_node(
            num_cpus=9,
            num_gpus=1,
            include_dashboard=False,
            object_store_memory=100 << 20,
            env_vars={**variables, "BYTEPS_HOST_ID": host},
        )
    yield made.address
    made.shutdown()


def start(folder: Path, script: str, *arguments: str) -> Spawned:
    environment = {**os.environ, "BYTEPS_AUTH": "0"}
    return Spawned(script, [str(ROOT / "scripts" / script), *arguments], environment, folder)


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """Address of a scheduler, with a server, for two workers."""
    counts = ("--workers", "2", "--servers", "1")
    file = tmp_path / "port"
    listens = ("--host", "127.0.0.1", "--port", "0", "--port-file", str(file))
    processes = [start(tmp_path, "scheduler.sh", *listens, *counts)]
    try:
        while not file.exists() or not file.read_text().endswith("\n"):
            assert processes[0].running, last_lines(tmp_path / "scheduler.sh.log")
        host, port = file.read_text().split()
        processes.append(start(tmp_path, "server.sh", "--scheduler", f"{host}:{port}", *counts))
        yield host, port
    finally:
        end_all(processes, 10.0)


def recipe(host: str, port: str) -> list[str]:
    """Get the documented lines with this scheduler's values."""
    values = {"DMLC_PS_ROOT_URI": host, "DMLC_PS_ROOT_PORT": f"'{port}'"}
    values |= {"DMLC_NUM_WORKER": "'2'", "DMLC_NUM_SERVER": "'1'"}
    lines = []
    for line in documented()[0]:
        name, _, value = line.partition("=")
        lines.append(f"{name}={values.pop(name.rpartition('.')[2], value)}")
    assert not values, f"docs/use/rl.md does not set {values}"
    return lines


@pytest.mark.timeout(1200)
def test_a_users_own_command_line(
    cluster: str, scheduler: tuple[str, str], model: Path, tmp_path: Path
) -> None:
    settings = Settings(
        through_byteps=False,  # the recipe adds it
        model=model,
        questions=rl_task.write_questions(tmp_path / "sums.parquet"),
        folder=tmp_path / "run",
        steps=2,
    )
    settings.folder.mkdir()
    theirs = [override for override in settings.overrides() if "ray_init" not in override]
    theirs += ["trainer.nnodes=2", "trainer.n_gpus_per_node=1"]
    theirs.append(f"+ray_kwargs.ray_init.address={cluster}")
    variables = "+ray_kwargs.ray_init.runtime_env.env_vars"
    theirs.append(f"{variables}.VERL_FILE_LOGGER_PATH={settings.folder}/steps.jsonl")
    command = [sys.executable, "-W", "ignore", "-m", "verl.trainer.main_ppo"]
    # With `auto`, operations for which a reduce-scatter is as fast would use a reduce-scatter.
    route = "+actor_rollout_ref.actor.megatron.override_ddp_config.dpu_reduce_backend=flat"
    command += [*theirs, *recipe(*scheduler), route]
    assert EXTENSION in " ".join(theirs)  # everything else for a CPU is in the environment
    environment = {**os.environ, **settings.environment()}
    process = Spawned("verl", command, environment, settings.folder, cwd=settings.folder)
    try:
        process.wait(LIMIT_S)
    finally:
        end_all([process], 10.0)
    log = last_lines(settings.folder / "verl.log", 80)
    assert process.status == 0, log
    outcome = rl.read(settings.folder, "BytePS")
    assert [step.number for step in outcome.steps] == [1, 2], log
    assert all(0 < step.mismatch < 0.2 for step in outcome.steps)
    # Two hosts with a rank each, and the server on its own machine.
    assert set(outcome.backends) == {"BytePS flat"}, outcome.backends
