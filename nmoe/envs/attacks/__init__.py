"""Answers that must not be paid: to questions with a short answer (`texts`), and to tasks that run code (`code`)."""
