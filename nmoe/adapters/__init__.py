"""nmoe's environments in the forms that other trainers take."""
