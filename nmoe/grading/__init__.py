"""Graders: functions that give any answer a grade. No input makes them raise or hang; an ambiguous answer counts as incorrect."""
