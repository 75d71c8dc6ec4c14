"""Exact numerics: operations that give a row the same bits in any batch."""
