"""The page of the dashboard: files that a browser loads. Nothing makes HTML of a text."""

from pathlib import Path

from nmoe.web import Page

PAGE = Page(Path(__file__).parent, "'none'")
