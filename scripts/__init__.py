"""Programs of this project."""

import sys
from pathlib import Path

# Scripts must find the package `byteps.patching` even if byteps is neither built nor installed. An
# installed byteps comes first.
sys.path.append(str(Path(__file__).resolve().parents[1] / "byteps"))  # noqa: TID251
