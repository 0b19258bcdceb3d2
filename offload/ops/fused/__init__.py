"""Attention of a tile in Triton, for cards of compute capability 8.0 and newer."""
