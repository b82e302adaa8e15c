"""Runs ``megatron-byteps`` as ``python -m byteps.cli``."""

import sys

from byteps.cli import main

sys.exit(main())
