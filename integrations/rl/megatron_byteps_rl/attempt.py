"""``python -m verl.trainer.main_ppo`` that ends when one of its actors dies."""

from __future__ import annotations

from verl.trainer.main_ppo import main

from . import deaths

if __name__ == "__main__":
    deaths.watch()
    main()
