"""The library behind `import nmoe`: what the commands do, as functions."""
