#!/usr/bin/env python3
"""Lay the timelines of a job's processes beside each other, for ui.perfetto.dev.

Takes those of BytePS and traces of torch.profiler (.json or .json.gz). Times of one host belong
together, those of several hosts as far as their clocks agree.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "integrations" / "ray"))

from megatron_byteps_ray.traces import merge


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "files", nargs="+", type=Path, help="byteps-*.json of BYTEPS_TRACE_DIR, torch's traces"
    )
    parser.add_argument("-o", "--output", type=Path, required=True, help="file to write")
    arguments = parser.parse_args()
    try:
        text = json.dumps(merge(arguments.files), ensure_ascii=False)
        arguments.output.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
