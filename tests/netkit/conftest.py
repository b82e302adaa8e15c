"""The tests of networks that lose, delay or cut packets use the programs of a cluster's tests."""

from __future__ import annotations
