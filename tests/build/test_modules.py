"""What users install holds no module of Python that nothing here tries."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODULES = {
    "byteps/__init__.py": "",
    "byteps/autoload.py": "tests/multiproc/test_c10d.py",
    "byteps/c10d_plugin.py": "tests/multiproc/test_c10d.py",
    "byteps/cost_model.py": "tests/bench/test_costmodel.py",
    "byteps/launcher/__init__.py": "",
    "byteps/launcher/board.py": "tests/multiproc/test_embedded.py",
    "byteps/launcher/children.py": "tests/unit/test_embedded_choices.py",
    "byteps/launcher/embedded.py": "tests/multiproc/test_embedded.py",
    "byteps/launcher/environment.py": "tests/unit/test_embedded_choices.py",
    "byteps/launcher/leaving.py": "tests/multiproc/test_leaving.py",
    "byteps/launcher/meeting.py": "tests/unit/test_meeting.py",
    "byteps/logs.py": "tests/multiproc/test_logs.py",
    "byteps/server/__init__.py": "tests/multiproc/test_optimizer.py",
    "byteps/sizing/__init__.py": "tests/unit/test_sizing.py",
    "byteps/sizing/__main__.py": "tests/unit/test_sizing.py",
    "byteps/torch/__init__.py": "tests/multiproc/test_optimizer.py",
    "byteps/torch/alike.py": "tests/multiproc/test_diloco.py",
    "byteps/torch/block_kernels.py": "tests/unit/test_block_kernels.py",
    "byteps/torch/blocks.py": "tests/unit/test_block_kernels.py",
    "byteps/torch/broadcast.py": "tests/multiproc/test_optimizer.py",
    "byteps/torch/bucketing.py": "tests/multiproc/test_server_optimizer.py",
    "byteps/torch/c10d/__init__.py": "",
    "byteps/torch/c10d/group.py": "tests/multiproc/test_c10d.py",
    "byteps/torch/c10d/hooks.py": "tests/multiproc/test_c10d.py",
    "byteps/torch/c10d/joining.py": "tests/multiproc/test_c10d.py",
    "byteps/torch/c10d/policy.py": "tests/multiproc/test_c10d.py",
    "byteps/torch/c10d/reductions.py": "tests/multiproc/test_c10d.py",
    "byteps/torch/c10d/streamed_work.py": "tests/unit/test_streamed_work.py",
    "byteps/torch/c10d/work.py": "tests/multiproc/test_c10d.py",
    "byteps/torch/chance.py": "tests/multiproc/test_few_bits.py",
    "byteps/torch/completions.py": "tests/multiproc/test_c10d.py",
    "byteps/torch/compression.py": "tests/multiproc/test_optimizer.py",
    "byteps/torch/declarations.py": "tests/multiproc/test_declarations.py",
    "byteps/torch/departure.py": "tests/multiproc/test_endings.py",
    "byteps/torch/diloco.py": "tests/multiproc/test_diloco.py",
    "byteps/torch/distributed_optimizer.py": "tests/multiproc/test_optimizer.py",
    "byteps/torch/engine.py": "tests/multiproc/test_push_pull.py",
    "byteps/torch/feedback.py": "tests/multiproc/test_few_bits.py",
    "byteps/torch/feedback_state.py": "tests/multiproc/test_few_bits.py",
    "byteps/torch/figures.py": "tests/multiproc/test_metrics.py",
    "byteps/torch/flat.py": "tests/multiproc/test_server_optimizer.py",
    "byteps/torch/gradient_check.py": "tests/megatron/test_layouts.py",
    "byteps/torch/hosts.py": "tests/unit/test_nodes.py",
    "byteps/torch/in_flight.py": "tests/multiproc/test_push_pull.py",
    "byteps/torch/job.py": "tests/megatron/test_core.py",
    "byteps/torch/measure.py": "tests/megatron/test_routes.py",
    "byteps/torch/members.py": "tests/multiproc/test_replicas.py",
    "byteps/torch/memory.py": "tests/multiproc/test_push_pull.py",
    "byteps/torch/node_groups.py": "tests/unit/test_server_nodes.py",
    "byteps/torch/nodes.py": "tests/unit/test_nodes.py",
    "byteps/torch/operations.py": "tests/multiproc/test_push_pull.py",
    "byteps/torch/ops.py": "tests/multiproc/test_push_pull.py",
    "byteps/torch/pieces.py": "tests/unit/test_nodes.py",
    "byteps/torch/ranks.py": "tests/multiproc/test_groups.py",
    "byteps/torch/routes.py": "tests/megatron/test_routes.py",
    "byteps/torch/server_blocks.py": "tests/multiproc/test_few_bits.py",
    "byteps/torch/server_bucket.py": "tests/multiproc/test_server_optimizer.py",
    "byteps/torch/server_host.py": "tests/unit/test_server_nodes.py",
    "byteps/torch/server_optimizer.py": "tests/multiproc/test_server_optimizer.py",
    "byteps/torch/server_rule.py": "tests/unit/test_server_nodes.py",
    "byteps/torch/server_shards.py": "tests/unit/test_server_nodes.py",
    "byteps/torch/server_tensor.py": "tests/multiproc/test_server_optimizer.py",
    "byteps/torch/server_transfer.py": "tests/unit/test_server_nodes.py",
    "byteps/torch/session.py": "tests/multiproc/test_lifecycle.py",
    "byteps/torch/speculation.py": "tests/unit/test_step_machine.py",
    "byteps/torch/state_transfer.py": "tests/multiproc/test_replicas.py",
    "byteps/torch/step_machine.py": "tests/unit/test_step_machine.py",
    "byteps/torch/tensors.py": "tests/unit/test_known_memory.py",
    "byteps/torch/wire.py": "tests/multiproc/test_few_bits.py",
    "byteps/torch/world.py": "tests/multiproc/test_optimizer.py",
}
"""All modules of the wheel, and what tries each on a CPU. Another one is left out of the wheel
(wheel.exclude in byteps/pyproject.toml) or gets a test, and a line here."""


def test_each_module_of_the_wheel_has_its_test() -> None:
    files = importlib.metadata.files("byteps")
    assert files is not None
    assert {str(file) for file in files if file.suffix == ".py"} == set(MODULES)
    for module, test in MODULES.items():
        assert not test or (ROOT / test).is_file(), module
