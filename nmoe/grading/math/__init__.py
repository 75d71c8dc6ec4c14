"""Decides whether two mathematical answers are equivalent, in layers: as texts, numbers, forms and symbolic expressions."""
