"""Equivalence of mathematical answers: text, number, form, symbolic value, and the policy between them."""
