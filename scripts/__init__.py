"""The project's own programs."""

import sys
from pathlib import Path

# The package `byteps.patching` must be found even if byteps is neither built nor installed. An
# installed one comes first.
sys.path.append(str(Path(__file__).resolve().parents[1] / "byteps"))  # noqa: TID251
