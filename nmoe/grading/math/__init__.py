"""Whether two mathematical answers are the same: text, number, form, symbolic value, and the policy between them."""
