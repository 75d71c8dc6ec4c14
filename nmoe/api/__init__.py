"""The functions and classes behind `import nmoe`; they do the same as the commands."""
