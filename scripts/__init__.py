"""The project's own programs."""

import sys
from pathlib import Path

# `byteps.patching` must be found where byteps is neither built nor installed. An installed one
# comes first.
sys.path.append(str(Path(__file__).resolve().parents[1] / "byteps"))  # noqa: TID251
