"""Layouts by ranks as torchrun starts them, and by ranks under Ray."""
